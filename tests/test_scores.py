"""Scores equal the method, computed in numpy from the softmax of an unpatched build.

Flash attention is off on both sides and nothing is cut, so cell = position throughout.
"""

from __future__ import annotations

import numpy as np
import pytest
import stock
from helpers import tokens

from pyinertia import KVPolicy, Llama

N_PROMPT, N_DECODE, N_WINDOW, N_POOL = 300, 32, 16, 7
LAYERS = {"smollm2": range(30), "gemma3": (5, 11, 17)}  # with full attention


@pytest.fixture(scope="module", params=["smollm2", "gemma3"])
def captured(request, stock_lib_dir):
    """Model name, model path, tokens, a [n_query, n_layer, n_kv] of the window and every step."""
    path = request.getfixturevalue(request.param)
    llm = Llama(path, n_ctx=512, vocab_only=True, verbose=False)
    ids = tokens(llm, N_PROMPT + N_DECODE)
    steps = [["eval", ids[:N_PROMPT]], *(["eval", [t]] for t in ids[N_PROMPT:])]
    context = {"n_ctx": 512, "n_threads": 2}
    out = stock.run(stock_lib_dir, model=path, context=context, steps=steps, n_capture=N_WINDOW)
    mass = out["attention"].astype(np.float64)[:, list(LAYERS[request.param])]
    assert np.allclose(mass.sum(axis=2), 1, atol=1e-3)
    return path, ids, mass


def method(mass: np.ndarray, aggregation: str, beta: float, lambda_: float) -> np.ndarray:
    """design.md section 3, on a[t, l, c] of N_WINDOW prompt queries and N_DECODE decode queries."""
    n_layer = mass.shape[1]
    weights = lambda_ ** np.arange(n_layer - 1, -1, -1.0)
    row = np.einsum("l,tlc->tc", weights / weights.sum(), mass)[:, : N_PROMPT + N_DECODE]

    first = row[: N_WINDOW + 1]
    first = first.sum(axis=0) if aggregation == "sum" else first.max(axis=0)
    n = N_PROMPT + 1  # resident when the first decode query looks at the cache
    score = np.zeros(N_PROMPT + N_DECODE)
    for c in range(n):
        score[c] = first[max(0, c - N_POOL // 2) : min(n, c + N_POOL // 2 + 1)].mean()
    for m in row[N_WINDOW + 1 :]:
        score = {
            "ema": beta * score + (1 - beta) * m,
            "sum": score + m,
            "last": m,
            "max": np.maximum(score, m),
        }[aggregation]
    return score


def ours(path, ids: list[int], **policy) -> np.ndarray:
    policy = KVPolicy(n_budget=512, n_window=N_WINDOW, n_pool=N_POOL, **policy)
    llm = Llama(path, n_ctx=512, n_threads=2, verbose=False, kv_policy=policy)
    llm.eval(ids[:N_PROMPT])
    for token in ids[N_PROMPT:]:
        llm.eval([token])
    cells = llm.kv_cells()
    assert cells["pos"].tolist() == list(range(N_PROMPT + N_DECODE))
    return cells["score"]


@pytest.mark.parametrize("lambda_", [1.0, 0.9])
@pytest.mark.parametrize("aggregation", ["ema", "sum", "last", "max"])
def test_scores_equal_the_method(captured, aggregation, lambda_):
    path, ids, mass = captured
    score = ours(path, ids, aggregation=aggregation, beta=0.95, lambda_=lambda_)
    expected = method(mass, aggregation, 0.95, lambda_)
    np.testing.assert_allclose(score, expected, rtol=1e-3, atol=1e-7)


def test_lambda_defaults_to_a_tilt_that_does_not_depend_on_depth(captured):
    path, ids, mass = captured
    n_layer = mass.shape[1]
    expected = method(mass, "ema", 0.95, 0.042 ** (1 / n_layer))
    np.testing.assert_allclose(ours(path, ids, beta=0.95), expected, rtol=1e-3, atol=1e-7)


def test_coupled_is_the_decoupled_pair(captured):
    """One EMA update per layer with b is beta = b^L and w_l ~ b^(L-1-l)."""
    path, ids, mass = captured
    b, n_layer = 0.99, mass.shape[1]
    coupled = ours(path, ids, aggregation="coupled", beta=b)
    pair = ours(path, ids, aggregation="ema", beta=b**n_layer, lambda_=b)
    np.testing.assert_allclose(coupled, pair, rtol=1e-5)

    # and it is what updating layer by layer gives, once the first ranking is in place
    score = method(mass[: N_WINDOW + 1], "ema", 0.0, b)
    for t in range(N_WINDOW + 1, len(mass)):
        for il in range(n_layer):
            score = b * score + (1 - b) * mass[t, il, : len(score)]
    np.testing.assert_allclose(coupled, score, rtol=1e-3, atol=1e-7)
