"""ggml_kv_mass of every kind and reduction over heads, against its float64 reference.

The mean of the mass has a way of its own, which test_ops.py compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from ggml_ctypes import Context, Library
from reference import kv_mass
from test_attn_op import FLOATS, IL, Case

# by enum ggml_kv_kind
KINDS = ["mass", "value-norm", "entropy", "keydiff", "key-norm", "value-len"]
OF_VALUES = {"value-norm", "value-len"}
HEADS = ["mean", "max"]
OTHERS = [(kind, heads) for kind in KINDS for heads in HEADS if (kind, heads) != ("mass", "mean")]


@pytest.fixture(scope="module")
def lib(lib_dir):
    return Library(lib_dir)


@dataclass
class ScoreCase(Case):
    kind: str = "mass"
    heads: str = "mean"

    def run(self, lib: Library) -> np.ndarray:
        with Context(lib, self.mem_size) as c:
            q, k, v, mask, sinks, rows, coef, idx = self.operands(lib, c)
            op = lib.kv_mass(
                c.ptr, rows.ptr, q, k, v if self.kind in OF_VALUES else None, mask, sinks,
                coef, idx, KINDS.index(self.kind), HEADS.index(self.heads),
                IL, self.params["scale"], self.max_bias, self.softcap, self.assign,
            )  # fmt: skip
            c.compute(op, self.n_threads)
            return rows.array().copy()

    def expect(self, lib: Library) -> np.ndarray:
        with Context(lib, 20 * (self.q.size + self.k.size + self.v.size) + (4 << 20)) as c:
            q = c.rounded(self.q, self.type_k)  # the type that the dot product with k takes
            k, v = c.rounded(self.k, self.type_k), c.rounded(self.v, self.type_v)
        return kv_mass(
            self.rows, q, k, self.mask.astype("f8"), self.row_idx, np.float32(0.3),
            v=v, kind=self.kind, heads=self.heads, assign=self.assign, **self.params,
        )  # fmt: skip

    def check(self, lib: Library) -> None:
        rows, expected = self.run(lib), self.expect(lib)
        gained = np.abs(expected - (0 if self.assign else self.rows))
        # keydiff takes a cosine from 1, so its error is one of 1
        tolerance = 1e-4 * gained + 1e-6 * (self.kind == "keydiff") + 2.0**-22 * np.abs(expected)
        assert np.all(np.isfinite(rows))
        error = np.abs(rows - expected)
        assert np.all(error <= tolerance + 1e-30), np.max(error / (tolerance + 1e-30))

        untouched = np.setdiff1d(np.arange(len(rows)), self.row_idx)
        assert np.array_equal(rows[untouched], self.rows[untouched])
        assert np.array_equal(rows[:, self.n_kv :], self.rows[:, self.n_kv :])


def random_case(seed: int, **fixed) -> ScoreCase:
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    return ScoreCase(**{
        "seed": seed,
        "n_embd_k": pick(64, 128),
        "n_embd_v": pick(64, 96),
        "n_head_kv": pick(1, 2, 3),
        "n_gqa": pick(1, 2, 5),
        "n_kv": pick(1, 2, 33, 257),
        "n_tokens": pick(1, 2, 9, 40),
        "n_stream": pick(1, 2),
        "type_mask": pick("f16", "f32"),
        "v_trans": fixed["type_v"] in FLOATS and pick(False, True),
        "sinks": pick(False, True),
        "max_bias": pick(0.0, 8.0),
        "softcap": pick(0.0, 30.0),
        "assign": pick(False, True),
        "n_threads": pick(1, 2, 3),
        **fixed,
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("type_kv", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize(("kind", "heads"), OTHERS)
def test_every_kind(lib, kind, heads, type_kv, seed):
    random_case(seed, type_k=type_kv, type_v=type_kv, kind=kind, heads=heads).check(lib)


@pytest.mark.parametrize(("kind", "heads"), OTHERS)
def test_threads_change_no_bit(lib, kind, heads):
    case = ScoreCase(kind=kind, heads=heads, n_kv=301, n_tokens=3, n_stream=2)
    runs = [replace(case, n_threads=n).run(lib) for n in (1, 2, 3)]
    assert np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[0], runs[2])


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("junk", [np.nan, np.inf])
@pytest.mark.parametrize(("kind", "heads"), OTHERS)
def test_masked_cells_may_hold_anything(lib, kind, heads, junk, v_trans):
    case = ScoreCase(kind=kind, heads=heads, n_tokens=3, v_trans=v_trans, assign=True, n_threads=2)
    dark = np.arange(100) % 3 == 1
    case.mask[:, :, dark] = -np.inf
    clean = case.run(lib)
    case.k[:, dark] = case.v[:, dark] = junk
    assert np.array_equal(case.run(lib), clean)
    assert np.all(clean[case.row_idx[case.row_idx >= 0], :100][:, dark] == 0)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("kind", "heads"), OTHERS)
def test_a_query_that_sees_nothing_or_one_cell(lib, kind, heads, sinks):
    case = ScoreCase(kind=kind, heads=heads, n_tokens=2, assign=True, sinks=sinks, type_k="f32")
    case.mask[:] = -np.inf
    case.mask[0, 1, 7] = 0
    rows = case.run(lib)
    assert np.all(rows[case.row_idx[0], :100] == 0)
    assert np.all(np.delete(rows[case.row_idx[1], :100], 7) == 0)
    case.check(lib)


def test_uniform_heads_weigh_the_same(lib):
    """Their entropy is 1, and (1 - H)/H would be 0 for all of them."""
    case = ScoreCase(kind="entropy", n_tokens=1, assign=True)
    case.q[:] = 0
    case.mask[:] = 0
    np.testing.assert_allclose(case.run(lib)[case.row_idx[0], :100], 0.3 / 100, rtol=1e-5)


def test_a_key_of_0_has_no_direction(lib):
    case = ScoreCase(kind="keydiff", n_tokens=1, assign=True)
    case.mask[:] = 0
    case.k[:, 5] = 0
    row = case.run(lib)[case.row_idx[0], :100]
    assert row[5] == np.float32(0.3)
    case.k[:] = 0
    assert np.all(case.run(lib)[case.row_idx[0], :100] == np.float32(0.3))
    case.k[:] = 1  # all the same
    assert np.all(case.run(lib)[case.row_idx[0], :100] < 1e-6)


@pytest.mark.parametrize(("kind", "heads"), OTHERS)
def test_nothing_to_score_changes_no_byte(lib, kind, heads):
    case = ScoreCase(kind=kind, heads=heads, n_tokens=40, assign=True, n_threads=2)
    case.row_idx[:] = -1
    assert np.array_equal(case.run(lib), case.rows)
