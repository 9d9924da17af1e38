"""Intervals and rank correlations against their definitions."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from pyinertia.eval.agreement import agreement
from pyinertia.eval.overlap import compare
from pyinertia.eval.statistics import bootstrap, jaccard, log_softmax, spearman


def test_bootstrap_has_the_quantiles_of_all_resamples():
    values = [-0.31, 0.02, 0.11, 0.47, 0.83, 1.9]
    means = [np.mean(picks) for picks in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(np.array(means, np.float64), [0.025, 0.975])
    found = bootstrap([values], n=200_000)
    assert found.mean == pytest.approx(np.mean(values))
    # all 46,656 resamples; drawing 200,000 leaves 0.002 of a quantile's rank
    spread = np.quantile(means, [0.023, 0.027, 0.973, 0.977])
    assert spread[0] <= found.low <= spread[1]
    assert spread[2] <= found.high <= spread[3]
    assert low < found.mean < high


def test_bootstrap_draws_within_every_task():
    # tasks whose samples do not differ leave nothing to chance, however far apart the tasks are
    assert bootstrap([[0.0] * 5, [1.0] * 3]) == (0.5, 0.5, 0.5)
    both = [np.mean([a, b]) for a in (0, 0.5, 1) for b in [3.0]]  # [0, 1] twice drawn, and 3
    found = bootstrap([[0.0, 1.0], [3.0]])
    assert (found.mean, found.low, found.high) == (1.75, both[0], both[-1])


def test_bootstrap_of_one_sample_and_of_none():
    assert bootstrap([[0.25]]) == (0.25, 0.25, 0.25)
    assert all(math.isnan(value) for value in bootstrap([[]]))


def test_spearman_by_hand():
    # ranks 1 2 3 4 and 2 1 4 3: 1 - 6 * 4 / (4 * 15)
    assert spearman([1, 5, 7, 9], [20, 10, 40, 30]) == pytest.approx(0.6)
    # a tie has rank 2.5: ranks 1 2.5 2.5 4 and 1 2 3 4
    assert spearman([0, 3, 3, 8], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 1], [1, 2]))


def test_jaccard_by_hand():
    assert jaccard([1, 2, 3], [2, 3, 4, 5]) == pytest.approx(2 / 5)
    assert jaccard([], []) == 1


def test_cells_are_compared_where_both_are():
    a = {"pos": [0, 2, 5, 9], "score": [0.1, 0.4, 0.2, 0.9]}
    b = {"pos": [0, 5, 7, 9], "score": [3.0, 2.0, 9.0, 5.0]}
    # common: 0, 5, 9 with ranks 1 2 3 and 2 1 3
    assert compare(a, b) == (pytest.approx(3 / 5), pytest.approx(0.5))


def test_agreement_by_hand():
    assert agreement([7, 8, 9, 4], [7, 8, 1, 4, 5]) == {
        "first_difference": 2,
        "match": 3 / 5,
        "identical": 0,
    }
    assert agreement([7, 8], [7, 8])["identical"] == 1
    assert agreement([7], [7, 8]) == {"first_difference": 1, "match": 0.5, "identical": 0}


def test_log_softmax_does_not_overflow():
    assert np.exp(log_softmax(np.array([1e4, 1e4], np.float32))) == pytest.approx([0.5, 0.5])
