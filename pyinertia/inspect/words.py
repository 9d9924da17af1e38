"""A recording in plain words: what ran, what was dropped, and which passages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pyinertia.inspect.recording import Recording, Step

N_EXCERPT = 60  # characters from either end of a passage


class Passage(NamedTuple):
    """Tokens beside each other that all left.

    Attributes:
        start: Position of the first.
        n_tokens: How many.
        head: How it begins.
        tail: How it ends, "" if the head is all of it.
    """

    start: int
    n_tokens: int
    head: str
    tail: str


def settings(recording: Recording) -> str:
    """Policy, budget and model."""
    policy = recording.policy
    if recording.budget is None:
        return f"{recording.model} with the policy {policy}, which drops nothing."
    budget = recording.budget
    cells = f"{budget:.0%} of the prompt" if isinstance(budget, float) else f"{budget:,} cells"
    when = (
        "before each batch of the prompt and while it answers"
        if recording.prefill == "bounded"
        else "from the second token of the answer on"
    )
    stays = [f"the first {recording.n_sink} tokens"]
    stays += [f"positions {p0:,} to {p1 - 1:,} (protected)" for p0, p1 in recording.protected]
    return (
        f"{recording.model} with the policy {policy} and a budget of {cells}. Cells leave {when}; "
        f"{', '.join(stays)} and the newest {recording.n_recent} always stay."
    )


def run(recording: Recording) -> str:
    """Length, speed and end of the run."""
    n_prompt, n_answer = recording.n_prompt, recording.steps[-1].n_decoded
    speed = n_answer / recording.steps[-1].t_decode if recording.steps[-1].t_decode else 0.0
    ends = {
        "stop": "The model ended its answer.",
        "length": "The answer was cut off there (-n).",
        "context": "The answer ended where no position was left.",
        "interrupted": "The run was interrupted.",
    }
    text = (
        f"A prompt of {n_prompt:,} tokens, read at "
        f"{n_prompt / max(recording.t_prompt, 1e-9):,.0f} tokens per second"
    )
    if n_answer:
        text += f", and an answer of {n_answer:,}, at {speed:,.1f}"
    text += f". {ends[recording.end]}"
    if recording.every > 1:
        text += f" Shown is every {recording.every:,}th step, the first and the last."
    return text


def state(step: Step) -> str:
    """What is in the cache after a step."""
    n_cells = len(step.cells)
    n_dropped = step.n_tokens - n_cells
    if not n_dropped:
        return f"All {step.n_tokens:,} tokens are in the cache, nothing was dropped."
    return (
        f"{n_dropped:,} of {step.n_tokens:,} tokens were dropped, the model no longer sees them; "
        f"{n_cells:,} are in the cache."
    )


def passages(recording: Recording, n_most: int = 5) -> list[Passage]:
    """The longest runs of tokens that are gone at the end, longest first."""
    gone = np.flatnonzero(recording.lost_at() >= 0)
    if not gone.size:
        return []
    runs = np.split(gone, np.flatnonzero(np.diff(gone) > 1) + 1)
    runs.sort(key=len, reverse=True)
    return [_passage(recording, int(run[0]), len(run)) for run in runs[:n_most]]


def kept_shares(recording: Recording, n_bins: int) -> tuple[np.ndarray, np.ndarray]:
    """The share of positions that stay, by position and step.

    Returns:
        Shares, [n_steps, n_bins] float64, NaN where no token of a bin was read yet, and the first
        position of every bin, [n_bins + 1] with the end.
    """
    n_tokens = len(recording.tokens)
    edges = np.unique(np.linspace(0, n_tokens, min(n_bins, n_tokens) + 1).round().astype(int))
    shares = np.full((len(recording.steps), len(edges) - 1), np.nan)
    for row, step in zip(shares, recording.steps, strict=True):
        kept = np.histogram(step.cells["pos"], edges)[0]
        read = np.clip(step.n_tokens - edges[:-1], 0, np.diff(edges))
        np.divide(kept, read, out=row, where=read > 0)
    return shares, edges


def _passage(recording: Recording, start: int, n_tokens: int) -> Passage:
    text = _text(recording, start, start + n_tokens)
    if len(text) <= 2 * N_EXCERPT + 10:
        return Passage(start, n_tokens, text, "")
    return Passage(start, n_tokens, text[:N_EXCERPT].rstrip(), text[-N_EXCERPT:].lstrip())


def _text(recording: Recording, start: int, end: int) -> str:
    inside: Sequence[str] = [
        p.text for p in recording.pieces if p.start >= start and p.start + p.n_tokens <= end
    ]
    return " ".join("".join(inside).split())
