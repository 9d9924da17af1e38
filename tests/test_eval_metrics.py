"""Scores of hand-made answers, worked out by hand."""

from __future__ import annotations

import pytest

from pyinertia.eval import metrics


def test_ruler_looks_for_references_whatever_their_case():
    hits = metrics.found("It is ABLE-hand, and 17.", ["able-Hand", "16", "17", "18"])
    assert hits == [True, False, True, False]
    assert metrics.match_all(hits) == 0.5
    assert metrics.match_part(hits) == 1
    assert metrics.match_part([False, False]) == 0


def test_f1_ignores_articles_case_and_punctuation():
    # {red, fox, ran} and {red, fox, sleeps, today}: 2 in common, 2 * 2 / (3 + 4)
    assert metrics.f1("The red fox, ran!", "A red fox sleeps today") == pytest.approx(4 / 7)
    assert metrics.f1("the", "fox") == 0
    # a word counts as often as both have it
    assert metrics.f1("go go go", "go go") == pytest.approx(2 * 2 / 5)


def test_f1_of_chinese_counts_characters():
    # 北京 of 3 and 2 characters
    assert metrics.f1_zh("北京市。", "北京") == pytest.approx(2 * 2 / 5)
    assert metrics.characters("GPT4 在 2023 年。") == ["gpt4", "在", "2023", "年"]


def test_rouge_l_is_the_longest_common_subsequence():
    # "the cat sat" of 6 and 4 words: precision 3/4, recall 3/6
    score = metrics.rouge_l("the cat sat down", "the black cat sat on it")
    assert score == pytest.approx(2 * (3 / 4) * (3 / 6) / (3 / 4 + 3 / 6))
    assert metrics.rouge_l("", "a reference") == 0
    # 我去 of 3 and 4 characters
    assert metrics.rouge_l_zh("我去了", "我要去店") == pytest.approx(2 * 2 / 7)


def test_edit_similarity_takes_the_first_line_of_code():
    # abcd and abd: one deletion of 7 characters
    assert metrics.edit_similarity("# a comment\nabcd\nxyz", "abd") == pytest.approx(1 - 1 / 7)
    assert metrics.edit_similarity("```", "abd") == 0


def test_classification_shares_the_point_among_the_labels_named():
    classes = ["Food", "Animal", "Food and drink"]
    assert metrics.classification("An Animal", "Animal", classes) == 1
    assert metrics.classification("Food or Animal", "Animal", classes) == 0.5
    assert metrics.classification("Food", "Animal", classes) == 0
    # "Food" is part of the right label and not named by itself
    assert metrics.classification("Food and drink", "Food and drink", classes) == 1


def test_numbers_are_right_in_part():
    assert metrics.numbers("Paragraph 12, or 7", "Paragraph 12") == 0.5
    assert metrics.numbers("none", "5") == 0
    assert metrics.numbers("段落3", "段落3") == 1


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The correct answer is (C).", 1),
        ("**The correct answer is C**", 1),
        ("C", 1),
        (" (C) because", 1),
        ("The correct answer is (A), not (C).", 0),
        ("A good question. C", 0),
        ("I cannot tell", 0),
    ],
)
def test_choice(answer, score):
    assert metrics.choice(answer, "C") == score
