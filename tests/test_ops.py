"""ggml_kv_mass and ggml_kv_move against their float64 references, over randomised shapes."""

from __future__ import annotations

import numpy as np
import pytest
from ggml_ctypes import Context, Library
from op_cases import FLOATS, QUANTS, random_case
from reference import kv_move


@pytest.fixture(scope="module")
def lib(lib_dir):
    return Library(lib_dir)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("type_k", FLOATS + QUANTS)
def test_kv_mass(lib, type_k, seed):
    random_case(type_k, seed).check(lib)


@pytest.mark.parametrize("type_k", FLOATS + QUANTS)
def test_kv_mass_scalar_path(lib, type_k):
    full = {"sinks": True, "max_bias": 8.0, "softcap": 30.0, "n_stream": 2}
    random_case(type_k, 7, n_kv=100, n_tokens=9, use_ref=True, **full).check(lib)


@pytest.mark.parametrize("n_gqa", range(1, 9))
def test_kv_mass_every_gqa(lib, n_gqa):
    random_case("f16", 5, n_gqa=n_gqa, n_kv=300, n_threads=2).check(lib)


@pytest.mark.parametrize("assign", [False, True])
def test_layers_share_a_row(lib, assign):
    """The first layer assigns, even a weight of 0; later ones add."""
    case = random_case("f16", 3, n_kv=64, n_tokens=4, coef=0.0, assign=assign)
    rows = case.run(lib)
    scored = case.row_idx[case.row_idx >= 0]
    assert np.array_equal(
        rows[scored, :64], np.zeros((len(scored), 64)) if assign else case.rows[scored, :64]
    )

    one, two = (
        random_case("f16", 3, assign=True, coef=0.25),
        random_case("f16", 3, assign=False, coef=0.5),
    )
    both = two.run(lib, rows=one.run(lib))
    scored = one.row_idx[one.row_idx >= 0]
    np.testing.assert_allclose(
        both[scored, : one.n_kv], 3 * one.run(lib)[scored, : one.n_kv], rtol=1e-5
    )


@pytest.mark.parametrize("n_threads", [1, 3])
def test_nothing_to_score_changes_no_byte(lib, n_threads):
    case = random_case("f16", 1, n_tokens=512, n_kv=200, assign=True, n_threads=n_threads)
    case.row_idx[:] = -1
    assert np.array_equal(case.run(lib), case.rows)


@pytest.mark.parametrize("use_ref", [False, True])
@pytest.mark.parametrize("type_k", FLOATS)
def test_masked_cells_may_hold_anything(lib, type_k, use_ref):
    case = random_case(type_k, 2, n_kv=70, n_tokens=3, assign=True, use_ref=use_ref)
    dark = np.arange(70) % 3 == 1
    case.mask[:, :, dark] = -np.inf
    clean = case.run(lib)
    case.k[:, dark] = np.nan
    assert np.array_equal(case.run(lib), clean)
    assert np.all(clean[case.row_idx[case.row_idx >= 0], :70][:, dark] == 0)


@pytest.mark.parametrize("sinks", [False, True])
def test_mass_of_a_query_sums_to_its_share(lib, sinks):
    case = random_case(
        "f16", 4, n_kv=500, n_tokens=1, n_stream=1, assign=True, coef=1.0, sinks=sinks
    )
    total = case.run(lib)[case.row_idx[0], :500].sum()
    assert 0 < total < 0.999 if sinks else abs(total - 1) < 1e-5


MOVES = [(t, dim) for t in FLOATS + QUANTS for dim in (0, 1) if dim == 1 or t in FLOATS]


@pytest.mark.parametrize("n_threads", [1, 3])
@pytest.mark.parametrize(("type_", "dim"), MOVES)
def test_kv_move(lib, type_, dim, n_threads):
    rng = np.random.default_rng(dim)
    shape = (2, 3, 90, 64) if dim == 1 else (2, 3, 64, 90)
    src, dst = rng.permutation(90)[:80].reshape(2, 40)
    with Context(lib) as c:
        a = c.tensor(rng.normal(size=shape), type_)
        idx = c.tensor(np.stack([src, dst]), "i32")

        # raw bytes; along dim 0 a row falls into its elements
        cells = a.bytes().reshape(*shape[:3], shape[3] if dim == 0 else 1, -1)
        expected = kv_move(cells, src, dst, axis=3 - dim)
        assert not np.array_equal(cells, expected)

        c.compute(lib.kv_move(c.ptr, a.ptr, idx.ptr, dim), n_threads)
        assert np.array_equal(cells, expected)
