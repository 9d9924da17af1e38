"""Random operands of ggml_kv_mass, how the op is run on them, and what it has to give."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from ggml_ctypes import Context, Library
from reference import kv_mass

FLOATS = ["f32", "f16", "bf16"]
QUANTS = ["q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
IL = 2  # the layer whose coefficient is used


class Device(Protocol):
    """What computes a node in place of the CPU backend, with q as it is."""

    def compute(self, op: int) -> None: ...


@dataclass
class Case:
    rng: np.random.Generator
    type_k: str = "f16"
    n_embd: int = 64
    n_head_kv: int = 3
    n_gqa: int = 3
    n_kv: int = 100
    n_tokens: int = 1
    n_stream: int = 1
    type_mask: str = "f16"
    sinks: bool = False
    max_bias: float = 0.0
    softcap: float = 0.0
    assign: bool = False
    coef: float = 0.3
    n_threads: int = 1
    use_ref: bool = False
    device: Device | None = None
    rows: np.ndarray = field(init=False)
    q: np.ndarray = field(init=False)
    k: np.ndarray = field(init=False)
    mask: np.ndarray = field(init=False)
    row_idx: np.ndarray = field(init=False)

    def __post_init__(self):
        rng, n_head = self.rng, self.n_head_kv * self.n_gqa
        n = self.n_tokens * self.n_stream
        n_scored = min(n, int(rng.integers(1, 20)))

        self.rows = rng.uniform(0, 1 / self.n_kv, (n_scored + 2, self.n_kv + 13)).astype("f4")
        self.q = rng.normal(0, 2, (n, n_head, self.n_embd)).astype("f4")
        self.k = rng.normal(0, 1, (self.n_stream, self.n_kv, self.n_head_kv, self.n_embd))
        self.k = self.k.astype("f4")
        self.mask = rng.uniform(-1, 1, (self.n_stream, self.n_tokens, self.n_kv))
        self.mask = self.mask.astype("f2").astype("f4")
        self.mask[rng.random(self.mask.shape) < 0.3] = -np.inf
        if n > 1:
            self.mask[-1, rng.integers(self.n_tokens)] = -np.inf  # sees nothing
        self.row_idx = np.full(n, -1)
        self.row_idx[rng.permutation(n)[:n_scored]] = rng.permutation(n_scored + 2)[:n_scored]

    @property
    def scale(self) -> float:
        return float(np.float32(1 / np.sqrt(self.n_embd)))

    @property
    def sink_values(self):
        n_head = self.n_head_kv * self.n_gqa
        return np.linspace(-4, 4, n_head, dtype="f4") if self.sinks else None

    def run(self, lib: Library, rows: np.ndarray | None = None) -> np.ndarray:
        size = 4 * (self.q.size + 2 * self.k.size + self.mask.size + self.rows.size)
        with Context(lib, size + (4 << 20)) as c:
            n, n_head = self.q.shape[:2]

            # strided in both outer dims, as q cut out of a fused qkv
            fused = c.empty("f32", (n, n_head + 2, self.n_embd))
            fused.array()[:, 1:-1] = self.q
            q = fused.view(c, self.q.shape, start=1)

            cache = c.tensor(np.pad(self.k, [(0, 0), (0, 5), (0, 0), (0, 0)]), self.type_k)
            k = cache.view(c, self.k.shape)

            out = c.tensor(self.rows if rows is None else rows, "f32")
            mask = c.tensor(self.mask[:, None], self.type_mask)
            sinks = c.tensor(self.sink_values, "f32").ptr if self.sinks else None
            coef = c.tensor(np.array([5, 6, self.coef, 7]), "f32")
            idx = c.tensor(self.row_idx, "i32")
            op = lib.kv_mass(
                c.ptr, out.ptr, q.ptr, k.ptr, None, mask.ptr, sinks, coef.ptr, idx.ptr,
                0, 0, IL, self.scale, self.max_bias, self.softcap, self.assign,
            )  # fmt: skip
            assert lib.kv_mass_take_time_us(op) < 0
            if self.device:
                self.device.compute(op)
                return out.array().copy()
            c.compute(op, self.n_threads, self.use_ref)
            assert lib.kv_mass_take_time_us(op) >= 0
            assert lib.kv_mass_take_time_us(op) == 0
            return out.array().copy()

    def expect(self, lib: Library) -> tuple[np.ndarray, np.ndarray]:
        """Rows and the largest error allowed in them.

        q is rounded as the CPU op rounds it (its reference and devices do not), so what is left is
        the rounding of sums to float32 and, in the types with an offset (q4_1, q5_1), that of its
        factor, a sum of 32 q, to float16.
        Logits that are off by d change a mass by a factor in exp(+-2d).
        """
        with Context(lib, 20 * (self.q.size + self.k.size) + (4 << 20)) as c:
            exact = self.use_ref or self.device
            type_q = "f32" if exact else self.type_k if self.type_k in FLOATS else "q8_0"
            q = c.rounded(self.q, type_q)
            k = c.cast(c.tensor(self.k, self.type_k), "f32") if self.type_k != "f32" else None
            k = self.k.astype("f8") if k is None else k.array().astype("f8")

        q_abs = np.abs(q).sum(axis=-1).max()
        error = self.n_embd * 2.0**-24 * q_abs * np.abs(k).max()
        if self.type_k in ("q4_1", "q5_1") and not exact:
            error += 2.0**-11 * q_abs * np.abs(k).max()
        delta = error * self.scale + 1e-6

        rows = kv_mass(
            self.rows, q, k, self.mask.astype("f8"), self.row_idx, np.float32(self.coef),
            assign=self.assign, scale=self.scale, sinks=self.sink_values,
            max_bias=self.max_bias, softcap=self.softcap,
        )  # fmt: skip
        gained = np.abs(rows - np.where(self.assign, 0, self.rows))
        return rows, gained * np.expm1(2 * delta) + 2.0**-22 * np.abs(rows) + 1e-30

    def check(self, lib: Library) -> None:
        rows = self.run(lib)
        expected, tolerance = self.expect(lib)
        assert np.all(np.isfinite(rows))
        assert np.all(np.abs(rows - expected) <= tolerance), np.max(
            np.abs(rows - expected) / tolerance
        )

        untouched = np.setdiff1d(np.arange(len(rows)), self.row_idx)
        assert np.array_equal(rows[untouched], self.rows[untouched])
        assert np.array_equal(rows[:, self.n_kv :], self.rows[:, self.n_kv :])


def random_case(type_k: str, seed: int, **fixed) -> Case:
    rng = np.random.default_rng(seed)
    n_kv = int(rng.choice([1, 3, 31, 33, 100, 257, 511, 1000, 4096]))
    n_tokens = int(rng.choice([1, 1, 2, 9, 40] if n_kv > 1000 else [1, 2, 9, 100, 512]))
    return Case(**{
        "rng": rng,
        "type_k": type_k,
        "n_embd": int(rng.choice([64, 80, 128, 256] if type_k in FLOATS else [64, 128, 256])),
        "n_head_kv": int(rng.integers(1, 4)),
        "n_gqa": int(rng.integers(1, 9)),
        "n_kv": n_kv,
        "n_tokens": n_tokens,
        "n_stream": int(rng.choice([1, 2])),
        "type_mask": str(rng.choice(["f16", "f32"])),
        "sinks": bool(rng.integers(2)),
        "max_bias": float(rng.choice([0, 8])),
        "softcap": float(rng.choice([0, 30])),
        "assign": bool(rng.integers(2)),
        "n_threads": int(rng.choice([1, 2, 4])),
        **fixed,
    })  # fmt: skip
