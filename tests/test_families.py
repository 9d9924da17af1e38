"""Every family of models: cells are ranked, leave and are seen no more as the method says.

The models of tiny_families.py have random weights, K and V in float32 and flash attention off, so
what llama.cpp computes in another order differs by rounding only.
"""

from __future__ import annotations

import numpy as np
import pytest
import stock
import tiny_families
from helpers import HolesLlama, logits, positions
from reference import first_ranking
from tiny_families import FAMILIES, N_WINDOW, Family

from pyinertia import KVPolicy, Llama

TOKENS = np.random.default_rng(0).integers(0, 256, 320).tolist()
N_PROMPT, N_DECODE, N_LOOK, N_POOL = 280, 12, 8, 3
CONTEXT = {"n_ctx": 512, "type_k": 0, "type_v": 0}
SMALL = {"n_budget": 48, "n_sink": 2, "n_recent": 20, "n_window": N_LOOK, "n_pool": N_POOL}


@pytest.fixture(scope="module", params=FAMILIES.items(), ids=FAMILIES)
def family(request) -> tuple[str, Family]:
    return request.param


@pytest.fixture(scope="module")
def path(family, tmp_path_factory):
    name, made_of = family
    path = tmp_path_factory.mktemp("family") / f"{name}.gguf"
    yield tiny_families.write(path, name, made_of)
    path.unlink()


@pytest.fixture(scope="module")
def oracle(stock_lib_dir):
    with stock.Process(stock_lib_dir) as process:
        yield process


def load(cls, path, **policy) -> Llama:
    return cls(
        path, n_threads=1, n_threads_batch=1, verbose=False, kv_policy=KVPolicy(**policy), **CONTEXT
    )


def play(llm: Llama, n_decode: int) -> tuple[np.ndarray, list]:
    """Logits after the prompt and each decode step, and what an engine-free cache is to do."""
    llm.eval(TOKENS[:N_PROMPT])
    out, steps = [logits(llm)], [["eval", TOKENS[:N_PROMPT]]]
    before = positions(llm)
    for token in TOKENS[N_PROMPT:][:n_decode]:
        llm.eval([token])
        out.append(logits(llm))
        now = positions(llm)
        steps += [["rm", sorted({*before} - {*now})], ["eval", [token]]]
        before = now
    return np.array(out), steps


def assert_rounded(given: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(expected).all()
    assert np.abs(given - expected).max() < 1e-4 * np.abs(expected).max()


def test_the_first_ranking_is_the_softmax_of_an_unpatched_build(family, path, oracle):
    layers = family[1].layers
    llm = load(Llama, path, **(SMALL | {"n_budget": 400}), lambda_=0.9)
    steps = play(llm, 1)[1]
    cells = llm.kv_cells()
    job = {"context": {**CONTEXT, "n_threads": 1}, "steps": steps, "n_capture": N_LOOK}
    found = oracle.run(model=path, **job)
    scored = np.isin(found["layers"], layers)
    assert scored.sum() == len(layers)
    prob = found["attention"][:, scored, :, : N_PROMPT + 1].astype(np.float64)
    expected = first_ranking(prob, 0.9, N_POOL)

    assert cells["pos"].tolist() == list(range(N_PROMPT + 1))
    np.testing.assert_allclose(cells["score"], expected, rtol=1e-3, atol=1e-7)


def test_eviction_is_removal_from_an_unpatched_cache(family, path, oracle):
    assert SMALL["n_recent"] > N_WINDOW
    if family[1].kind == "wide":
        pytest.skip("llama.cpp's removal is from the cache of the window, too, and it matters here")
    holes, steps = play(load(HolesLlama, path, **SMALL), N_DECODE)
    job = {"context": {**CONTEXT, "n_threads": 1}, "steps": steps}
    expected = oracle.run(model=path, **job)["logits"]
    if family[1].kind == "window":  # removal empties cells there, so new ones fill in another order
        assert_rounded(holes, expected)
    else:
        assert np.array_equal(holes, expected)


def test_what_must_stay_stays_and_the_fused_op_agrees(family, path):
    runs = {}
    for cls in (HolesLlama, Llama):
        llm = load(cls, path, **SMALL)
        out = play(llm, 1)[0]
        n_past = N_PROMPT + 1
        for token in TOKENS[n_past:][:N_DECODE]:
            llm.eval([token])
            n_past += 1
            out = np.vstack([out, logits(llm)])
            pos = positions(llm)
            assert len(pos) == SMALL["n_budget"]
            assert {0, 1, *range(n_past - SMALL["n_recent"], n_past)} <= {*pos}
        stats = llm.kv_stats()
        assert stats.n_evicted == n_past - SMALL["n_budget"]
        runs[cls] = out, pos, llm.kv_cells()["score"], stats.n_moved
    (expected, pos, score, unmoved), (given, same, ours, moved) = runs.values()
    assert unmoved == 0 < moved
    assert pos == same
    assert_rounded(given, expected)
    np.testing.assert_allclose(ours, score, rtol=1e-3, atol=1e-7)
