"""Scores as bytes."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyinertia.inspect.recording import Recording

LOG_SPAN = 20.0  # the scale is logarithmic if the highest score is so many times the median


class Scale(NamedTuple):
    """How scores become bytes: 1 is low or less, 255 is high, 0 is a score of 0 or less.

    Attributes:
        low: The score that all but the smallest hundredth have.
        high: The highest score.
        log: Whether the logarithm of the score is what is evenly divided.
        strong: The score that only a hundredth exceeds: from it on shades are the strongest, else
            a few sinks would leave no shades for all the others.
    """

    low: float
    high: float
    log: bool
    strong: float

    @property
    def top(self) -> int:
        """The byte of `strong`."""
        return int(self.bytes(np.array([self.strong], np.float32))[0])

    def levels(self, scores: npt.NDArray[np.float32], n_levels: int) -> npt.NDArray[np.intp]:
        """The shade of each score, [n] float32, from 0 to n_levels - 1: [n] intp."""
        of_bytes = self.bytes(scores).astype(np.intp) * n_levels // (self.top + 1)
        return np.minimum(of_bytes, n_levels - 1)

    def bytes(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Quantise scores, [n] float32, to [n] uint8."""
        values = np.clip(scores.astype(np.float64), self.low, self.high)
        if self.log:
            share = np.log(values / self.low) / math.log(self.high / self.low)
        else:
            share = (values - self.low) / ((self.high - self.low) or 1.0)
        return np.where(scores > 0, np.rint(1 + 254 * share), 0).astype(np.uint8)


def scale(recording: Recording) -> Scale:
    """The scale that all steps of a recording share."""
    every = np.concatenate([step.cells["score"] for step in recording.steps])
    positive = every[np.isfinite(every) & (every > 0)].astype(np.float64)
    if not positive.size:
        return Scale(0.0, 1.0, False, 1.0)
    low, median, strong = (float(q) for q in np.quantile(positive, (0.01, 0.5, 0.99)))
    high = float(positive.max())
    return Scale(low, high, high > LOG_SPAN * median, strong)
