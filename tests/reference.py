"""What ggml_kv_mass and ggml_kv_move compute, in float64 numpy. Written to be read."""

from __future__ import annotations

import numpy as np


def alibi_slopes(n_head: int, max_bias: float) -> np.ndarray:
    """Slope of each head: a geometric series over the largest power of two, then its midpoints."""
    if max_bias <= 0:
        return np.ones(n_head)
    n = 2 ** int(np.floor(np.log2(n_head)))
    exponents = [(h + 1) / n if h < n else (2 * (h - n) + 1) / (2 * n) for h in range(n_head)]
    return 2.0 ** (-max_bias * np.array(exponents))


def attention(q, k, mask, *, scale, sinks=None, max_bias=0.0, softcap=0.0) -> np.ndarray:
    """Softmax of one query.

    q [n_head, n_embd_head], k [n_kv, n_head_kv, n_embd_head], mask [n_kv] -> [n_head, n_kv]
    """
    n_head = len(q)
    k = np.repeat(k, n_head // k.shape[1], axis=1)

    seen = mask > -np.inf
    x = np.full((n_head, len(mask)), -np.inf)
    x[:, seen] = np.einsum("hd,chd->hc", q, k[seen]) * scale
    if softcap:
        x[:, seen] = softcap * np.tanh(x[:, seen] / softcap)
    x[:, seen] += alibi_slopes(n_head, max_bias)[:, None] * mask[seen]

    sink = np.full((n_head, 1), -np.inf) if sinks is None else sinks[:, None]
    top = np.maximum(x.max(axis=1, keepdims=True), sink)
    top[top == -np.inf] = 0  # sees nothing
    e = np.exp(x - top)
    total = e.sum(axis=1, keepdims=True) + np.exp(sink - top)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def kv_mass(rows, q, k, mask, row_idx, coef, *, assign=False, **params) -> np.ndarray:
    """Rows after the op.

    rows [n_rows, n_cells], q [n_tokens, n_head, n_embd_head],
    k [n_stream, n_kv, n_head_kv, n_embd_head], mask [n_stream, n_tokens/n_stream, n_kv],
    row_idx [n_tokens], coef a number; params as in attention()
    """
    n_stream_tokens, n_kv = mask.shape[1:]
    rows = rows.astype(np.float64)

    for t in np.flatnonzero(row_idx >= 0):
        s, i = divmod(t, n_stream_tokens)
        mass = attention(q[t], k[s], mask[s, i], **params).mean(axis=0)
        row = rows[row_idx[t], :n_kv]
        row[:] = (0 if assign else row) + coef * mass
    return rows


def kv_move(a, src, dst, axis) -> np.ndarray:
    """The cells dst along an axis become copies of the cells src."""
    a = np.moveaxis(a.copy(), axis, 0)
    a[dst] = a[src]
    return np.moveaxis(a, 0, axis)
