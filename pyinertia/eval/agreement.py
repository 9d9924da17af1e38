"""Greedy text beside the full cache's, and a needle at every depth."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyinertia.eval import metrics, report
from pyinertia.eval.arms import FULL_ARM, Arm
from pyinertia.eval.draft import Draft
from pyinertia.eval.haystack import prose
from pyinertia.eval.report import DEPTH_BINS
from pyinertia.eval.ruler import Task, make_sample, niah
from pyinertia.eval.runner import Measured
from pyinertia.eval.sample import Sample
from pyinertia.eval.scored import Scored
from pyinertia.eval.settings import Item
from pyinertia.eval.statistics import score_interval
from pyinertia.eval.vocabulary import Vocabulary


def summary(rng: random.Random, _: int, n: int) -> Draft:
    """A text to sum up, whose answer nothing is looked for in."""
    return Draft(
        intro="Read the text below.",
        context=" ".join(prose(rng, n)),
        question="Now sum up the text above in about one hundred words.",
    )


TASKS = ("needle", "summary")


def task_of(item: Item) -> Task:
    """The task of an item; needles go through the depths, in the middle of each tenth or so."""
    name, index = item
    if name == "summary":
        return Task(summary, 128, metrics.match_all)
    depth = (index % DEPTH_BINS + 0.5) / DEPTH_BINS
    return Task(niah(depth=depth), 48, metrics.match_all)


def evaluation(vocabulary: Vocabulary, items: list[Item], *, length: int, seed: int) -> Scored:
    """Whole answers in the model's own words."""

    def make(item: Item) -> Sample:
        return make_sample(
            item[0],
            task_of(item),
            vocabulary,
            length=length,
            seed=seed,
            index=item[1],
            with_prefix=False,
        )

    def score(text: str, sample: Sample) -> dict[str, Any]:
        hits = metrics.found(text, sample.answers)
        return {"score": metrics.match_all(hits) if hits else None, "found": hits}

    return Scored("agree", items, make, score)


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> dict[str, float]:
    """How far two texts go together: tokens to the first difference, share of equal places."""
    equal = [a == b for a, b in zip(tokens, reference, strict=False)]
    longest = max(len(tokens), len(reference))
    first = equal.index(False) if False in equal else len(equal)
    return {
        "first_difference": first,
        "match": sum(equal) / longest if longest else 1.0,
        "identical": float(first == longest),
    }


def find(measured: Measured, arms: Sequence[Arm]) -> report.Findings:
    """Agreement with the full cache, and needles found."""
    rows = [_row(measured, arm) for arm in arms if measured.of(arm)]
    table = report.table(
        "greedy answers beside the full cache's",
        "policy",
        (
            "same tokens, % [95 %]",
            "identical, %",
            "first difference at",
            "needles found, %",
            "facts kept, %",
            "cells",
            "tokens/s",
            "samples",
        ),
    )
    for row in rows:
        full = row["budget"] is None
        table.add_row(
            row["arm"],
            "" if full else report.within(row["match"], ".1f", 100),
            "" if full else report.percent(row["identical"]),
            "" if full else f"{row['first_difference']:.1f}",
            report.percent(row["recall"]),
            report.percent(row["kept"]),
            f"{row['n_cells']:.0f}",
            report.number(row["tokens_per_second"], ".1f"),
            str(row["n_samples"]),
        )

    def draw(prefix: Path) -> list[Path]:
        from pyinertia.eval import plots

        return plots.agreement(prefix, rows)

    return rows, [table], draw


def _row(measured: Measured, arm: Arm) -> dict[str, Any]:
    results, full = measured.of(arm), measured.of(FULL_ARM)
    by_task: dict[str, list[dict[str, float]]] = {}
    for item, result in results.items():
        if item in full:
            pair = agreement(result["tokens"], full[item]["tokens"])
            by_task.setdefault(item[0], []).append(pair)
    pairs = [pair for task in by_task.values() for pair in task]
    matches = [[pair["match"] for pair in task] for task in by_task.values()]
    kept = [result["kept"] for result in results.values() if result["kept"] is not None]
    found = [result["score"] for result in results.values() if result["score"] is not None]
    return {
        **report.head(arm, results),
        "match": score_interval(matches, ties=1)._asdict(),
        "identical": report.mean(pair["identical"] for pair in pairs),
        "first_difference": report.mean(pair["first_difference"] for pair in pairs),
        "by_task": {
            task: {key: report.mean(p[key] for p in of_task) for key in of_task[0]}
            for task, of_task in by_task.items()
        },
        "recall": report.mean(found),
        "recall_by_depth": report.depth_recall(results),
        "kept": report.mean(kept),
        "tokens_per_second": report.speed(results.values()),
    }
