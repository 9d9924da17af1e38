"""Tables on the terminal and a JSON file."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pyinertia.eval.arms import FULL_ARM, Arm
from pyinertia.eval.runner import Measured
from pyinertia.eval.settings import Item
from pyinertia.eval.statistics import Interval, score_interval
from pyinertia.eval.store import Result

DEPTH_BINS = 5

Rows = list[dict[str, Any]]

# rows for the JSON file, tables for the terminal, and what draws the plots into a folder
Findings = tuple[Rows, list[Table], Callable[[Path], list[Path]]]


def paired(measured: Measured, arm: Arm, value: str) -> dict[str, list[tuple[float, float]]]:
    """By task, a number of the arm and of the full cache on the samples that both have."""
    full = measured.of(FULL_ARM)
    pairs: dict[str, list[tuple[float, float]]] = {}
    for item, result in measured.of(arm).items():
        if item in full:
            pairs.setdefault(item[0], []).append((result[value], full[item][value]))
    return pairs


def difference(pairs: dict[str, list[tuple[float, float]]]) -> Interval:
    """Mean over tasks of what the arm has more than the full cache, with its interval."""
    return score_interval([[ours - theirs for ours, theirs in task] for task in pairs.values()])


def speed(results: Iterable[Result]) -> float:
    """Decoded tokens per second, by the median over answers of their mean step."""
    times = [result["t_token"] for result in results if result["t_token"] is not None]
    return 1 / median(times) if times else math.nan


def mean(values: Iterable[float]) -> float:
    """Mean, NaN of nothing."""
    values = list(values)
    return sum(values) / len(values) if values else math.nan


def head(arm: Arm, results: Mapping[Item, Result]) -> dict[str, Any]:
    """What a row says of every kind of evaluation."""
    return {
        "arm": arm.label,
        "policy": arm.name,
        "budget": arm.budget,
        "n_samples": len(results),
        "n_cells": mean(result["n_cells"] for result in results.values()),
    }


def score_rows(measured: Measured, arms: Sequence[Arm], tasks: Sequence[str]) -> Rows:
    """One row per arm: scores by task, their mean, the difference to the full cache, speed."""
    rows = []
    for arm in arms:
        results = measured.of(arm)
        if not results:
            continue
        by_task = {
            task: mean(result["score"] for (name, _), result in results.items() if name == task)
            for task in tasks
        }
        kept = [result["kept"] for result in results.values() if result["kept"] is not None]
        pairs = paired(measured, arm, "score")
        rows.append(
            {
                **head(arm, results),
                "score": mean(score for score in by_task.values() if not math.isnan(score)),
                "difference": difference(pairs)._asdict(),
                "by_task": {
                    task: {"score": score, **_task_difference(pairs.get(task, []))}
                    for task, score in by_task.items()
                },
                "kept": mean(kept),
                "tokens_per_second": speed(results.values()),
                "recall_by_depth": depth_recall(results),
            }
        )
    return rows


def scores(tasks: Sequence[str]) -> Callable[[Measured, Sequence[Arm]], Findings]:
    """What an evaluation with scores finds."""

    def find(measured: Measured, arms: Sequence[Arm]) -> Findings:
        rows = score_rows(measured, arms, tasks)

        def draw(prefix: Path) -> list[Path]:
            from pyinertia.eval import plots

            return plots.scores(prefix, rows)

        return rows, score_tables(rows, tasks), draw

    return find


def _task_difference(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    return {"n_samples": len(pairs), "difference": difference({"": pairs})._asdict()}


def depth_recall(results: dict[Item, Result]) -> list[float]:
    """Share of the answers found, by where in the prompt they stand."""
    found: list[list[bool]] = [[] for _ in range(DEPTH_BINS)]
    for result in results.values():
        for depth, hit in zip(result["depths"], result.get("found", []), strict=False):
            found[min(int(depth * DEPTH_BINS), DEPTH_BINS - 1)].append(hit)
    return [mean(hits) for hits in found]


def score_tables(rows: Rows, tasks: Sequence[str]) -> list[Table]:
    """The arms, and the tasks by arm."""
    columns = ("score", "minus full [95 %]", "facts kept", "cells", "tokens/s", "samples")
    arms = table("score and facts in %, means over tasks", "policy", columns)
    for row in rows:
        arms.add_row(
            row["arm"],
            percent(row["score"]),
            within(row["difference"], "+.1f", 100) if row["budget"] is not None else "",
            percent(row["kept"]),
            f"{row['n_cells']:.0f}",
            number(row["tokens_per_second"], ".1f"),
            str(row["n_samples"]),
        )
    if len(tasks) == 1:
        return [arms]
    by_task = table("score in %", "task", [row["arm"] for row in rows])
    for task in tasks:
        by_task.add_row(task, *(percent(row["by_task"][task]["score"]) for row in rows))
    return [arms, by_task]


def table(title: str, first: str, columns: Sequence[str]) -> Table:
    """A plain table of numbers by name."""
    made = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    made.add_column(first, no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def percent(share: float) -> str:
    """A share in %, empty for NaN."""
    return number(100 * share, ".1f")


def number(value: float, form: str) -> str:
    """A number, empty for NaN."""
    return "" if math.isnan(value) else format(value, form)


def within(interval: Mapping[str, float], form: str, scale: float = 1) -> str:
    """A mean with its interval; [?] where too few samples, or too few that differ, tell none."""
    mean, low, high = (number(scale * interval[key], form) for key in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]" if low else f"{mean} [?]" if mean else ""


def show(console: Console, tables: Sequence[Table], measured: Measured) -> None:
    """Print the tables, and what could not run."""
    for table in tables:
        console.print(table)
    for refusal in measured.refusals:
        console.print(f"{refusal.label} did not run: {refusal.reason}", markup=False)
    for note in measured.notes:
        console.print(f"note: {note}", markup=False)


def write_json(path: Path, settings: dict[str, Any], measured: Measured, rows: Rows) -> None:
    """Write everything that the tables show, and more digits of it."""
    content = {
        "settings": settings,
        "rows": rows,
        "refusals": [asdict(refusal) for refusal in measured.refusals],
        "notes": measured.notes,
        "interrupted": measured.interrupted,
    }
    text = json.dumps(_finite(content), indent=2, ensure_ascii=False)
    part = path.with_suffix(".part")
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(path)


def _finite(value: Any) -> Any:
    # JSON has no NaN
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return value
