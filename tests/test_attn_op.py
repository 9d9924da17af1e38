"""ggml_kv_attn against its float64 reference: both ways to compute it, and the rows it writes.

Up to 8 queries of a stream take the way for few queries, more take the one for many.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from ggml_ctypes import Context, Library
from reference import kv_attn, kv_mass

FLOATS = ["f32", "f16", "bf16"]
TYPES = [*FLOATS, "q8_0", "q5_1", "q4_0"]
IL = 2  # the layer whose coefficient is used


@pytest.fixture(scope="module")
def lib(lib_dir):
    return Library(lib_dir)


@dataclass
class Case:
    seed: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    n_embd_k: int = 64
    n_embd_v: int = 64
    n_head_kv: int = 3
    n_gqa: int = 3
    n_kv: int = 100
    n_tokens: int = 1
    n_stream: int = 1
    type_mask: str = "f16"
    mask_kind: str = "holes"
    v_trans: bool = False
    sinks: bool = False
    max_bias: float = 0.0
    softcap: float = 0.0
    assign: bool = False
    n_scored: int = 5
    n_threads: int = 1
    use_ref: bool = False
    rows: np.ndarray = field(init=False)
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    v: np.ndarray = field(init=False)
    mask: np.ndarray = field(init=False)
    row_idx: np.ndarray = field(init=False)

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        n, n_head = self.n_tokens * self.n_stream, self.n_head_kv * self.n_gqa
        n_scored = min(n, self.n_scored)

        def normal(deviation, *shape):
            return rng.normal(0, deviation, shape).astype("f4")

        self.rows = rng.uniform(0, 1 / self.n_kv, (n_scored + 2, self.n_kv + 13)).astype("f4")
        self.q = normal(2, n, n_head, self.n_embd_k)
        self.k = normal(1, self.n_stream, self.n_kv, self.n_head_kv, self.n_embd_k)
        self.v = normal(1, self.n_stream, self.n_kv, self.n_head_kv, self.n_embd_v)
        self.row_idx = np.full(n, -1)
        self.row_idx[rng.permutation(n)[:n_scored]] = rng.permutation(n_scored + 2)[:n_scored]

        shape = (self.n_stream, self.n_tokens, self.n_kv)
        if self.mask_kind == "causal":  # whole tiles are seen, and whole tiles are not
            late = (
                np.arange(self.n_kv) > self.n_kv - self.n_tokens + np.arange(self.n_tokens)[:, None]
            )
            self.mask = np.broadcast_to(np.where(late, -np.inf, 0), shape).astype("f4")
        else:
            self.mask = rng.uniform(-1, 1, shape).astype("f2").astype("f4")
            self.mask[rng.random(shape) < 0.3] = -np.inf
            if n > 1:
                self.mask[-1, rng.integers(self.n_tokens)] = -np.inf  # sees nothing

    @property
    def params(self) -> dict:
        n_head = self.n_head_kv * self.n_gqa
        return {
            "scale": float(np.float32(1 / np.sqrt(self.n_embd_k))),
            "sinks": np.linspace(-4, 4, n_head, dtype="f4") if self.sinks else None,
            "max_bias": self.max_bias,
            "softcap": self.softcap,
        }

    @property
    def mem_size(self) -> int:
        size = 2 * self.q.size + 3 * (self.k.size + self.v.size) + self.mask.size + self.rows.size
        size += len(self.q) * self.n_head_kv * self.n_gqa * self.n_embd_v
        return 4 * size + (4 << 20)

    def operands(self, lib: Library, c: Context):
        """q, k, v, mask and sinks as pointers, the tensor of the rows, coef and row_idx."""
        # strided in both outer dims, as q cut out of a fused qkv
        n_head = self.n_head_kv * self.n_gqa
        fused = c.empty("f32", (len(self.q), n_head + 2, self.n_embd_k))
        fused.array()[:, 1:-1] = self.q
        q = fused.view(c, self.q.shape, start=1)

        pad = [(0, 0), (0, 5), (0, 0), (0, 0)]
        k = c.tensor(np.pad(self.k, pad), self.type_k).view(c, self.k.shape)
        if self.v_trans:  # the cells of a channel are neighbours
            channels = np.moveaxis(np.pad(self.v, pad), 1, 3)
            cache = c.tensor(channels, self.type_v)
            row = lib.row_bytes(self.type_v, channels.shape[3])
            ne = (self.n_kv, self.n_head_kv, self.n_embd_v, self.n_stream)
            nb = (row * self.n_embd_v, row, row * self.n_embd_v * self.n_head_kv)
            v = lib.view_4d(c.ptr, cache.ptr, *ne, *nb, 0)
        else:
            v = c.tensor(np.pad(self.v, pad), self.type_v).view(c, self.v.shape).ptr

        mask = c.tensor(self.mask[:, None], self.type_mask)
        sinks = c.tensor(self.params["sinks"], "f32").ptr if self.sinks else None
        rows = c.tensor(self.rows, "f32")
        coef = c.tensor(np.array([5, 6, 0.3, 7]), "f32")
        idx = c.tensor(self.row_idx, "i32")
        return q.ptr, k.ptr, v, mask.ptr, sinks, rows, coef.ptr, idx.ptr

    def run(self, lib: Library, scored: bool = True) -> tuple[np.ndarray, np.ndarray]:
        """The result, and the rows."""
        n_head = self.n_head_kv * self.n_gqa
        with Context(lib, self.mem_size) as c:
            q, k, v, mask, sinks, rows, coef, idx = self.operands(lib, c)
            scoring = (rows.ptr, coef, idx) if scored else (None, None, None)
            op = lib.kv_attn(
                c.ptr, q, k, v, mask, sinks, *scoring,
                IL, self.params["scale"], self.max_bias, self.softcap, self.assign,
            )  # fmt: skip
            c.compute(op, self.n_threads, self.use_ref)
            return c.result(op, (len(self.q), n_head, self.n_embd_v)), rows.array().copy()

    def expect(self, lib: Library):
        """Result and rows, each with the largest error allowed in it.

        K and V are exact in float32, so what is left is the rounding of sums to float32. Logits
        that are off by d change a probability by a factor in exp(+-2d); a sum of n terms is off by
        n 2^-24 of the sum of their magnitudes, whatever its order.
        """
        with Context(lib, 20 * (self.k.size + self.v.size) + (4 << 20)) as c:
            k, v = c.rounded(self.k, self.type_k), c.rounded(self.v, self.type_v)
        q, mask = self.q.astype("f8"), self.mask.astype("f8")

        q_abs = np.abs(q).sum(axis=-1).max()
        delta = self.n_embd_k * 2.0**-24 * q_abs * np.nanmax(np.abs(k)) * self.params["scale"]
        factor = np.expm1(2 * (delta + 1e-6)) + self.n_kv * 2.0**-24

        out = kv_attn(q, k, v, mask, **self.params)
        out_abs = kv_attn(q, k, np.abs(v), mask, **self.params)
        rows = kv_mass(
            self.rows, q, k, mask, self.row_idx, np.float32(0.3), assign=self.assign, **self.params
        )
        gained = np.abs(rows - np.where(self.assign, 0, self.rows))
        return (out, out_abs * factor), (rows, gained * factor + 2.0**-22 * np.abs(rows))

    def check(self, lib: Library) -> None:
        for given, (expected, tolerance) in zip(self.run(lib), self.expect(lib), strict=True):
            assert np.all(np.isfinite(given))
            error = np.abs(given - expected)
            assert np.all(error <= tolerance + 1e-30), np.max(error / (tolerance + 1e-30))


def random_case(seed: int, **fixed) -> Case:
    rng = np.random.default_rng(seed)

    def pick(*values):
        return values[rng.integers(len(values))]

    type_k = fixed.get("type_k", "f16")
    sizes = (64, 80, 128, 256) if type_k in FLOATS else (64, 128, 256)
    type_v = pick(type_k, type_k, "f16")
    return Case(**{
        "seed": seed,
        "type_v": type_v,
        "n_embd_k": pick(*sizes),
        "n_embd_v": pick(*sizes),
        "n_head_kv": pick(1, 2, 3),
        "n_gqa": pick(1, 2, 3, 4, 5, 8),
        "n_kv": pick(1, 3, 31, 33, 63, 65, 100, 257, 511),
        "n_tokens": pick(1, 2, 3, 8, 9, 33, 70),
        "n_stream": pick(1, 1, 3),
        "type_mask": pick("f16", "f32"),
        "mask_kind": pick("holes", "causal"),
        "v_trans": type_v in FLOATS and pick(False, True),
        "sinks": pick(False, True),
        "max_bias": pick(0.0, 8.0),
        "softcap": pick(0.0, 30.0),
        "assign": pick(False, True),
        "n_threads": pick(1, 2, 3, 4),
        **fixed,
    })  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("type_k", TYPES)
def test_kv_attn(lib, type_k, seed):
    random_case(seed, type_k=type_k).check(lib)


@pytest.mark.parametrize("n_threads", [1, 2, 3, 4])
@pytest.mark.parametrize("n_tokens", [1, 8, 33])
def test_every_number_of_threads(lib, n_tokens, n_threads):
    Case(n_tokens=n_tokens, n_kv=301, n_threads=n_threads).check(lib)


@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 33])
@pytest.mark.parametrize("n_embd", [64, 80, 128, 256])
@pytest.mark.parametrize("n_gqa", [1, 3, 8])
def test_shapes(lib, n_gqa, n_embd, n_tokens, v_trans):
    shape = {"n_gqa": n_gqa, "n_embd_k": n_embd, "n_embd_v": n_embd, "v_trans": v_trans}
    Case(n_head_kv=2, n_kv=129, n_tokens=n_tokens, n_threads=2, **shape).check(lib)


@pytest.mark.parametrize("type_k", ["f16", "q8_0"])
def test_a_batch_of_a_prompt(lib, type_k):
    case = Case(type_k=type_k, type_v=type_k, n_kv=700, n_tokens=512, mask_kind="causal")
    dataclasses.replace(case, n_scored=17, n_threads=2).check(lib)


@pytest.mark.parametrize("n_tokens", [1, 9])
@pytest.mark.parametrize("type_k", TYPES)
def test_scalar_path(lib, type_k, n_tokens):
    full = {"sinks": True, "max_bias": 8.0, "softcap": 30.0, "n_stream": 2, "use_ref": True}
    random_case(7, type_k=type_k, n_kv=100, n_tokens=n_tokens, **full).check(lib)


@pytest.mark.parametrize("use_ref", [False, True])
@pytest.mark.parametrize("v_trans", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 3, 40])
@pytest.mark.parametrize("type_kv", FLOATS)
def test_masked_cells_may_hold_anything(lib, type_kv, n_tokens, v_trans, use_ref):
    case = Case(type_k=type_kv, type_v=type_kv, n_kv=150, n_tokens=n_tokens, v_trans=v_trans)
    case = dataclasses.replace(case, n_threads=2, use_ref=use_ref)
    dark = np.arange(150) % 3 == 1
    dark[70:140] = True
    case.mask[:, :, dark] = -np.inf
    clean = case.run(lib)
    case.k[:, dark] = case.v[:, dark] = np.nan
    for before, after in zip(clean, case.run(lib), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize("n_tokens", [2, 20])
def test_a_query_that_sees_nothing_gets_zeros(lib, n_tokens):
    for sinks in (False, True):
        case = Case(n_tokens=n_tokens, assign=True, sinks=sinks, n_scored=n_tokens)
        case.mask[0, 1] = -np.inf
        out, rows = case.run(lib)
        assert np.all(out[1] == 0)
        assert np.all(rows[case.row_idx[1], :100] == 0)
        assert np.all(out[0] != 0)


@pytest.mark.parametrize("n_tokens", [1, 8, 33])
def test_rows_are_a_choice(lib, n_tokens):
    """Scoring changes no bit of the result, and cells beyond n_kv and other rows stay."""
    case = Case(n_tokens=n_tokens, n_kv=257, n_threads=2)
    out, rows = case.run(lib)
    untouched = np.setdiff1d(np.arange(len(rows)), case.row_idx)
    assert np.array_equal(rows[untouched], case.rows[untouched])
    assert np.array_equal(rows[:, 257:], case.rows[:, 257:])
    assert np.array_equal(out, case.run(lib, scored=False)[0])
    case.row_idx[:] = -1
    unscored, same = case.run(lib)
    assert np.array_equal(out, unscored)
    assert np.array_equal(same, case.rows)


@pytest.mark.parametrize("n_tokens", [1, 8, 100])
def test_two_runs_are_identical(lib, n_tokens):
    case = Case(n_tokens=n_tokens, n_kv=300, n_threads=4, n_scored=8)
    first = case.run(lib)
    for _ in range(5):
        for before, after in zip(first, case.run(lib), strict=True):
            assert np.array_equal(before, after)
