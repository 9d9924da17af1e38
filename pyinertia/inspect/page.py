"""A recording as one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from pyinertia.inspect import words
from pyinertia.inspect.recording import Recording
from pyinertia.inspect.scale import scale

FOLDER = Path(__file__).parent / "page"
N_LEVELS = 8  # shades; as many as in page.css


def data(recording: Recording) -> dict[str, Any]:
    """What the page's script shows.

    Returns:
        texts: pieces of text; counts: tokens of those pieces that have more than one; special:
        indices of control tokens; lost: by position, the index of the first step that lacks it, or
        -1; n_decoded, n_tokens, n_cells, speed, scored, states: by step; scores: a byte for each
        resident cell, by step and position, in base64; scale: what bytes mean.
    """
    scaled = scale(recording)
    scores = b"".join(scaled.bytes(step.cells["score"]).tobytes() for step in recording.steps)
    pieces = list(enumerate(recording.pieces))
    return {
        "texts": [piece.text for _, piece in pieces],
        "counts": {i: piece.n_tokens for i, piece in pieces if piece.n_tokens > 1},
        "special": [i for i, piece in pieces if piece.special],
        "n_prompt": recording.n_prompt,
        "lost": recording.lost_at().tolist(),
        "n_decoded": [step.n_decoded for step in recording.steps],
        "n_tokens": [step.n_tokens for step in recording.steps],
        "n_cells": [len(step.cells) for step in recording.steps],
        "speed": [None if math.isnan(s) else round(s, 2) for s in recording.speeds()],
        "scored": [bool(step.cells["score"].any()) for step in recording.steps],
        "states": [words.state(step) for step in recording.steps],
        "scores": base64.b64encode(scores).decode(),
        "scale": {**scaled._asdict(), "top": scaled.top},
    }


def html(recording: Recording) -> str:
    """The page; it fetches nothing, and its script is the only one that may run."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    style, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js")
    )
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    found = data(recording)
    # inside a script element only this can end it
    embedded = json.dumps(found, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    low, strong = (_number(found["scale"][key]) for key in ("low", "strong"))
    kind = "logarithmic" if found["scale"]["log"] else "even"
    environment = Environment(
        loader=FileSystemLoader(FOLDER), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("page.html").render(
        policy=policy,
        title=f"{recording.model}, {recording.policy}: what stays in the cache",
        style=Markup(style),
        script=Markup(script),
        data=Markup(embedded),
        lead=[words.settings(recording), words.run(recording)],
        n_steps=len(recording.steps),
        n_levels=N_LEVELS,
        low=low,
        high=f"{strong} or more",
        scale_name=f"score ({kind} scale)",
        has_parts=bool(found["counts"]),
        scale_label=f"Shades from light to strong are scores from {low} to {strong}",
        passages=words.passages(recording),
        rows=[
            (
                f"{step.n_decoded:,}",
                f"{step.n_tokens:,}",
                f"{len(step.cells):,}",
                f"{step.n_tokens - len(step.cells):,}",
                "" if math.isnan(speed) else f"{speed:,.1f}",
            )
            for step, speed in zip(recording.steps, recording.speeds(), strict=True)
        ],
    )


def _number(value: float) -> str:
    return np.format_float_positional(float(f"{value:.2g}"), trim="-")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
