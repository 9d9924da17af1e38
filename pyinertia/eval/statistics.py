"""What numbers of a few samples say."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import comb
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

LEVEL = 0.95
N_LEAST = 5  # samples of a task, and pairs that differ, that a spread can be told from


class Interval(NamedTuple):
    """A mean and the ends of its 95 % confidence interval.

    Both ends are NaN where the sample does not tell them.
    """

    mean: float
    low: float
    high: float


def t_interval(strata: Sequence[Sequence[float]]) -> Interval:
    """Student's interval of the mean over strata (tasks) of their means.

    The variance is that of stratified samples, its degrees of freedom are Satterthwaite's (Cochran,
    Sampling Techniques, 3rd ed., 5.4). Of the differences between two arms on the same samples it
    makes the paired interval. A stratum of one sample, or values that are all the same, tell no
    spread: the ends are NaN then.
    """
    strata = [stratum for stratum in strata if len(stratum)]
    if not strata:
        return Interval(np.nan, np.nan, np.nan)
    mean = fmean(map(fmean, strata))
    if min(map(len, strata)) < 2:
        return Interval(mean, np.nan, np.nan)
    parts = [variance(stratum) / len(stratum) for stratum in strata]
    if not sum(parts) > 0:
        return Interval(mean, np.nan, np.nan)
    weights = [len(stratum) - 1 for stratum in strata]
    freedom = sum(parts) ** 2 / sum(v**2 / n for v, n in zip(parts, weights, strict=True))
    half = t_quantile(freedom) * sum(parts) ** 0.5 / len(strata)
    return Interval(mean, mean - half, mean + half)


def score_interval(strata: Sequence[Sequence[float]], ties: float = 0) -> Interval:
    """The interval of values of at most 1 and within 1 of `ties`, which most may be equal to.

    Such are differences of scores, and with ties at 1 shares. It is Student's if N_LEAST values are
    no ties. Fewer do not tell the spread of those that were not seen, and the ends are those of the
    worst case: all losses are of 1 and there are no gains, or the other way round. The share of
    losses is bounded by Clopper and Pearson (Biometrika 26, 1934), and so is that of gains; tasks
    count as if all had the samples of the smallest.
    """
    strata = [stratum for stratum in strata if len(stratum)]
    found = t_interval(strata)
    values = [value for stratum in strata for value in stratum]
    losses = sum(value < ties for value in values)
    gains = sum(value > ties for value in values)
    if strata and losses + gains < N_LEAST:
        n = len(strata) * min(map(len, strata))
        found = Interval(found.mean, ties - most_share(losses, n), ties + most_share(gains, n))
    return found._replace(high=min(found.high, 1.0))


@cache
def t_quantile(freedom: float) -> float:
    """The quantile of Student's t that 95 % of it lie within, to 4 digits; freedom is 1 or more."""
    # with t = sqrt(freedom) tan(angle), the density of the angle is cos^(freedom - 1)
    end = min(np.pi / 2, 10 / freedom**0.5)  # beyond is nothing that counts
    angles = np.linspace(0, end, 1 << 13)
    density = np.cos(angles) ** (freedom - 1)
    shares = np.concatenate([[0], np.cumsum(density[1:] + density[:-1])])
    return float(np.sqrt(freedom) * np.tan(np.interp(LEVEL * shares[-1], shares, angles)))


def most_share(k: int, n: int) -> float:
    """The largest share under which k or fewer of n would still be seen in 2.5 % of all samples."""
    low, high = 0.0, 1.0
    while k < n and high - low > 1e-9:
        share = (low + high) / 2
        seen = sum(comb(n, i) * share**i * (1 - share) ** (n - i) for i in range(k + 1))
        low, high = (share, high) if seen > (1 - LEVEL) / 2 else (low, share)
    return high


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
