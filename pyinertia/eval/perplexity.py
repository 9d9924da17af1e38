"""Perplexity of a text, and how far its predictions are from the full cache's, after a cut."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyinertia.eval import report
from pyinertia.eval.arms import FULL_ARM, Arm
from pyinertia.eval.passages import Passages
from pyinertia.eval.runner import Measured
from pyinertia.eval.sample import Sample
from pyinertia.eval.settings import Item
from pyinertia.eval.statistics import log_softmax, t_interval
from pyinertia.eval.store import Result

if TYPE_CHECKING:
    from pyinertia.llama import Llama

N_BEFORE = 2  # tokens predicted with all cells: after the prompt, and after its first decode step
EDGES = (0, 16, 64, 256, 1024, 4096)  # distances from the cut, in tokens


class Perplexity:
    """Teacher-forced play of a continuation; the full cache plays it first."""

    name = "ppl"
    needs_full = True

    def __init__(self, passages: Passages, n_samples: int) -> None:
        """Take that many passages."""
        self.items: list[Item] = [("text", index) for index in range(n_samples)]
        self._passages = passages
        self._full: list[npt.NDArray[np.float32]] = []

    def sample(self, item: Item) -> Sample:
        """Cut a passage."""
        return self._passages.sample(*item)

    def measure(self, llm: Llama, sample: Sample, arm: Arm) -> Result:
        """Measure every token of the continuation.

        Returns:
            Lists over tokens: `nll`, `kl` to the full cache, both in nats, and `top`, whether the
            likeliest token is the full cache's; and the cells in use at the end.
        """
        from pyinertia.eval.play import cache, teacher_forced

        ours = list(teacher_forced(llm, sample))
        if arm == FULL_ARM:
            self._full = ours
        lists: dict[str, list[Any]] = {"nll": [], "kl": [], "top": []}
        for mine, full, token in zip(ours, self._full, sample.continuation, strict=True):
            q, p = log_softmax(mine), log_softmax(full)
            lists["nll"].append(round(float(-q[token]), 6))
            lists["kl"].append(round(float(np.exp(p) @ (p - q)), 6))
            lists["top"].append(bool(q.argmax() == p.argmax()))
        return {**lists, **cache(llm, sample)}


def find(measured: Measured, arms: Sequence[Arm]) -> report.Findings:
    """Perplexity, KL and agreement after the cut, all tokens and by distance."""
    rows = [_row(measured, arm) for arm in arms if measured.of(arm)]
    bins = list(rows[0]["by_distance"]) if rows else []
    table = report.table(
        "after the cut; KL to the full cache in nats, by tokens since the cut",
        "policy",
        ("ppl", "x full [95 %]", "KL [95 %]", "same top, %", "cells", "samples", *bins),
    )
    for row in rows:
        full = row["budget"] is None
        ratio, kl = row["ppl_ratio"], row["kl"]
        table.add_row(
            row["arm"],
            f"{row['ppl']:.2f}",
            "" if full else report.within(ratio, ".3f"),
            "" if full else report.within(kl, ".4f"),
            "" if full else report.percent(row["same_top"]),
            f"{row['n_cells']:.0f}",
            str(row["n_samples"]),
            *("" if full else f"{part['kl']:.4f}" for part in row["by_distance"].values()),
        )

    def draw(prefix: Path) -> list[Path]:
        from pyinertia.eval import plots

        return plots.perplexity(prefix, rows)

    return rows, [table], draw


def _row(measured: Measured, arm: Arm) -> dict[str, Any]:
    results, full = measured.of(arm), measured.of(FULL_ARM)
    both = [(result, full[item]) for item, result in results.items() if item in full]
    after = slice(N_BEFORE, None)
    nll = [float(np.mean(result["nll"][after])) for result in results.values()]
    more = [float(np.mean(np.subtract(a["nll"], b["nll"])[after])) for a, b in both]
    kl = [float(np.mean(result["kl"][after])) for result in results.values()]
    top = [float(np.mean(result["top"][after])) for result in results.values()]
    return {
        **report.head(arm, results),
        "ppl": math.exp(report.mean(nll)),
        "ppl_ratio": {key: math.exp(v) for key, v in t_interval([more])._asdict().items()},
        "kl": t_interval([kl])._asdict(),
        "same_top": report.mean(top),
        "by_distance": dict(_by_distance(list(results.values()))),
    }


def _by_distance(results: list[Result]) -> list[tuple[str, dict[str, float]]]:
    longest = max(len(result["kl"]) for result in results) - N_BEFORE
    parts = []
    for start, end in zip(EDGES, (*EDGES[1:], longest), strict=True):
        end = min(end, longest)
        if start < end:
            taken = slice(N_BEFORE + start, N_BEFORE + end)
            part = partial(_mean_of, results, taken)
            parts.append((f"{start + 1}-{end}", {"kl": part("kl"), "ppl": math.exp(part("nll"))}))
    return parts


def _mean_of(results: list[Result], taken: slice, name: str) -> float:
    return report.mean(value for result in results for value in result[name][taken])
