"""What a cache still tells later: after a long text of the model's own, and at a second question.

The answer between is given, token by token, so that every policy plays the same one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from pyinertia.eval import metrics
from pyinertia.eval.draft import Draft, fit, fit_draft, span
from pyinertia.eval.haystack import prose
from pyinertia.eval.ruler import niah
from pyinertia.eval.sample import Sample
from pyinertia.eval.scored import Scored
from pyinertia.eval.settings import Item
from pyinertia.eval.vocabulary import Vocabulary

N_PREDICT = 48


@dataclass(frozen=True, kw_only=True)
class Talk(Draft):
    """A draft whose answer goes on, or has another question after it.

    Attributes:
        given: What the model is made to say.
        next_question: What is asked then; empty if it goes on speaking.
    """

    given: str
    next_question: str = ""

    def text(self, vocabulary: Vocabulary, with_prefix: bool = True) -> str:
        """The conversation up to the answer that is looked at."""
        prefix = self.answer_prefix if with_prefix else ""
        if self.next_question:
            return vocabulary.chat(
                self.message, self.given, self.next_question, answer_prefix=prefix
            )
        return vocabulary.chat(self.message, answer_prefix=f"{self.given}{prefix}")


# a talk from a vocabulary, a generator and the number of words of the text
Builder = Callable[[Vocabulary, random.Random, int], Talk]


def after_a_text(n_tokens: int) -> Builder:
    """A number that is asked for at once, and told after so many tokens of prose."""

    def build(vocabulary: Vocabulary, rng: random.Random, n: int) -> Talk:
        seed = rng.random()

        def given(n_words: int) -> str:
            return " ".join(prose(random.Random(seed), n_words))

        draft = niah()(rng, 0, n)
        n_words = fit(lambda n: len(vocabulary.encode(given(n))), n_tokens, 1) or 1
        return Talk(
            intro=draft.intro,
            context=draft.context,
            question=f"Go on with the text above. After that, answer: {draft.question}",
            given=given(n_words),
            answer_prefix=f"\n\n{draft.answer_prefix}",
            answers=draft.answers,
            facts=draft.facts,
        )

    return build


def second_question(n_keys: int = 4) -> Builder:
    """Numbers of which one is asked for, then another."""

    def build(_: Vocabulary, rng: random.Random, n: int) -> Talk:
        draft = niah(n_keys=n_keys, n_queries=2)(rng, 0, n)
        told = [f"t{fact[1:]}" for fact in draft.facts]
        first, second = (
            of.removesuffix(f" is {is_}.") for of, is_ in zip(told, draft.answers, strict=True)
        )
        return Talk(
            intro=draft.intro,
            context=draft.context,
            question=f"What is {first} in the text above?",
            given=f"In the text above, {told[0]}",
            next_question=f"What is {second} in the text above?",
            answer_prefix=f"In the text above, {second} is",
            answers=draft.answers[1:],
            facts=draft.facts[1:],
        )

    return build


TASKS: Mapping[str, Builder] = MappingProxyType(
    {
        "after_300": after_a_text(300),
        "after_1000": after_a_text(1000),
        "second_question": second_question(),
    }
)


def make_sample(name: str, vocabulary: Vocabulary, *, length: int, seed: int, index: int) -> Sample:
    """Build a sample of a task, as long as it may be.

    Raises:
        EvalError: The length has no room for the task.
    """
    draft, tokens, text = fit_draft(
        lambda n: TASKS[name](vocabulary, random.Random(f"{seed}/{name}/{index}"), n),
        vocabulary,
        what=name,
        length=length,
        n_predict=N_PREDICT,
        least=1,
    )
    find = partial(span, vocabulary, text, last=True)
    start, end = find(draft.given)
    if not draft.next_question:
        end = len(tokens)
    return Sample(
        task=name,
        index=index,
        prompt=tuple(tokens[:start]),
        continuation=tuple(tokens[start:end]),
        next_prompt=tuple(tokens[end:]),
        n_predict=N_PREDICT,
        answers=draft.answers,
        context_span=span(vocabulary, text, draft.context),
        question_span=find(draft.question),
        answer_spans=tuple(span(vocabulary, text, fact) for fact in draft.facts),
    )


def evaluation(vocabulary: Vocabulary, items: list[Item], *, length: int, seed: int) -> Scored:
    """Answers to samples of the tasks."""

    def make(item: Item) -> Sample:
        return make_sample(item[0], vocabulary, length=length, seed=seed, index=item[1])

    def score(text: str, sample: Sample) -> dict[str, Any]:
        hits = metrics.found(text, sample.answers)
        return {"score": metrics.match_all(hits), "found": hits}

    return Scored("later", items, make, score, complete=lambda scored: scored["score"] == 1)
