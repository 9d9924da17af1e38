"""PNG plots. Only this file needs matplotlib, the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, which all common kinds of colour vision tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999933")
MARKERS = "os^DvPX*"
FULL_COLOUR = "#777777"

Rows = Sequence[dict[str, Any]]


def scores(prefix: Path, rows: Rows) -> list[Path]:
    """Draw score by budget, score by speed, and recall by depth where answers have places."""
    drawn = [_save(_score_by_budget(rows), prefix, "score-by-budget")]
    if any(not math.isnan(row["tokens_per_second"]) for row in rows):
        drawn.append(_save(_score_by_speed(rows), prefix, "score-by-speed"))
    if any(not math.isnan(recall) for row in rows for recall in row["recall_by_depth"]):
        drawn.append(_save(_recall_by_depth(rows), prefix, "recall-by-depth"))
    return drawn


def perplexity(prefix: Path, rows: Rows) -> list[Path]:
    """Draw KL by distance from the cut."""
    rows = [row for row in rows if row["budget"] is not None]
    if not rows:
        return []
    figure, axes = _axes("KL to the full cache, by distance from the cut")
    styles = {name: (colour, marker) for name, colour, marker in _styles(rows)}
    budgets = list(dict.fromkeys(row["budget"] for row in rows))
    lines = ("-", "--", ":", "-.")
    bins = list(rows[0]["by_distance"])
    for row in rows:
        colour, marker = styles[row["policy"]]
        axes.plot(
            range(len(bins)),
            [part["kl"] for part in row["by_distance"].values()],
            color=colour,
            marker=marker,
            linestyle=lines[budgets.index(row["budget"]) % len(lines)],
            label=row["arm"],
        )
    axes.set_xticks(range(len(bins)), bins)
    axes.set_xlabel("tokens since the cut")
    axes.set_ylabel("KL, nats per token")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return [_save(figure, prefix, "kl-by-distance")]


def agreement(prefix: Path, rows: Rows) -> list[Path]:
    """Draw equal tokens by budget, and needles found by depth."""
    drawn = []
    arms = [row for row in rows if row["budget"] is not None]
    if arms:
        figure, axes = _axes("greedy tokens equal to the full cache's")
        for name, colour, marker in _styles(arms):
            points = [(row["n_cells"], row["match"]) for row in arms if row["policy"] == name]
            _bars(axes, sorted(points, key=lambda point: point[0]), name, colour, marker)
        _log2(axes, [row["n_cells"] for row in arms])
        axes.set_xlabel("cells in use at the end of the answer")
        axes.set_ylabel("equal tokens, % (bars: 95 % interval)")
        axes.set_ylim(-3, 103)
        _legend(axes)
        drawn.append(_save(figure, prefix, "tokens-by-budget"))
    if any(not math.isnan(recall) for row in rows for recall in row["recall_by_depth"]):
        drawn.append(_save(_recall_by_depth(rows), prefix, "recall-by-depth"))
    return drawn


def overlap(prefix: Path, rows: Rows) -> list[Path]:
    """Draw both measures of every pair after the last step, by budget."""
    from pyinertia.eval.overlap import matrix

    drawn = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of_budget = [row for row in rows if row["budget"] == budget]
        step = max(row["step"] for row in of_budget)
        for measure, title, low in (
            ("jaccard", "Jaccard of kept cells", 0),
            ("spearman", "Spearman of scores", -1),
        ):
            names, values = matrix(of_budget, measure, step)
            figure = _heat_map(
                f"{title}, budget {budget}, after {step} steps",
                [[cell["mean"] for cell in line] for line in values],
                names,
                [name.replace("/", "/\n") for name in names],
                (low, 1),
                ".2f",
            )
            drawn.append(_save(figure, prefix, f"{measure}-{budget}"))
    return drawn


def claims(prefix: Path, rows: Rows) -> list[Path]:
    """Draw every claim's interval over the range that was claimed, by measure and budget."""
    drawn = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        of_budget = [
            row for row in rows if row["budget"] == budget and row["verdict"] != "not measured"
        ]
        measures = list(dict.fromkeys(row["measure"] for row in of_budget))
        if not measures:
            continue
        groups = [[row for row in of_budget if row["measure"] == name] for name in measures]
        figure = Figure(figsize=(8.5, 1.2 + 0.62 * len(measures) + 0.3 * len(of_budget)))
        figure.set_layout_engine("constrained")
        figure.suptitle(f"claims and 95 % intervals, budget {budget}", x=0.01, ha="left")
        heights = [len(group) + 1 for group in groups]
        panels = figure.subplots(len(groups), height_ratios=heights, squeeze=False)[:, 0]
        for axes, group in zip(panels, groups, strict=True):
            _claim_panel(axes, group)
        drawn.append(_save(figure, prefix, f"claims-{budget}"))
    return drawn


VERDICTS = {
    "confirmed": ("#009E73", "o"),
    "refuted": ("#D55E00", "X"),
    "inconclusive": ("#777777", "s"),
}


def _claim_panel(axes: Axes, rows: Rows) -> None:
    edges = []
    for y, row in enumerate(rows):
        colour, marker = VERDICTS[row["verdict"]]
        mean, low, high = (row["measured"][key] for key in ("mean", "low", "high"))
        bars = ([mean - low], [high - mean])
        axes.errorbar([mean], [y], xerr=bars, color=colour, marker=marker, capsize=3)
        sign, edge = row["range"].split()
        edges.append((sign == "above", float(edge)))
    axes.plot([edge for _, edge in edges], range(len(rows)), alpha=0)  # in sight
    left, right = axes.get_xlim()
    for y, (is_above, edge) in enumerate(edges):
        start, end = (edge, right) if is_above else (left, edge)
        axes.barh(y, end - start, left=start, height=0.8, color="#dcefe6", zorder=0)
    axes.set_xlim(left, right)
    axes.set_yticks(range(len(rows)), [f"{row['claim']}: {row['verdict']}" for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_title(f"{rows[0]['measure']} (shaded: claimed)", loc="left", fontsize=9)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _bars(
    axes: Axes,
    points: Sequence[tuple[float, dict[str, float]]],
    name: str,
    colour: str,
    marker: str,
) -> None:
    beside = 1.02 ** (MARKERS.index(marker) - 2)  # bars of one budget do not hide each other
    x, means = [x * beside for x, _ in points], [100 * p["mean"] for _, p in points]
    low = [100 * (p["mean"] - p["low"]) for _, p in points]
    high = [100 * (p["high"] - p["mean"]) for _, p in points]
    axes.errorbar(x, means, (low, high), color=colour, marker=marker, capsize=3, label=name)


def _score_by_budget(rows: Rows) -> Figure:
    figure, axes = _axes("score against the cells a policy may keep")
    for row in rows:
        if row["budget"] is None:
            _full_line(axes, 100 * row["score"])
    for name, colour, marker in _styles(rows):
        # the interval of the difference to the full cache, drawn around the score
        points = []
        for row in (row for row in rows if row["policy"] == name):
            shift = row["score"] - row["difference"]["mean"]
            around = {key: value + shift for key, value in row["difference"].items()}
            points.append((row["n_cells"], around))
        _bars(axes, sorted(points, key=lambda point: point[0]), name, colour, marker)
    _log2(axes, [row["n_cells"] for row in rows if row["budget"] is not None])
    axes.set_xlabel("cells in use at the end of the answer")
    axes.set_ylabel("score, %\n(bars: 95 % interval of the difference to full)")
    axes.set_ylim(-3, 103)
    _legend(axes)
    return figure


def _score_by_speed(rows: Rows) -> Figure:
    figure, axes = _axes("score against speed")
    for row in rows:
        if row["budget"] is None:
            axes.scatter(
                row["tokens_per_second"], 100 * row["score"], color=FULL_COLOUR, s=60, label="full"
            )
    for name, colour, marker in _styles(rows):
        points = [row for row in rows if row["policy"] == name]
        x = [row["tokens_per_second"] for row in points]
        y = [100 * row["score"] for row in points]
        axes.plot(x, y, color=colour, marker=marker, linestyle=":", label=name)
        for row, at in zip(points, zip(x, y, strict=True), strict=True):
            axes.annotate(
                row["arm"].removeprefix(f"{name} "),
                at,
                xytext=(5, 4),
                textcoords="offset points",
                fontsize=8,
                color=colour,
            )
    axes.set_xlabel("decoded tokens per second")
    axes.set_ylabel("score, %")
    axes.set_ylim(-3, 107)
    axes.margins(x=0.12)
    _legend(axes)
    return figure


def _recall_by_depth(rows: Rows) -> Figure:
    n_bins = len(rows[0]["recall_by_depth"])
    values = [[100 * recall for recall in row["recall_by_depth"]] for row in rows]
    edges = [round(100 * i / n_bins) for i in range(n_bins + 1)]
    return _heat_map(
        "answers found, %, by where they stand in the prompt",
        values,
        [row["arm"] for row in rows],
        [f"{a}-{b} %" for a, b in pairwise(edges)],
        (0, 100),
    )


def _heat_map(
    title: str,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    limits: tuple[float, float],
    form: str = ".0f",
) -> Figure:
    figure = Figure(
        figsize=(max(2.6 + 0.85 * len(columns), 6), 1.3 + 0.36 * len(rows)), layout="constrained"
    )
    axes = figure.add_subplot()
    figure.suptitle(title, x=0.01, ha="left")
    image = axes.imshow(values, cmap="cividis", vmin=limits[0], vmax=limits[1], aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    for i, line in enumerate(values):
        for j, value in enumerate(line):
            if not math.isnan(value):
                dark = value < sum(limits) / 2
                axes.text(
                    j, i, format(value, form), ha="center", va="center", fontsize=9,
                    color="white" if dark else "black",
                )  # fmt: skip
    figure.colorbar(image, ax=axes)
    return figure


def _axes(title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7.5, 4.8), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left")
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _styles(rows: Rows) -> list[tuple[str, str, str]]:
    names = list(dict.fromkeys(row["policy"] for row in rows if row["budget"] is not None))
    return [
        (name, COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)]) for i, name in enumerate(names)
    ]


def _legend(axes: Axes) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)


def _full_line(axes: Axes, value: float) -> None:
    axes.axhline(value, color=FULL_COLOUR, linestyle="--", label="full")


def _log2(axes: Axes, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    ticks = sorted({round(value) for value in values})
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    if ticks:
        axes.set_xlim(ticks[0] / 1.4, ticks[-1] * 1.4)


def _save(figure: Figure, prefix: Path, name: str) -> Path:
    path = prefix.with_name(f"{prefix.name}-{name}.png")
    figure.savefig(path, dpi=120)
    return path
