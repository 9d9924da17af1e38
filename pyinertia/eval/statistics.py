"""What numbers of a few samples say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: float
    low: float
    high: float


def bootstrap(
    strata: Sequence[Sequence[float]], level: float = 0.95, n: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile bootstrap of the mean over strata of their means.

    Samples are drawn with replacement within each stratum (a task). Of the differences between
    two arms on the same samples it makes the paired interval.
    """
    rng = np.random.default_rng(seed)
    arrays = [np.asarray(stratum, np.float64) for stratum in strata if len(stratum)]
    if not arrays:
        return Interval(np.nan, np.nan, np.nan)
    means = np.zeros(n)
    for array in arrays:
        means += array[rng.integers(len(array), size=(n, len(array)))].mean(axis=1)
    low, high = np.quantile(means / len(arrays), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(np.mean([array.mean() for array in arrays])), float(low), float(high))


def jaccard(a: Sequence[int], b: Sequence[int]) -> float:
    """The share of the elements of either set that are in both."""
    either = set(a) | set(b)
    return len(set(a) & set(b)) / len(either) if either else 1.0


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; ties get their mean rank, NaN where one side has only one value."""
    x, y = _ranks(np.asarray(a, np.float64)), _ranks(np.asarray(b, np.float64))
    x, y = x - x.mean(), y - y.mean()
    norm = np.sqrt((x @ x) * (y @ y))
    return float(x @ y / norm) if norm > 0 else float("nan")


def _ranks(values: Array) -> Array:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return np.asarray((last - (counts - 1) / 2)[inverse], np.float64)


def log_softmax(logits: npt.NDArray[np.floating]) -> Array:
    """Log-probabilities in float64."""
    x = logits.astype(np.float64)
    x -= x.max()
    return np.asarray(x - np.log(np.exp(x).sum()), np.float64)
