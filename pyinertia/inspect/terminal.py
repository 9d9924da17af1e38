"""A recording on a terminal: the text with what was dropped, and a table."""

from __future__ import annotations

import math
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pyinertia.inspect import words
from pyinertia.inspect.recording import Recording
from pyinertia.inspect.scale import scale

DROPPED = "[-", "-]"  # around dropped text where there is no colour, as in wdiff
GONE = "dim strike"
# weak to strong; one hue, and bold beside it
SHADES = ("default", "cyan", "bright_cyan", "bold bright_cyan")
N_ROWS = 8  # of the table


def show(recording: Recording, console: Console) -> None:
    """Print all of it; without colour dropped text stands in brackets."""
    coloured = console.color_system is not None and not console.no_color
    for heading, answer in (("Prompt", False), ("Answer", True)):
        body = _body(recording, answer, coloured)
        if body.plain:
            console.print(Text(heading, style="bold"))
            if coloured:
                console.print(body, soft_wrap=True)
            else:
                console.file.write(body.plain + "\n")  # rich would turn tabs into spaces
            console.print()
    if recording.budget is not None:
        console.print(_legend(coloured))
        console.print()
    for line in (words.settings(recording), words.run(recording)):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(words.state(recording.steps[-1])), soft_wrap=True)
    for passage in words.passages(recording, 3):
        text = f"  {passage.n_tokens:,} tokens from position {passage.start:,} on: {passage.head}"
        console.print(Text(text + (f" ... {passage.tail}" if passage.tail else "")), soft_wrap=True)
    console.print()
    console.print(_table(recording))


def _body(recording: Recording, answer: bool, coloured: bool) -> Text:
    last = recording.steps[-1].cells
    levels = np.full(len(recording.tokens), -1)
    levels[last["pos"]] = scale(recording).levels(last["score"], len(SHADES))
    body = Text()
    here = [p for p in recording.pieces if (p.start >= recording.n_prompt) == answer]
    # a piece of several tokens is there as long as one of them is
    best = [int(levels[p.start : p.start + p.n_tokens].max()) for p in here]
    styles = [GONE if level < 0 else SHADES[level] for level in best]
    for style, run in groupby(zip(styles, here, strict=True), lambda pair: pair[0]):
        text = "".join(piece.text for _, piece in run)
        if coloured:
            body.append(text, style)
        else:
            body.append(text.join(DROPPED) if style == GONE else text)
    return body


def _legend(coloured: bool) -> Text:
    if not coloured:
        return Text(f"{'dropped'.join(DROPPED)}, the rest is in the cache")
    legend = Text("dropped", GONE)
    for name, style in zip(("low score", "", "", "high score"), SHADES, strict=True):
        legend.append("  ")
        legend.append(name or "...", style)
    return legend


def _table(recording: Recording) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "tokens read", "cells", "dropped", "tokens/s"):
        table.add_column(name, justify="right")
    n_steps = len(recording.steps)
    speeds = recording.speeds()
    for i in np.unique(np.linspace(0, n_steps - 1, min(N_ROWS, n_steps)).round().astype(int)):
        step, speed = recording.steps[i], speeds[i]
        n_cells = len(step.cells)
        table.add_row(
            f"{step.n_decoded:,}",
            f"{step.n_tokens:,}",
            f"{n_cells:,}",
            f"{step.n_tokens - n_cells:,}",
            "" if math.isnan(speed) else f"{speed:,.1f}",
        )
    return table
