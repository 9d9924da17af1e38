"""Intervals and rank correlations against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pyinertia.eval.agreement import agreement
from pyinertia.eval.overlap import compare
from pyinertia.eval.statistics import (
    jaccard,
    log_softmax,
    most_share,
    score_interval,
    spearman,
    t_interval,
    t_quantile,
)


def test_student_by_hand():
    # mean 3, variance 2.5, and 2.776 of Student's table at 4 degrees of freedom
    half = 2.776445 * math.sqrt(2.5 / 5)
    assert t_interval([[1, 2, 3, 4, 5]]) == pytest.approx((3, 3 - half, 3 + half), rel=1e-6)


def test_quantiles_are_those_of_students_table():
    table = {
        1: 12.7062,
        2: 4.30265,
        4: 2.77645,
        7: 2.36462,
        30: 2.04227,
        1000: 1.96234,
        1e7: 1.95996,
    }
    for freedom, quantile in table.items():
        assert t_quantile(freedom) == pytest.approx(quantile, abs=1e-4)
    # the density by its definition, at degrees that are not whole
    x = np.linspace(-t_quantile(2.5), t_quantile(2.5), 100_001)
    scale = math.gamma(1.75) / (math.sqrt(2.5 * math.pi) * math.gamma(1.25))
    density = scale * (1 + x**2 / 2.5) ** -1.75
    assert np.sum((density[1:] + density[:-1]) / 2) * (x[1] - x[0]) == pytest.approx(0.95, abs=1e-5)


def test_tasks_by_hand():
    # variances 1 and 16/3 of 2 and 4 samples
    found = t_interval([[0, math.sqrt(2)], [6, 10, 6, 10]])
    parts = [1 / 2, np.var([6, 10, 6, 10], ddof=1) / 4]
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 1 + parts[1] ** 2 / 3)
    half = t_quantile(freedom) * math.sqrt(sum(parts)) / 2
    mean = (math.sqrt(2) / 2 + 8) / 2
    assert found == pytest.approx((mean, mean - half, mean + half))


@pytest.mark.parametrize("sizes", [[5], [8], [5, 5, 5, 5], [5, 20]])
def test_intervals_hold_the_mean_as_often_as_they_say(sizes):
    rng = np.random.default_rng(0)
    n_held, n = 0, 3000
    for _ in range(n):
        strata = [rng.normal(i, 1 + i, size).tolist() for i, size in enumerate(sizes)]
        found = t_interval(strata)
        n_held += found.low <= np.mean(range(len(sizes))) <= found.high
    assert 0.94 <= n_held / n <= 0.97  # of 3,000 trials 0.95 +- 0.004


def test_one_sample_and_equal_ones_tell_no_spread():
    for strata in ([[0.25]], [[0.25] * 9], [[1.0, 2.0], [3.0]]):
        found = t_interval(strata)
        assert found.mean == np.mean([np.mean(part) for part in strata])
        assert math.isnan(found.low)
        assert math.isnan(found.high)
    assert all(math.isnan(value) for value in t_interval([[]]))
    assert t_interval([[], [1.0, 2.0]]) == t_interval([[1.0, 2.0]])


def test_shares_are_bounded_as_in_the_tables():
    # Clopper and Pearson, 95 %: 0 of 10, 1 of 10, 0 of 32
    assert most_share(0, 10) == pytest.approx(0.3085, abs=1e-4)
    assert most_share(1, 10) == pytest.approx(0.4450, abs=1e-4)
    assert most_share(0, 32) == pytest.approx(1 - 0.025 ** (1 / 32), abs=1e-6)
    assert most_share(10, 10) == 1


def test_scores_that_rarely_differ_get_the_worst_case():
    # 32 pairs, one of which lost 0.2: as far as they tell, shares of losses and gains like these
    found = score_interval([[0.0] * 31 + [-0.2]])
    assert found == pytest.approx((-0.2 / 32, -most_share(1, 32), most_share(0, 32)))
    # five that differ tell a spread
    often = [0.0] * 3 + [-0.2, -0.4, 0.1, -0.3, -0.2]
    assert score_interval([often]) == t_interval([often])
    # shares, where 1 is no difference; the smaller task decides how many pairs there are
    found = score_interval([[1.0] * 8, [1.0] * 3], ties=1)
    assert found == pytest.approx((1, 1 - most_share(0, 6), 1))
    assert score_interval([[1.0, 0.9, 0.99, 0.999, 0.98, 0.97]], ties=1).high == 1  # of shares
    assert all(math.isnan(value) for value in score_interval([]))


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
