"""RULER prompts: seeded, of the right length, and their answers follow from their texts."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter

import pytest

from pyinertia.errors import EvalError
from pyinertia.eval import agreement, later, ruler
from pyinertia.eval.datasets import hotpotqa, squad
from pyinertia.eval.draft import fit
from pyinertia.eval.vocabulary import Vocabulary

# tokens that one more unit of a task takes at most
UNIT = dict.fromkeys(ruler.TASKS, 20) | {"niah_multikey_2": 30, "niah_multikey_3": 100, "fwe": 40}
NEEDLES = [name for name in ruler.TASKS if name.startswith("niah")]


def qa_tasks() -> dict[str, ruler.Task]:
    """Made-up questions on made-up documents of about 30 tokens."""
    names = [f"{a}{b}" for a in ("Ber", "Lum", "Tor", "Val") for b in ("ga", "lin", "mos", "ria")]
    texts = {name: f"{name} is a town of {7 * i + 3} houses." for i, name in enumerate(names)}
    rows = [
        {
            "title": name[:3],
            "context": texts[name],
            "question": f"How many houses has {name}?",
            "answers": [str(7 * i + 3)],
        }
        for i, name in enumerate(names)
    ]
    hotpot = [
        {
            "question": f"Which town has {7 * i + 3} houses?",
            "answer": name,
            "gold": [name, names[i - 1]],
            "context": [(other, texts[other]) for other in (name, names[i - 1], names[i - 2])],
        }
        for i, name in enumerate(names)
    ]
    return {"qa_1": ruler.qa_task(squad(rows)), "qa_2": ruler.qa_task(hotpotqa(hotpot))}


TASKS = {**ruler.TASKS, **qa_tasks()}


@pytest.fixture(scope="module")
def vocabulary(smollm2):
    return Vocabulary(smollm2)


@pytest.fixture(scope="module")
def make(vocabulary):
    @functools.cache
    def make(name: str, index: int = 0, length: int = 900, seed: int = 0, **kwargs):
        return ruler.make_sample(
            name, TASKS[name], vocabulary, length=length, seed=seed, index=index, **kwargs
        )

    return make


def test_there_are_thirteen():
    assert len(TASKS) == 13


@pytest.mark.parametrize("name", ruler.TASKS)
@pytest.mark.parametrize("length", [900, 1301])
def test_the_length_is_met_and_never_exceeded(make, name, length):
    sample = make(name, 0, length)
    used = len(sample.prompt) + sample.n_predict
    assert length - UNIT[name] < used <= length


def test_long_lists_repeat_words_more_often(make, vocabulary):
    sample = make("cwe", length=ruler.LONG)
    used = len(sample.prompt) + sample.n_predict
    assert ruler.LONG - UNIT["cwe"] < used <= ruler.LONG
    assert set(counted(vocabulary.decode(sample.prompt)).values()) == {30, 3}


@pytest.mark.parametrize("name", TASKS)
def test_samples_are_seeded(make, name):
    sample = make(name)
    assert make.__wrapped__(name) == sample
    assert make(name, index=1).prompt != sample.prompt
    assert make(name, seed=1).prompt != sample.prompt


@pytest.mark.parametrize("name", TASKS)
def test_the_prompt_has_the_answers_and_then_the_question(make, vocabulary, name):
    sample = make(name)
    start, end = sample.question_span
    before = vocabulary.decode(sample.prompt[:start])
    assert sample.answers
    if TASKS[name].score.__name__ == "match_all":
        assert all(answer in before for answer in sample.answers)
    else:
        assert any(answer in before for answer in sample.answers)
    assert "?" in vocabulary.decode(sample.prompt[start:end])
    assert all(stop <= start for _, stop in sample.answer_spans)


@pytest.mark.parametrize("name", [*NEEDLES, "vt"])
def test_the_facts_are_where_they_are_said_to_be(make, vocabulary, name):
    sample = make(name)
    assert len(sample.answer_spans) == len(sample.answers)
    for answer, (start, end) in zip(sample.answers, sample.answer_spans, strict=True):
        assert answer in vocabulary.decode(sample.prompt[start:end])
        assert end - start < 110


@pytest.mark.parametrize(
    ("name", "n_needles", "n_answers"),
    [
        ("niah_single_1", 1, 1),
        ("niah_single_2", 1, 1),
        ("niah_single_3", 1, 1),
        ("niah_multikey_1", 4, 1),
        ("niah_multivalue", 4, 4),
        ("niah_multiquery", 4, 4),
    ],
)
def test_needles_and_answers_are_counted_as_in_the_benchmark(
    make, vocabulary, name, n_needles, n_answers
):
    sample = make(name)
    text = vocabulary.decode(sample.prompt)
    assert len(re.findall(r"secret \w+ of \S+ is \S+\.", text)) == n_needles
    assert len(set(sample.answers)) == n_answers


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_one_needle_in_a_haystack_of_needles_has_the_key(make, vocabulary, name):
    sample = make(name)
    text = vocabulary.decode(sample.prompt)
    needles = re.findall(r"secret \w+ of (\S+) is (\S+)\.", text)
    asked = re.search(r"What is the secret \w+ of (\S+) in the text", text)[1]
    assert len(needles) > 5
    assert [value for key, value in needles if key == asked] == list(sample.answers)


def test_a_chain_of_variables_has_the_value(make, vocabulary):
    sample = make("vt")
    text = vocabulary.decode(sample.prompt)
    text = text[text.index("Answer:") :]  # after the example
    value = re.search(r"have the value (\d+)", text)[1]
    holders: list[str] = []
    for name, source in re.findall(r"LET (\w+) = (\w+)", text):
        if source == value or source in holders:
            holders.append(name)
    assert holders == list(sample.answers)
    assert len(holders) == 5


def counted(text: str) -> Counter[str]:
    """How often the words of the last numbered list occur."""
    start = text.rindex("Below is a numbered list")
    return Counter(re.findall(r"\d+\. (\S+)", text[start : text.index("Question", start)]))


def test_common_words_are_the_most_frequent(make, vocabulary):
    sample = make("cwe")
    counts = counted(vocabulary.decode(sample.prompt))
    assert {word for word, count in counts.items() if count == 6} == set(sample.answers)
    assert {count for word, count in counts.items() if word not in sample.answers} == {1}


def test_frequent_words_follow_the_zeta_distribution(make, vocabulary):
    sample = make("fwe", length=1500)
    text = vocabulary.decode(sample.prompt)
    words = text[text.index("\n\n") : text.rindex("Question")].split("\n\n")[1].split()
    (dots, _), *rest = Counter(words).most_common(4)
    assert dots == "..."
    assert [word for word, _ in rest] == list(sample.answers)
    # zeta(2) = pi^2 / 6: of 1000 words 607, 151, 67 and 37 have the ranks 1 to 4
    draft = ruler.frequent_words()(random.Random(0), 1500, 1000)
    counts = Counter(draft.context.split())
    assert [count for _, count in counts.most_common(4)] == [607, 151, 67, 37]


def test_the_documents_of_a_question_are_there_once(make, vocabulary):
    sample = make("qa_2", length=2000)
    text = vocabulary.decode(sample.prompt)
    houses = re.search(r"Which town has (\d+) houses", text)[1]
    assert text.count(f"{sample.answers[0]} is a town of {houses} houses.") == 1
    assert text.count("Document ") == 16  # all there are


def test_needles_of_agree_go_through_the_depths(vocabulary):
    items = [("needle", index) for index in range(5, 10)]
    found = agreement.evaluation(vocabulary, items, length=1500, seed=0)
    depths = [found.sample(item).depths[0] for item in items]
    assert depths == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9], abs=0.05)


@pytest.mark.parametrize(("name", "n_given"), [("after_300", 300), ("after_1000", 1000)])
def test_a_number_is_asked_for_before_a_long_text_and_told_after_it(vocabulary, name, n_given):
    sample = later.make_sample(name, vocabulary, length=1500, seed=0, index=0)
    played = len(sample.prompt) + len(sample.continuation)
    assert 1480 < played + sample.n_predict <= 1500
    assert sample.next_prompt == ()
    (answer,), ((start, end),) = sample.answers, sample.answer_spans
    prompt, given = vocabulary.decode(sample.prompt), vocabulary.decode(sample.continuation)
    key = re.search(r"the secret number of (\S+) in the text above\?", prompt)[1]
    fact = vocabulary.decode(sample.prompt[start:end])
    assert fact.strip().lower().removeprefix("the ") == f"secret number of {key} is {answer}."
    assert answer not in given
    text, told = given.rsplit("\n\n", 1)
    assert told == f"In the text above, the secret number of {key} is"
    assert n_given - 5 <= len(vocabulary.encode(text)) <= n_given


def test_the_second_question_is_about_another_number(vocabulary):
    sample = later.make_sample("second_question", vocabulary, length=900, seed=0, index=0)
    parts = (sample.prompt, sample.continuation, sample.next_prompt)
    assert 880 < sum(map(len, parts)) + sample.n_predict <= 900
    prompt, given, asked = (vocabulary.decode(part) for part in parts)
    hidden = dict(re.findall(r"The secret number of (\S+) is (\d{7})\.", prompt))
    assert len(hidden) == 4
    first = re.search(r"number of (\S+) in the text above\?", prompt)[1]
    second = re.search(r"number of (\S+) in the text above\?", asked)[1]
    assert first != second
    assert given == f"In the text above, the secret number of {first} is {hidden[first]}."
    assert asked.endswith(f"In the text above, the secret number of {second} is")
    assert sample.answers == (hidden[second],)
    ((start, end),) = sample.answer_spans
    assert f"{second} is {hidden[second]}." in vocabulary.decode(sample.prompt[start:end])


def test_without_the_prefix_the_answer_is_the_models_own(make, vocabulary):
    assert vocabulary.decode(make("vt").prompt).endswith("are:")
    assert vocabulary.decode(make("vt", with_prefix=False).prompt).endswith("assistant\n")


def test_a_length_without_room_is_refused(make):
    with pytest.raises(EvalError, match=r"vt: .* take \d+ tokens, --length 300 has no room"):
        make("vt", length=300)


@pytest.mark.parametrize("per_unit", [1, 7, 20])
def test_fit_finds_the_most_units(per_unit):
    assert fit(lambda n: 50 + per_unit * n, 1000, 1) == 950 // per_unit
    assert fit(lambda n: 1001 + n, 1000, 0) is None
    assert fit(lambda n: min(50 + n, 60), 1000, 0) >= 10  # no more units are to be had
