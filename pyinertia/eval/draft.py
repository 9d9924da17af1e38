"""A prompt before it has its length, and how it gets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pyinertia.errors import EvalError
from pyinertia.eval.vocabulary import Vocabulary

Span = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Draft:
    """The parts of a prompt, in the order in which they stand.

    Attributes:
        intro: What the text is and what to do with it.
        context: The long text.
        question: What is asked, after the text.
        answer_prefix: The start of the answer, given to the model.
        answers: What is looked for in the answer.
        facts: For every answer the piece of the context that tells it.
    """

    intro: str
    context: str
    question: str
    answer_prefix: str = ""
    answers: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()

    def text(self, vocabulary: Vocabulary, with_prefix: bool = True) -> str:
        """The whole prompt, in the model's chat template."""
        return vocabulary.chat(
            self.message, answer_prefix=self.answer_prefix if with_prefix else ""
        )

    @property
    def message(self) -> str:
        """What the user says."""
        return f"{self.intro}\n\n{self.context}\n\n{self.question}"


AnyDraft = TypeVar("AnyDraft", bound=Draft)


def fit(size: Callable[[int], int], limit: int, least: int) -> int | None:
    """The largest number of units whose size is within the limit; None if `least` is too many.

    The size is taken to grow with the number of units.
    """
    low, size_low = least, size(least)
    if size_low > limit:
        return None
    high = 2 * low + 1
    while (size_high := size(high)) <= limit:
        if size_high <= size_low:  # no more units are to be had
            return high
        low, size_low, high = high, size_high, 2 * high
    step = 0
    while (gap := high - low) > 1:
        # sizes grow nearly linearly: guess by that, and halve should the guesses not get there
        step += 1
        share = (limit - size_low) / (size_high - size_low) if step < 8 else 0.5
        middle = low + min(max(round(gap * share), 1), gap - 1)
        if (size_middle := size(middle)) <= limit:
            low, size_low = middle, size_middle
        else:
            high, size_high = middle, size_middle
    return low


def fit_draft(
    build: Callable[[int], AnyDraft],
    vocabulary: Vocabulary,
    *,
    what: str,
    length: int,
    n_predict: int,
    least: int,
    with_prefix: bool = True,
) -> tuple[AnyDraft, list[int], str]:
    """Give a draft as many units as fit: the draft, its tokens and its text.

    Raises:
        EvalError: Not even `least` units fit.
    """

    def text(n: int) -> str:
        return build(n).text(vocabulary, with_prefix)

    n = fit(lambda n: len(vocabulary.encode(text(n))), length - n_predict, least)
    if n is None:
        needed = len(vocabulary.encode(text(least))) + n_predict
        msg = (
            f"{what}: the shortest prompt and {n_predict} tokens of answer take {needed} tokens, "
            f"--length {length} has no room for them; use a greater one, or leave the task out"
        )
        raise EvalError(msg)
    return build(n), vocabulary.encode(text(n)), text(n)


def span(vocabulary: Vocabulary, text: str, part: str, *, last: bool = False) -> Span:
    """Tokens [start, end) that a part of a text takes; the ends may be off by one token."""
    start = text.rfind(part) if last else text.find(part)
    if start < 0:
        return (0, 0)
    before = len(vocabulary.encode(text[:start]))
    return (before, len(vocabulary.encode(text[: start + len(part)])))
