"""Scores of answers, in [0, 1]."""

from __future__ import annotations

import functools
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from pyinertia.errors import EvalError

# which of the references an answer has, and the score made of that
Match = Callable[[Sequence[bool]], float]

# the score of an answer against one reference, given all labels of the task
Metric = Callable[[str, str, Sequence[str]], float]


# -- RULER: references contained in the answer (arXiv 2404.06654) -----------------------------


def found(answer: str, references: Sequence[str]) -> list[bool]:
    """Which references the answer contains, letter case aside."""
    return [reference.lower() in answer.lower() for reference in references]


def match_all(hits: Sequence[bool]) -> float:
    """The share of the references that the answer contains."""
    return sum(hits) / len(hits)


def match_part(hits: Sequence[bool]) -> float:
    """1 if the answer contains any of the references."""
    return float(any(hits))


# -- LongBench: against one reference (arXiv 2308.14508) --------------------------------------


def normalized_words(text: str) -> list[str]:
    """Lower-case words without punctuation and articles, as SQuAD compares them."""
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def characters(text: str) -> list[str]:
    """Units of Chinese text: every character; Latin words and numbers stay whole."""
    return re.findall(r"[a-z0-9]+|[^\W_]", text.lower())


def f1(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the words that both have."""
    return _f1(normalized_words(answer), normalized_words(reference))


def f1_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F1 of the characters that both have (the benchmark compares words of a segmenter)."""
    return _f1(characters(answer), characters(reference))


def _f1(answer: list[str], reference: list[str]) -> float:
    same = sum((Counter(answer) & Counter(reference)).values())
    return 2 * same / (len(answer) + len(reference)) if same else 0.0


def require_libraries() -> None:
    """Refuse to start without the libraries of these scores.

    Raises:
        EvalError: One is missing.
    """
    for name in ("rouge_score", "rapidfuzz"):
        if find_spec(name) is None:
            msg = f"LongBench's scores need {name}; pip install 'pyinertia[eval]'"
            raise EvalError(msg)


def rouge_l(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F-measure of the longest common subsequence of words."""
    return float(_scorer("words").score(reference, answer)["rougeL"].fmeasure)


def rouge_l_zh(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """F-measure of the longest common subsequence of characters."""
    return float(_scorer("characters").score(reference, answer)["rougeL"].fmeasure)


@functools.cache
def _scorer(units: str) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    if units == "words":
        return RougeScorer(["rougeL"])
    return RougeScorer(["rougeL"], tokenizer=_Characters())


class _Characters:
    def tokenize(self, text: str) -> list[str]:
        return characters(text)


def edit_similarity(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """Similarity by insertions and deletions of the first line that is code, not a comment."""
    from rapidfuzz import fuzz

    lines = answer.lstrip("\n").split("\n")
    code = (line for line in lines if not any(mark in line for mark in ("`", "#", "//")))
    return float(fuzz.ratio(next(code, ""), reference)) / 100


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 / the number of labels named, if the right one is among them.

    A label that is part of the right one does not count as named.
    """
    named = [
        label
        for label in classes
        if label in answer and (label == reference or label not in reference)
    ]
    return 1 / len(named) if reference in named else 0.0


def numbers(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the reference's."""
    right = re.findall(r"\d+", reference)[:1]
    given = re.findall(r"\d+", answer)
    return sum(number in right for number in given) / len(given) if given else 0.0


# -- LongBench v2: a letter (arXiv 2412.15204) ------------------------------------------------


def choice(answer: str, reference: str, classes: Sequence[str] = ()) -> float:
    """1 if the answer names the right one of the choices A to D."""
    answer = answer.replace("*", "")
    named = re.search(r"answer is:? *\(?([A-D])\b", answer) or re.match(
        r"\s*\(?([A-D])(?:[).:,]|\s*$)", answer
    )
    return float(named is not None and named[1] == reference)
