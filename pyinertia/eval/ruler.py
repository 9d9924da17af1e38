"""The tasks of RULER (arXiv 2404.06654), in words of our own.

The structure is the benchmark's: what is hidden where, how many needles, keys, values, chains and
hops, how often words occur, where the question stands, that the start of the answer is given, how
many tokens the answer may have, how it is scored. A sample depends on nothing but the vocabulary,
the length, the seed and its index.

A length counts the prompt in its chat template and the room for the answer. It is never exceeded,
and missed by less than one unit of the task: a word or sentence of a few tokens, a needle of 20
(100 with UUIDs), a document.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from pyinertia.eval import metrics
from pyinertia.eval.datasets import Questions
from pyinertia.eval.draft import Draft, fit_draft, span
from pyinertia.eval.haystack import Haystack, hide, noise, number, prose, uuid, word_key
from pyinertia.eval.sample import Sample
from pyinertia.eval.scored import Scored
from pyinertia.eval.settings import Item
from pyinertia.eval.text import words
from pyinertia.eval.vocabulary import Vocabulary

# a draft from a generator, the length in tokens and the number of units
Builder = Callable[[random.Random, int, int], Draft]

Make = Callable[[random.Random], str]

DEPTHS = tuple(i / 39 for i in range(40))
LONG = 4096  # from this length on, words are repeated more often
KINDS: Mapping[Make, str] = {number: "number", uuid: "code"}


@dataclass(frozen=True)
class Task:
    """A task: its text, the tokens its answer may have, its score, its smallest number of units."""

    build: Builder
    n_predict: int
    score: metrics.Match
    least: int = 1


def niah(
    haystack: Haystack | None = prose,
    *,
    key: Make = word_key,
    value: Make = number,
    n_keys: int = 1,
    n_values: int = 1,
    n_queries: int = 1,
    depth: float | None = None,
) -> Builder:
    """Needles in a haystack; without a haystack it is made of other needles."""
    kind = KINDS[value]

    def needle(of: str, is_: str) -> str:
        return f"The secret {kind} of {of} is {is_}."

    def build(rng: random.Random, _: int, n: int) -> Draft:
        keys = distinct(key, rng, max(n_keys, n_queries))
        values = {of: distinct(value, rng, n_values) for of in keys}
        needles = [needle(of, is_) for of in keys for is_ in values[of]]
        queries = rng.sample(keys, n_queries)
        rng.shuffle(needles)
        depths = [depth] if depth is not None else rng.sample(DEPTHS, len(needles))
        lines = haystack(rng, n) if haystack else others(rng, n, keys)
        context = (" " if haystack is prose else "\n").join(hide(needles, depths, lines))
        answers = [(of, is_) for of in queries for is_ in values[of]]
        several = len(answers) > 1
        kinds, is_or_are = (f"{kind}s", "are") if several else (kind, "is")
        listed = ", ".join(queries[:-1]) + " and " + queries[-1] if n_queries > 1 else queries[0]
        return Draft(
            intro=f"The text below hides {'some' if several else 'a'} secret {kinds}. Remember "
            f"{'them' if several else 'it'}: the question comes after the text.",
            context=context,
            question=f"What {is_or_are} the secret {kinds} of {listed} in the text above?",
            answer_prefix=f"In the text above, the secret {kinds} of {listed} {is_or_are}",
            answers=tuple(is_ for _, is_ in answers),
            facts=tuple(needle(of, is_) for of, is_ in answers),
        )

    def others(rng: random.Random, n: int, keys: list[str]) -> list[str]:
        lines: list[str] = []
        while len(lines) < n:
            other = key(rng)
            if other not in keys:
                lines.append(needle(other, value(rng)))
        return lines

    return build


def variable_tracking(n_hops: int = 4) -> Builder:
    """A chain of assignments in noise, after one solved example."""

    def part(rng: random.Random, n: int, n_letters: int) -> Draft:
        names = distinct(
            lambda rng: "".join(rng.choices(string.ascii_uppercase, k=n_letters)), rng, n_hops + 1
        )
        value = str(rng.randrange(10_000, 100_000))
        lines = [f"LET {names[0]} = {value}"]
        lines += [f"LET {new} = {old}" for old, new in pairwise(names)]
        depths = sorted(rng.random() for _ in lines)
        return Draft(
            intro="The text below assigns a value to variables, to some of them by way of others. "
            "Keep track of it.",
            context="\n".join(hide(lines, depths, noise(rng, n))),
            question=f"Question: which variables have the value {value} in the text above?",
            answer_prefix=f"Answer: in the text above, the {n_hops + 1} variables with the value "
            f"{value} are:",
            answers=tuple(names),
            facts=tuple(lines),
        )

    def build(rng: random.Random, _: int, n: int) -> Draft:
        return after_example(part(rng, 25, 3), part(rng, n, 5), " ")

    return build


def common_words() -> Builder:
    """Ten words of a numbered list occur more often than the others, after one solved example."""

    def part(rng: random.Random, n_words: int, n_common: int, n_other: int) -> Draft:
        source = words()
        if n_words > len(source):
            source = tuple(distinct(word_key, rng, n_words))
        chosen = rng.sample(source, n_words)
        common = chosen[:10]
        listed = common * n_common + chosen[10:] * n_other
        rng.shuffle(listed)
        return Draft(
            intro="Below is a numbered list of words. Some of them occur more often than others: "
            "remember those.",
            context=" ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)),
            question="Question: which 10 words occur most often in the list above?",
            answer_prefix="Answer: the 10 words that occur most often in the list are:",
            answers=tuple(common),
        )

    def build(rng: random.Random, length: int, n: int) -> Draft:
        if length < LONG:
            example, task = part(rng, 20, 3, 1), part(rng, 10 + n, 6, 1)
        else:
            example, task = part(rng, 40, 10, 3), part(rng, 10 + n, 30, 3)
        solved = " ".join(f"{i}. {word}" for i, word in enumerate(example.answers, 1))
        return after_example(example, task, " ", solved)

    return build


def frequent_words(alpha: float = 2.0, n_letters: int = 6) -> Builder:
    """Made-up words, as often as a zeta distribution has it; the most frequent are dots."""
    zeta = {2.0: math.pi**2 / 6}[alpha]

    def build(rng: random.Random, length: int, n: int) -> Draft:
        names = distinct(
            lambda rng: "".join(rng.choices(string.ascii_lowercase, k=n_letters)),
            rng,
            max(length // 50, 4),
        )
        names[0] = "..."
        text = [
            word for rank, word in enumerate(names, 1) for _ in range(int(n * rank**-alpha / zeta))
        ]
        rng.shuffle(text)
        return Draft(
            intro="The text below is written in code words. Count how often each of them occurs, "
            "and find the three most frequent ones.",
            context=" ".join(text),
            question="Question: which three code words occur most often in the text above? Do not "
            "explain, and leave out the dots.",
            answer_prefix="Answer: the three code words that occur most often in the text above "
            "are:",
            answers=tuple(names[1:4]),
        )

    return build


def documents(source: Questions) -> Builder:
    """A question on one of many documents; those on the same subject come first."""

    def build(rng: random.Random, _: int, n: int) -> Draft:
        question = rng.choice(source.questions)
        related = rng.sample(question.related, len(question.related))
        near = {*question.gold, *related}
        others = [i for i in range(len(source.documents)) if i not in near]
        chosen = [*question.gold, *[*related, *rng.sample(others, len(others))][:n]]
        rng.shuffle(chosen)
        rule = "Answer the question from the documents. Write the answer and nothing else."
        return Draft(
            intro=f"{rule}\n\nThe documents:",
            context="\n\n".join(
                f"Document {number}:\n{source.documents[i]}" for number, i in enumerate(chosen, 1)
            ),
            question=f"{rule}\n\nQuestion: {question.text}",
            answer_prefix="Answer:",
            answers=question.answers,
        )

    return build


def after_example(example: Draft, task: Draft, gap: str, solved: str | None = None) -> Draft:
    """A draft with a solved example before it."""
    solved = " ".join(example.answers) if solved is None else solved
    shown = (
        f"{example.intro}\n\n{example.context}\n\n{example.question}\n"
        f"{example.answer_prefix}{gap}{solved}"
    )
    return Draft(
        intro=f"{shown}\n\n{task.intro}",
        context=task.context,
        question=task.question,
        answer_prefix=task.answer_prefix,
        answers=task.answers,
        facts=task.facts,
    )


def distinct(make: Make, rng: random.Random, n: int) -> list[str]:
    """Make n different strings."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[make(rng)] = None
    return list(found)


TASKS: Mapping[str, Task] = MappingProxyType(
    {
        "niah_single_1": Task(niah(noise), 128, metrics.match_all),
        "niah_single_2": Task(niah(), 128, metrics.match_all),
        "niah_single_3": Task(niah(value=uuid), 128, metrics.match_all),
        "niah_multikey_1": Task(niah(n_keys=4), 128, metrics.match_all),
        "niah_multikey_2": Task(niah(None), 128, metrics.match_all),
        "niah_multikey_3": Task(niah(None, key=uuid, value=uuid), 128, metrics.match_all),
        "niah_multivalue": Task(niah(n_values=4), 128, metrics.match_all),
        "niah_multiquery": Task(niah(n_queries=4), 128, metrics.match_all),
        "vt": Task(variable_tracking(), 30, metrics.match_all, least=25),
        "cwe": Task(common_words(), 120, metrics.match_all),
        "fwe": Task(frequent_words(), 50, metrics.match_all, least=60),
    }
)
QA_TASKS = ("qa_1", "qa_2")  # SQuAD and HotpotQA


def qa_task(source: Questions) -> Task:
    """A task of questions, which are not part of this package."""
    return Task(documents(source), 32, metrics.match_part, least=0)


def make_sample(
    name: str,
    task: Task,
    vocabulary: Vocabulary,
    *,
    length: int,
    seed: int,
    index: int,
    with_prefix: bool = True,
) -> Sample:
    """Build a sample of a task, as long as it may be.

    Raises:
        EvalError: The length has no room for the task.
    """
    draft, prompt, text = fit_draft(
        lambda n: task.build(random.Random(f"{seed}/{name}/{index}"), length, n),
        vocabulary,
        what=name,
        length=length,
        n_predict=task.n_predict,
        least=task.least,
        with_prefix=with_prefix,
    )
    return Sample(
        task=name,
        index=index,
        prompt=tuple(prompt),
        n_predict=task.n_predict,
        answers=draft.answers,
        context_span=span(vocabulary, text, draft.context, last=True),
        question_span=span(vocabulary, text, draft.question, last=True),
        answer_spans=tuple(span(vocabulary, text, fact, last=True) for fact in draft.facts),
    )


def evaluation(
    vocabulary: Vocabulary,
    items: list[Item],
    *,
    length: int,
    seed: int,
    with_prefix: bool = True,
    tasks: Mapping[str, Task] = TASKS,
    name: str = "ruler",
) -> Scored:
    """Answers to samples of the tasks, and how many of what was asked for they have."""

    def make(item: Item) -> Sample:
        task, index = item
        return make_sample(
            task,
            tasks[task],
            vocabulary,
            length=length,
            seed=seed,
            index=index,
            with_prefix=with_prefix,
        )

    def score(text: str, sample: Sample) -> dict[str, Any]:
        hits = metrics.found(text, sample.answers)
        return {"score": tasks[sample.task].score(hits), "found": hits}

    return Scored(name, items, make, score, complete=lambda scored: scored["score"] == 1)
