"""A recording as one PNG. Only this file needs matplotlib, the extra `plot`."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pyinertia.inspect import words
from pyinertia.inspect.recording import Recording
from pyinertia.inspect.scale import scale

SIZE, DPI = (11.0, 7.5), 120  # inches, pixels per inch
# two of Okabe and Ito's palette, which all common kinds of colour vision tell apart
KEPT, FULL = "#0072B2", "#D55E00"
N_BINS = 80  # of positions
DECADES = 4  # of scores below the highest that are in sight


def write(recording: Recording, path: Path) -> None:
    """Draw the kept share by position and step, the last scores, cells and speed."""
    figure = Figure(figsize=SIZE, layout="constrained")
    budget = "" if recording.budget is None else f", budget {recording.budget:,}"
    title = f"{recording.model}, {recording.policy}{budget}\n{words.state(recording.steps[-1])}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    (shares, scores), (cells, speed) = figure.subplots(2, 2, width_ratios=(1.25, 1))
    _shares(shares, recording)
    _scores(scores, recording)
    _cells(cells, recording)
    _speed(speed, recording)
    figure.savefig(path, dpi=DPI, format="png")


def _shares(axes: Axes, recording: Recording) -> None:
    shares, edges = words.kept_shares(recording, N_BINS)
    # a row lasts until the next step
    steps = [step.n_decoded for step in recording.steps]
    rows = [*steps, steps[-1] + recording.every]
    mesh = axes.pcolormesh(edges, rows, 100 * shares, cmap="cividis", vmin=0, vmax=100)
    axes.figure.colorbar(mesh, ax=axes, label="kept, %")
    axes.axvline(recording.n_prompt, color=FULL, linestyle="--", linewidth=1)
    axes.set_ylim(rows[-1], rows[0])
    _name(axes, "kept share by position and step (dashed: the answer begins)", "position", "step")


def _scores(axes: Axes, recording: Recording) -> None:
    cells = recording.steps[-1].cells
    score = cells["score"].astype(float)
    axes.scatter(cells["pos"], score, s=6, color=KEPT, linewidths=0)
    positive = score[score > 0]
    if positive.size and scale(recording).log:
        axes.set_yscale("log")
        axes.set_ylim(max(positive.min(), positive.max() / 10**DECADES) / 1.5, positive.max() * 1.5)
    axes.set_xlim(0, len(recording.tokens))
    _name(axes, "scores of what is left, at the end", "position", "score")


def _cells(axes: Axes, recording: Recording) -> None:
    steps = [step.n_decoded for step in recording.steps]
    n_tokens = [step.n_tokens for step in recording.steps]
    n_cells = [len(step.cells) for step in recording.steps]
    if n_cells != n_tokens:
        axes.plot(steps, n_tokens, color=FULL, linestyle="--", label="all tokens: a full cache")
    axes.plot(steps, n_cells, color=KEPT, label="cells", marker="o", markersize=3)
    axes.set_ylim(0, 1.1 * max(n_tokens))
    axes.legend(frameon=False, loc="best")
    _name(axes, "cells in the cache", "decode step", "cells")


def _speed(axes: Axes, recording: Recording) -> None:
    points = [
        (step.n_decoded, speed)
        for step, speed in zip(recording.steps, recording.speeds(), strict=True)
        if not math.isnan(speed)
    ]
    if points:
        axes.plot(*np.transpose(points), color=KEPT, marker="o", markersize=3)
    axes.set_ylim(bottom=0)
    _name(axes, "speed", "decode step", "tokens per second")


def _name(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if axes.collections and y == "step":
        return  # a grid would cover the map
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
