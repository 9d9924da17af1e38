"""The results as PNGs; matplotlib is the extra `plot`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyinertia.errors import BenchError

MIB = 2**20
SIZE, DPI = (10.0, 5.0), 120  # inches, pixels per inch
# Okabe and Ito, Color Universal Design (jfly.uni-koeln.de/color), grey for their yellow
COLOURS = ["#000000", "#E69F00", "#56B4E9", "#009E73", "#999999", "#0072B2", "#D55E00", "#CC79A7"]
MAX_TICKS = 6  # beyond, matplotlib places them
DODGE = 0.005  # of the width, between two sides
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]


class Line(NamedTuple):
    """A side over prompts or budgets: x, and the cell of each."""

    name: str
    x: list[int]
    cells: list[dict[str, float]]


class Metric(NamedTuple):
    """A number of a side, its axis title, and what a unit of it is."""

    name: str
    title: str
    unit: float = 1.0


class Panel(NamedTuple):
    """One pair of axes."""

    metric: Metric
    lines: list[Line]


class Figure(NamedTuple):
    """Panels beside each other over the same x."""

    panels: list[Panel]
    x_title: str
    title: str


DECODE = Metric("decode_ms", "decode, ms per token (less is better)")
PREFILL = Metric("prefill_per_second", "prefill, tokens per second (more is better)")
RSS = Metric("rss_peak", "peak RSS of the process, MiB", MIB)
KV = Metric("kv_bytes_used", "KV cells in use, MiB", MIB)
DOCUMENTS = Metric("documents", "documents an hour (more is better)")
DECODE_RATE = Metric("decode", "decode, tokens per second (more is better)")
STEADY = Metric("steady_ms", "ms per token")
STEADY_RSS = Metric("rss", "RSS of the process, MiB", MIB)


def check(folder: Path) -> None:
    """Make the folder; raise BenchError where it or matplotlib is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        msg = "--plots needs matplotlib; install it with: pip install 'pyinertia[plot]'"
        raise BenchError(msg) from error
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        msg = f"--plots {folder}: {error.strerror}"
        raise BenchError(msg) from error


def write(results: dict[str, Any], folder: Path) -> list[Path]:
    """Write the plots into a folder and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    model = Path(results["settings"]["model"]).name
    kinds = {"windows": _steady, "rows": _documents, "groups": _grid}
    made = dict(next(make for key, make in kinds.items() if key in results)(results))
    # what failed or was interrupted has no lines
    figures = {
        name: measured for name, figure in made.items() if (measured := _measured(figure)).panels
    }
    every_line = (
        line for figure in figures.values() for panel in figure.panels for line in panel.lines
    )
    names = list(dict.fromkeys(line.name for line in every_line))  # a side keeps its colour
    for name, figure in figures.items():
        _draw(folder / f"{name}.png", figure._replace(title=f"{model}, {figure.title}"), names)
    return [folder / f"{name}.png" for name in figures]


def _measured(figure: Figure) -> Figure:
    """The panels that have something to draw."""
    return figure._replace(panels=[panel for panel in figure.panels if panel.lines])


def _grid(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    """A set of figures per threads and KV types."""
    sets: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for group in results["groups"]:
        key = (group["n_threads"], group["type_k"], group["type_v"])
        sets.setdefault(key, []).append(group)
    budget = min(results["settings"]["budgets"])
    for (n_threads, type_k, type_v), groups in sets.items():
        suffix = f"-t{n_threads}-{type_k}-{type_v}" if len(sets) > 1 else ""
        what = f"KV {type_k}/{type_v}, {n_threads} threads"
        figures = {"decode": [DECODE], "prefill": [PREFILL], "memory": [RSS, KV]}
        for name, metrics in figures.items():
            panels = [Panel(metric, _over_prompts(groups, budget, metric)) for metric in metrics]
            title = f"budget {budget}, {what}"
            yield f"{name}_by_prompt{suffix}", Figure(panels, "prompt, tokens", title)
        longest = max(groups, key=lambda group: group["n_prompt"])
        panels = [Panel(DECODE, _over_budgets(longest, DECODE))]
        title = f"prompt {longest['n_prompt']}, {what}"
        yield f"decode_by_budget{suffix}", Figure(panels, "budget, cells", title)


def _steady(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    settings, windows = results["settings"], results["windows"]
    panels = []
    names = {STEADY: {"mean_ms": "mean", "median_ms": "median"}, STEADY_RSS: {"rss": "RSS"}}
    for metric, labels in names.items():
        x = [window["n_tokens"] for window in windows]
        columns = {label: [window[name] for window in windows] for name, label in labels.items()}
        lines = [
            Line(label, x, list(map(_point, values))) for label, values in columns.items() if values
        ]
        panels.append(Panel(metric, lines))
    title = f"{settings['policies'][0]}, budget {settings['budgets'][0]}"
    yield "steady", Figure(panels, "tokens decoded, ten windows", title)


def _documents(results: dict[str, Any]) -> Iterator[tuple[str, Figure]]:
    settings = results["settings"]
    rows = [row for row in results["rows"] if row["n_documents"]]
    panels = []
    for metric, (count, seconds, unit) in {
        DOCUMENTS: ("n_documents", "seconds", 3600),
        DECODE_RATE: ("n_decode", "t_decode", 1),
    }.items():
        lines = []
        for name in dict.fromkeys(row["name"] for row in rows):
            mine = [row for row in rows if row["name"] == name]
            cells = [_point(unit * row[count] / row[seconds]) for row in mine]
            lines.append(Line(name, [row["n_parallel"] for row in mine], cells))
        panels.append(Panel(metric, lines))
    title = f"{settings['documents']} documents, budget {settings['budgets'][0]}"
    yield "documents", Figure(panels, "documents at a time", title)


def _point(value: float | None) -> dict[str, float]:
    value = math.nan if value is None else value
    return {"median": value, "min": value, "max": value}


def _over_prompts(groups: list[dict[str, Any]], budget: int, metric: Metric) -> list[Line]:
    points = [
        (side, group["n_prompt"])
        for group in groups
        for side in group["sides"]
        if side["budget"] in (None, budget)
        # stock with a context of the budget has another prompt: only its decoding belongs here
        if metric == DECODE or side["n_prompt"] == group["n_prompt"]
    ]
    return _lines(points, metric)


def _over_budgets(group: dict[str, Any], metric: Metric) -> list[Line]:
    budgets = sorted({side["budget"] for side in group["sides"] if side["budget"]})
    points = [
        (side, budget)
        for side in group["sides"]
        for budget in budgets
        if side["budget"] in (None, budget)  # what has no budget is the same at all of them
    ]
    return _lines(points, metric)


def _lines(points: list[tuple[dict[str, Any], int]], metric: Metric) -> list[Line]:
    lines: dict[str, Line] = {}
    for side, x in points:
        if cell := side["summary"].get(metric.name):
            line = lines.setdefault(_name(side), Line(_name(side), [], []))
            line.x.append(x)
            line.cells.append(cell)
    return list(lines.values())


def _name(side: dict[str, Any]) -> str:
    short = side["kind"] == "stock" and side["budget"]
    return "stock, context = budget" if short else str(side["name"])


def _draw(path: Path, figure: Figure, names: list[str]) -> None:
    import matplotlib.figure

    panels, x_title, title = figure
    lines = [line for panel in panels for line in panel.lines]
    every_x = {x for line in lines for x in line.x}
    single = len(every_x) == 1
    if single:
        title += f", {x_title.partition(',')[0]} {every_x.pop()}"
    drawing = matplotlib.figure.Figure(figsize=SIZE, dpi=DPI, layout="constrained")
    drawing.suptitle(title, fontsize="medium")
    every_axes = drawing.subplots(1, len(panels), squeeze=False)[0]
    for axes, panel in zip(every_axes, panels, strict=True):
        (_draw_bars if single else _draw_lines)(axes, panel, names)
        axes.spines[["top", "right"]].set_visible(False)
    if not single:
        drawing.supxlabel(x_title, fontsize="medium")
        handles = {
            handle.get_label(): handle
            for axes in every_axes
            for handle in axes.get_legend_handles_labels()[0]
        }
        drawing.legend(handles=handles.values(), loc="outside right upper", frameon=False)
    drawing.savefig(path)


def _draw_lines(axes: Any, panel: Panel, names: list[str]) -> None:
    ticks = sorted({x for line in panel.lines for x in line.x})
    logarithmic = len(ticks) <= MAX_TICKS < ticks[-1] / ticks[0]
    for line in panel.lines:
        i = names.index(line.name)
        middle, errors = _values(line, panel.metric)
        aside = DODGE * (i - len(names) / 2)  # many sides have the same values
        if logarithmic:
            x = [x * (ticks[-1] / ticks[0]) ** aside for x in line.x]
        else:
            x = [x + (ticks[-1] - ticks[0]) * aside for x in line.x]
        axes.errorbar(
            x,
            middle,
            yerr=errors,
            label=line.name,
            color=COLOURS[i % len(COLOURS)],
            linestyle="-" if i < len(COLOURS) else "--",
            marker=MARKERS[i % len(MARKERS)],
            markersize=5,
            linewidth=1.2,
            elinewidth=0.8,
            capsize=3,
        )
    if len(ticks) <= MAX_TICKS:
        if logarithmic:
            axes.set_xscale("log")
            axes.minorticks_off()
        axes.set_xticks(ticks, [f"{x:,}" for x in ticks])
    axes.set_ylabel(panel.metric.title)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", linewidth=0.4, alpha=0.6)


def _draw_bars(axes: Any, panel: Panel, names: list[str]) -> None:
    for i, line in enumerate(panel.lines):
        colour = COLOURS[names.index(line.name) % len(COLOURS)]
        middle, errors = _values(line, panel.metric)
        axes.barh(i, middle[:1], xerr=errors, color=colour, ecolor="#777777", height=0.7)
        axes.text(middle[0] + errors[1][0], i, f"  {middle[0]:,.4g}", va="center", fontsize="small")
    axes.set_yticks(range(len(panel.lines)), [line.name for line in panel.lines])
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set_xlabel(panel.metric.title)
    axes.set_xlim(left=0)


def _values(line: Line, metric: Metric) -> tuple[list[float], list[list[float]]]:
    """Medians, and the distances to least and most."""
    rows = [[cell[key] / metric.unit for key in ("min", "median", "max")] for cell in line.cells]
    errors = [[middle - least for least, middle, _ in rows], [most - m for _, m, most in rows]]
    return [middle for _, middle, _ in rows], errors
