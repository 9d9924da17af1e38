"""K and V of a tiny llama's first layer: they depend on a token and its position, nothing else.

So they tell of every cell which token it holds, and at which position it is rotated.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cache_state
import numpy as np
import tiny_models
from gguf import GGUFReader

BASE, EPS = 10000.0, 1e-5


class FirstLayer:
    def __init__(self, path: Path) -> None:
        tensors = {t.name: np.array(t.data, np.float64) for t in GGUFReader(path).tensors}
        x = tensors["token_embd.weight"]
        x = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + EPS)
        self.k, self.v = (x @ tensors[f"blk.0.attn_{name}.weight"].T for name in "kv")

    def key(self, token: int, pos: int) -> np.ndarray:
        """[n_embd_k], rotated."""
        n_rot = tiny_models.N_EMBD // tiny_models.N_HEAD
        pairs = self.k[token].reshape(tiny_models.N_HEAD_KV, n_rot // 2, 2)
        turn = np.exp(1j * pos * BASE ** (-2 * np.arange(n_rot // 2) / n_rot))
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
        return np.stack([turned.real, turned.imag], -1).ravel()

    def check(self, tokens: Mapping[int, int], state: bytes, seq_id: int = 0) -> None:
        """A saved sequence of float32 has these tokens at these positions."""
        rows, _ = cache_state.parse(state, seq_id)
        assert sorted(rows) == sorted(tokens), f"positions of sequence {seq_id}"
        for pos, token in tokens.items():
            k, v = (np.frombuffer(rows[pos][i], np.float32) for i in (0, len(rows[pos]) // 2))
            what = f"of sequence {seq_id}, position {pos}"
            np.testing.assert_allclose(k, self.key(token, pos), atol=2e-3, err_msg=f"K {what}")
            np.testing.assert_allclose(v, self.v[token], atol=1e-4, err_msg=f"V {what}")
