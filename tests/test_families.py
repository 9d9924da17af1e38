"""Every family of models: cells are ranked, leave and are seen no more as the method says.

The models of tiny_families.py have random weights, K and V in float32 and flash attention off, so
what llama.cpp computes in another order differs by rounding only.
"""

from __future__ import annotations

import re
from itertools import chain

import bootstrap
import numpy as np
import pages
import pytest
import stock
import tiny_families
from helpers import HolesLlama, logits, positions
from reference import first_ranking
from tiny_families import FAMILIES, N_WINDOW, REFUSED, UNTESTED, Family, architecture, coverage

from pyinertia import KVPolicy, Llama, PolicyError

PAGE = "docs/models.md"
TOKENS = np.random.default_rng(0).integers(0, 256, 320).tolist()
N_PROMPT, N_DECODE, N_LOOK, N_POOL = 280, 12, 8, 3
CONTEXT = {"n_ctx": 512, "type_k": 0, "type_v": 0}
SMALL = {"n_budget": 48, "n_sink": 2, "n_recent": 20, "n_window": N_LOOK, "n_pool": N_POOL}


@pytest.fixture(scope="module", params=FAMILIES)
def name(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def family(name) -> Family:
    return FAMILIES[name]


@pytest.fixture(scope="module")
def path(name, family, tmp_path_factory):
    path = tmp_path_factory.mktemp("family") / "family.gguf"
    yield tiny_families.write(path, name, family)
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


@pytest.fixture(scope="module")
def holes(path):
    """A run whose cut leaves holes: logits, steps for an engine-free cache, cells at the end."""
    llm = load(HolesLlama, path, **SMALL)
    out, steps = play(llm, N_DECODE)
    assert llm.kv_stats().n_moved == 0
    return out, steps, llm.kv_cells()


def assert_close(given: np.ndarray, expected: np.ndarray, rtol: float) -> None:
    assert np.isfinite(expected).all()
    assert np.abs(given - expected).max() < rtol * np.abs(expected).max()


def test_the_first_ranking_is_the_softmax_of_an_unpatched_build(family, path, oracle):
    llm = load(Llama, path, **(SMALL | {"n_budget": 400}), lambda_=0.9)
    steps = play(llm, 1)[1]
    job = {"context": {**CONTEXT, "n_threads": 1}, "steps": steps, "n_capture": N_LOOK}
    found = oracle.run(model=path, **job)
    scored = np.isin(found["layers"], family.layers)
    assert scored.sum() == len(family.layers)
    prob = found["attention"][:, scored, :, : N_PROMPT + 1].astype(np.float64)

    cells = llm.kv_cells()
    assert cells["pos"].tolist() == list(range(N_PROMPT + 1))
    expected = first_ranking(prob, 0.9, N_POOL)
    np.testing.assert_allclose(cells["score"], expected, rtol=1e-3, atol=1e-7)


def test_eviction_is_removal_from_an_unpatched_cache(family, path, holes, oracle):
    assert SMALL["n_recent"] > N_WINDOW
    if family.kind == "wide":
        pytest.skip("llama.cpp removes from the cache of the window, too, and it matters here")
    out, steps, _ = holes
    expected = oracle.run(model=path, context={**CONTEXT, "n_threads": 1}, steps=steps)["logits"]
    if family.kind == "window":  # its cells are filled in another order after a removal
        assert_close(out, expected, family.rtol)
    else:
        assert np.array_equal(out, expected)


def test_what_must_stay_stays_and_the_fused_op_agrees(family, path, holes):
    llm = load(Llama, path, **SMALL)
    llm.eval(TOKENS[:N_PROMPT])
    out = [logits(llm)]
    for n_past in range(N_PROMPT + 1, N_PROMPT + N_DECODE + 1):
        llm.eval(TOKENS[n_past - 1 : n_past])
        out.append(logits(llm))
        if n_past > N_PROMPT + 1:  # the first decode query sees all that it ranks
            pos = positions(llm)
            assert len(pos) == SMALL["n_budget"]
            assert {0, 1, *range(n_past - SMALL["n_recent"], n_past)} <= {*pos}
    stats = llm.kv_stats()
    assert stats.n_evicted == N_PROMPT + N_DECODE - SMALL["n_budget"]
    assert stats.n_moved > 0

    expected, _, cells = holes
    assert_close(np.array(out), expected, family.rtol)
    assert positions(llm) == cells["pos"].tolist()
    np.testing.assert_allclose(
        llm.kv_cells()["score"], cells["score"], rtol=10 * family.rtol, atol=1e-7
    )


@pytest.mark.parametrize(
    ("reason", "name"), [(reason, name) for reason in REFUSED for name in REFUSED[reason]]
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path, reason, name):
    path = tiny_families.write(tmp_path / "refused.gguf", name, REFUSED[reason][name])
    named = f"architecture '{architecture(name)}'"
    with pytest.raises(PolicyError, match=f"{re.escape(named)}.*{reason}.*kv_policy=None"):
        load(Llama, path)
    load(Llama, path, scorer="none").close()


def test_the_tables_are_the_architectures_of_the_pinned_llama_cpp():
    source = bootstrap.ROOT / "vendor/llama.cpp/src/llama-arch.cpp"
    if not source.is_file():
        pytest.skip("the source of llama.cpp is not here: run python scripts/bootstrap.py")
    table = source.read_text(encoding="utf-8").partition("LLM_ARCH_NAMES")[2].partition("};")[0]
    known = set(re.findall(r'\{ *LLM_ARCH_\w+, *"([^"]+)"', table)) - {"(unknown)"}
    served, refused = {*map(architecture, FAMILIES)}, {*map(architecture, chain(*REFUSED.values()))}
    assert served | refused | {*UNTESTED} == known
    assert not {*UNTESTED} & (served | refused)
    assert f"Of the {len(known)} architectures" in pages.read(PAGE)


def test_the_page_says_what_is_covered():
    assert coverage() in pages.read(PAGE), f"{PAGE} should have:\n{coverage()}"
