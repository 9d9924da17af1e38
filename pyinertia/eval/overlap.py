"""Do policies keep the same cells, and rank them alike?

All arms play the same text, so that their queries are the same but for what they lack. Compared are
the kept positions (Jaccard), and the scores of the positions that both still have (Spearman). After
step 1 nothing was cut yet: that is the first ranking of the whole prompt. Sinks and recent cells,
which every policy keeps, count too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pyinertia.eval import report
from pyinertia.eval.arms import Arm
from pyinertia.eval.passages import Passages
from pyinertia.eval.runner import Measured
from pyinertia.eval.sample import Sample
from pyinertia.eval.settings import Item
from pyinertia.eval.statistics import jaccard, score_interval, spearman, t_interval
from pyinertia.eval.store import Result

if TYPE_CHECKING:
    from pyinertia.llama import Llama

STEPS = (1, 2, 8, 32, 128, 512)  # decode steps after which cells are compared


def without_full(arms: list[Arm]) -> list[Arm]:
    """The arms that cut; the cells of the full cache are all of them."""
    return [arm for arm in arms if arm.budget is not None]


class Overlap:
    """The cells after some steps of a text."""

    name = "overlap"
    needs_full = False

    def __init__(self, passages: Passages, n_samples: int, n_tokens: int) -> None:
        """Compare after the steps that the continuation has."""
        self.items: list[Item] = [("text", index) for index in range(n_samples)]
        self._passages = passages
        self._steps = {step for step in STEPS if step <= n_tokens}

    def sample(self, item: Item) -> Sample:
        """Cut a passage."""
        return self._passages.sample(*item)

    def measure(self, llm: Llama, sample: Sample, arm: Arm) -> Result:
        """Play the text and note the cells: positions and scores, by step."""
        from pyinertia.eval.play import cache

        llm.eval(list(sample.prompt[llm.n_tokens :]))
        noted = {}
        for step, token in enumerate(sample.continuation[: max(self._steps)], 1):
            llm.eval([token])
            if step in self._steps:
                cells = llm.kv_cells()
                scores = [float(f"{score:.6g}") for score in cells["score"]]
                noted[str(step)] = {"pos": cells["pos"].tolist(), "score": scores}
        return {"cells": noted, **cache(llm, sample)}


def compare(a: dict[str, list[Any]], b: dict[str, list[Any]]) -> tuple[float, float]:
    """Jaccard of the positions of two lists of cells, Spearman of the scores of common ones."""
    common, i, j = np.intersect1d(a["pos"], b["pos"], assume_unique=True, return_indices=True)
    x, y = np.asarray(a["score"], float)[i], np.asarray(b["score"], float)[j]
    finite = np.isfinite(x) & np.isfinite(y)
    rank = spearman(x[finite], y[finite]) if common.size > 1 and finite.sum() > 1 else math.nan
    return jaccard(a["pos"], b["pos"]), rank


def find(measured: Measured, arms: Sequence[Arm]) -> report.Findings:
    """Means over samples for every pair of arms of one budget, after every step."""
    rows = []
    for budget in dict.fromkeys(arm.budget for arm in arms):
        same = [arm for arm in arms if arm.budget == budget]
        for a, b in combinations_with_replacement(same, 2):
            rows += _pair_rows(measured, a, b)
    tables = [
        _matrix([row for row in rows if row["budget"] == budget], measure)
        for budget in dict.fromkeys(row["budget"] for row in rows)
        for measure in ("jaccard", "spearman")
    ]

    def draw(prefix: Path) -> list[Path]:
        from pyinertia.eval import plots

        return plots.overlap(prefix, rows)

    return rows, tables, draw


def _pair_rows(measured: Measured, a: Arm, b: Arm) -> report.Rows:
    ours, theirs = measured.of(a), measured.of(b)
    by_step: dict[int, list[tuple[float, float]]] = {}
    for item in ours.keys() & theirs.keys():
        for step, cells in ours[item]["cells"].items():
            pair = compare(cells, theirs[item]["cells"][step])
            by_step.setdefault(int(step), []).append(pair)
    return [
        {
            "a": a.name,
            "b": b.name,
            "budget": a.budget,
            "step": step,
            "n_samples": len(pairs),
            "jaccard": score_interval([jaccards], ties=1)._asdict(),
            "spearman": t_interval([[rank for rank in ranks if not math.isnan(rank)]])._asdict(),
        }
        for step, pairs in sorted(by_step.items())
        for jaccards, ranks in [zip(*pairs, strict=True)]
    ]


def matrix(
    rows: report.Rows, measure: str, step: int
) -> tuple[list[str], list[list[dict[str, float]]]]:
    """The names, and a measure's interval after a step by pair of them."""
    names = list(dict.fromkeys(row["a"] for row in rows))
    values = {
        pair: row[measure]
        for row in rows
        if row["step"] == step
        for pair in ((row["a"], row["b"]), (row["b"], row["a"]))
    }
    nothing = dict.fromkeys(("mean", "low", "high"), math.nan)
    return names, [[values.get((a, b), nothing) for b in names] for a in names]


def _matrix(rows: report.Rows, measure: str) -> Any:
    step = max(row["step"] for row in rows)
    names, values = matrix(rows, measure, step)
    what = {"jaccard": "Jaccard of kept cells", "spearman": "Spearman of common cells' scores"}
    title = f"{what[measure]} [95 %], budget {rows[0]['budget']}, after {step} steps"
    table = report.table(title, "policy", names[:-1])
    for i in range(1, len(names)):  # each pair once, and none of a policy and itself
        table.add_row(names[i], *(report.within(cell, ".3f") for cell in values[i][:i]))
    return table
