"""Scores equal the method, computed in numpy from what an unpatched build computed.

Flash attention is off on both sides and nothing is cut, so cell = position throughout.
"""

from __future__ import annotations

from typing import NamedTuple

import cache_state
import numpy as np
import pytest
import stock
import tiny_models
from helpers import tokens
from reference import cell_values, learned_features, learned_row

from pyinertia import KVPolicy, Llama, learned
from pyinertia.policy import AGGREGATIONS, HEADS, KEY_SCORERS, QUERY_SCORERS

N_PROMPT, N_DECODE, N_WINDOW, N_POOL = 300, 32, 16, 7
N = N_PROMPT + N_DECODE
MODELS = {  # layers with full attention, KV heads
    "smollm2": (range(30), 3),
    "gemma3": ((5, 11, 17), 1),
    "tiny": (range(tiny_models.N_LAYER), tiny_models.N_HEAD_KV),
}
SCORERS = QUERY_SCORERS + KEY_SCORERS


class Captured(NamedTuple):
    path: str
    ids: list[int]
    prob: np.ndarray  # [n_query, n_layer, n_head, n_kv] of the window and every step
    k: np.ndarray  # [n_layer, n_cells, n_head_kv, n_embd_head]
    v: np.ndarray

    def values(self, scorer: str = "attention", heads: str = "mean") -> np.ndarray:
        """What each query says of each cell in each layer, [n_query, n_layer, N]."""
        kind = "mass" if scorer in {"attention", "learned"} else scorer
        n_query, n_layer = self.prob.shape[:2]
        out = np.zeros((n_query, n_layer, N))
        for t in range(n_query):
            n = N_PROMPT - N_WINDOW + t + 1  # cells it sees
            for il in range(n_layer):
                prob, k, v = self.prob[t, il, :, :n], self.k[il, :n], self.v[il, :n]
                out[t, il, :n] = cell_values(prob, k, v, kind, heads)
        return out


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module", params=MODELS)
def captured(request, stock_lib_dir):
    path = request.getfixturevalue(request.param)
    layers, n_head_kv = MODELS[request.param]
    llm = Llama(path, n_ctx=512, vocab_only=True, verbose=False)
    ids = tokens(llm, N)
    steps = [["eval", ids[:N_PROMPT]], *(["eval", [t]] for t in ids[N_PROMPT:])]
    context = {"n_ctx": 512, "n_threads": 2}
    out = stock.run(stock_lib_dir, model=path, context=context, steps=steps, n_capture=N_WINDOW)
    prob = out["attention"].astype(np.float64)[:, list(layers)]
    assert np.allclose(prob.sum(axis=3), 1, atol=1e-3)
    k, v = cache_state.keys_and_values(out["state"].tobytes(), n_head_kv)
    assert k.shape[:2] == (len(layers), N)
    return Captured(path, ids, prob, k, v)


def tilt(n_layer: int, lambda_: float) -> np.ndarray:
    return lambda_ ** np.arange(n_layer - 1, -1, -1.0)


def method(values, aggregation: str, beta: float, weights, of_keys: bool = False) -> np.ndarray:
    """Scores from values [t, l, c] of N_WINDOW prompt queries and the decode queries after them."""
    row = np.einsum("l,tlc->tc", weights / np.sum(weights), values)

    first = row[N_WINDOW:][:1] if of_keys else row[: N_WINDOW + 1]
    score = pooled(first.sum(axis=0) if aggregation == "sum" else first.max(axis=0))
    return follow(score, row[N_WINDOW + 1 :], aggregation, beta, whole=of_keys)


def pooled(first: np.ndarray) -> np.ndarray:
    n = N_PROMPT + 1  # resident when the first decode query looks at the cache
    score = np.zeros(N)
    for c in range(n):
        score[c] = first[max(0, c - N_POOL // 2) : min(n, c + N_POOL // 2 + 1)].mean()
    return score


def follow(score, rows, aggregation: str, beta: float, whole: bool) -> np.ndarray:
    """The first ranking and the rows after it; whole: a cell takes its first row as it is."""
    n_rows = 1.0 * (np.arange(N) <= N_PROMPT)
    for pos, m in enumerate(rows, N_PROMPT + 1):
        n_rows[: pos + 1] += 1
        new = {
            "ema": beta * score + (1 - beta) * m,
            "sum": score + m,
            "last": m,
            "max": np.maximum(score, m),
            "mean": score + (m - score) / np.maximum(n_rows, 1),
        }[aggregation]
        score = np.where(n_rows <= 1, m, new) if whole else new
    return score


def predicted(captured: Captured, heads: str, aggregation: str, weights, scorer) -> np.ndarray:
    """Scores of the learned scorer: what it predicts is its row."""
    weights = weights / weights.sum()
    row = np.einsum("l,tlc->tc", weights, captured.values("attention", heads))
    key, value = (weights @ captured.values(kind, heads)[-1] for kind in ("key-norm", "value-len"))
    ema = top = pooled(row[: N_WINDOW + 1].max(axis=0))
    rows = []
    for pos, m in enumerate(row[N_WINDOW:], N_PROMPT):
        if pos > N_PROMPT:
            ema, top = scorer.beta * ema + (1 - scorer.beta) * m, np.maximum(top, m)
        n = pos + 1
        seen = (x[:n] for x in (m, ema, top, key, value, np.arange(N)))
        rows.append(np.pad(learned_row(scorer, learned_features(*seen)), (0, N - n)))
    return follow(rows[0], rows[1:], aggregation, 0.95, whole=True)


def expected(captured: Captured, scorer: str, heads="mean", aggregation="ema") -> np.ndarray:
    """Scores with lambda_=0.9."""
    values = captured.values(scorer, heads)
    weights = tilt(values.shape[1], 0.9)
    if scorer == "learned":
        return predicted(captured, heads, aggregation, weights, learned.read())
    return method(values, aggregation, 0.95, weights, scorer in KEY_SCORERS)


def ours(captured: Captured, **policy) -> np.ndarray:
    ids = captured.ids
    policy = {"beta": 0.95, **policy}
    policy = KVPolicy(n_budget=512, n_window=N_WINDOW, n_pool=N_POOL, **policy)
    llm = Llama(captured.path, n_ctx=512, n_threads=2, verbose=False, kv_policy=policy)
    llm.eval(ids[:N_PROMPT])
    for token in ids[N_PROMPT:]:
        llm.eval([token])
    cells = llm.kv_cells()
    assert cells["pos"].tolist() == list(range(N))
    return cells["score"]


@pytest.mark.parametrize("lambda_", [1.0, 0.9])
@pytest.mark.parametrize("aggregation", ["ema", "sum", "last", "max", "mean"])
def test_scores_equal_the_method(captured, aggregation, lambda_):
    values = captured.values()
    score = ours(captured, aggregation=aggregation, lambda_=lambda_)
    wanted = method(values, aggregation, 0.95, tilt(values.shape[1], lambda_))
    np.testing.assert_allclose(score, wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("scorer", SCORERS[1:])
def test_every_scorer(captured, scorer):
    score = ours(captured, scorer=scorer, lambda_=0.9)
    np.testing.assert_allclose(score, expected(captured, scorer), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("captured", ["tiny"], indirect=True)
@pytest.mark.parametrize("aggregation", [name for name in AGGREGATIONS if name != "coupled"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("scorer", SCORERS)
def test_every_scorer_under_every_aggregation(captured, scorer, heads, aggregation):
    score = ours(captured, scorer=scorer, heads=heads, aggregation=aggregation, lambda_=0.9)
    wanted = expected(captured, scorer, heads, aggregation)
    np.testing.assert_allclose(score, wanted, rtol=1e-3, atol=1e-7)


def test_memory_is_counted_in_steps_not_in_scored_ones(captured):
    """What every fourth step sees is taken in as if it had been there four times."""
    values, r = captured.values(), 4
    weights = tilt(values.shape[1], 0.9)
    wanted = method(values[: N_WINDOW + 1], "ema", 0.0, weights)
    rows = np.einsum("l,tlc->tc", weights / weights.sum(), values)[N_WINDOW + 1 :]
    for m in rows[r - 1 :: r]:
        for _ in range(r):
            wanted = 0.9 * wanted + 0.1 * m
    score = ours(captured, beta=0.9, lambda_=0.9, n_refresh=r)
    np.testing.assert_allclose(score, wanted, rtol=1e-3, atol=1e-7)


def test_lambda_defaults_to_a_tilt_that_does_not_depend_on_depth(captured):
    values = captured.values()
    n_layer = values.shape[1]
    wanted = method(values, "ema", 0.95, tilt(n_layer, 0.042 ** (1 / n_layer)))
    np.testing.assert_allclose(ours(captured), wanted, rtol=1e-3, atol=1e-7)


def test_layers_can_have_any_weights(captured):
    values = captured.values()
    n_layer = values.shape[1]
    weights = np.random.default_rng(0).uniform(0, 5, n_layer)
    weights[0] = 0
    score = ours(captured, layer_weights=tuple(weights))
    np.testing.assert_allclose(score, method(values, "ema", 0.95, weights), rtol=1e-3, atol=1e-7)
    same = ours(captured, layer_weights=tuple(7 * tilt(n_layer, 0.9)))
    np.testing.assert_allclose(same, ours(captured, lambda_=0.9), rtol=1e-5)


def test_coupled_is_the_decoupled_pair(captured):
    """One EMA update per layer with b is beta = b^L and w_l ~ b^(L-1-l)."""
    values = captured.values()
    b, n_layer = 0.99, values.shape[1]
    coupled = ours(captured, aggregation="coupled", beta=b)
    pair = ours(captured, aggregation="ema", beta=b**n_layer, lambda_=b)
    np.testing.assert_allclose(coupled, pair, rtol=1e-5)

    # and it is what updating layer by layer gives, once the first ranking is in place
    score = method(values[: N_WINDOW + 1], "ema", 0.0, tilt(n_layer, b))
    for t in range(N_WINDOW + 1, len(values)):
        for il in range(n_layer):
            score = b * score + (1 - b) * values[t, il]
    np.testing.assert_allclose(coupled, score, rtol=1e-3, atol=1e-7)
