"""What ggml_kv_attn, ggml_kv_mass and ggml_kv_move compute, in float64. Written to be read."""

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
    """Softmax of the queries of one stream.

    q [n_tokens, n_head, n_embd_head], k [n_kv, n_head_kv, n_embd_head], mask [n_tokens, n_kv]
    -> [n_head, n_tokens, n_kv]
    """
    n_head = q.shape[1]
    seen = mask > -np.inf
    k = np.where(seen.any(axis=0)[:, None, None], k, 0)  # what nobody sees may be anything
    k = np.repeat(k, n_head // k.shape[1], axis=1)

    x = np.moveaxis(q, 1, 0) @ np.transpose(k, (1, 2, 0)) * scale
    if softcap:
        x = softcap * np.tanh(x / softcap)
    x = x + alibi_slopes(n_head, max_bias)[:, None, None] * np.where(seen, mask, 0)
    x = np.where(seen, x, -np.inf)

    sink = np.full((n_head, 1, 1), -np.inf) if sinks is None else sinks[:, None, None]
    top = np.maximum(x.max(axis=2, keepdims=True), sink)
    top[top == -np.inf] = 0  # sees nothing
    e = np.exp(x - top)
    total = e.sum(axis=2, keepdims=True) + np.exp(sink - top)
    return np.divide(e, total, out=np.zeros_like(e), where=total > 0)


def kv_attn(q, k, v, mask, **params) -> np.ndarray:
    """The op's result [n_tokens, n_head, n_embd_head_v].

    q [n_tokens, n_head, n_embd_head_k], k and v [n_stream, n_kv, n_head_kv, n_embd_head],
    mask [n_stream, n_tokens/n_stream, n_kv]; params as in attention()
    """
    n_stream, n_stream_tokens = mask.shape[:2]
    n_gqa = q.shape[1] // k.shape[2]
    out = []
    for s in range(n_stream):
        prob = attention(q[s * n_stream_tokens :][:n_stream_tokens], k[s], mask[s], **params)
        seen = (mask[s] > -np.inf).any(axis=0)[:, None, None]
        values = np.repeat(np.where(seen, v[s], 0), n_gqa, axis=1)
        out.append(np.moveaxis(prob @ np.moveaxis(values, 1, 0), 0, 1))
    return np.concatenate(out)


def cell_values(prob, k, v, kind="mass", heads="mean") -> np.ndarray:
    """What one query says of the cells it sees, and of no others.

    prob [n_head, n_seen], k and v [n_seen, n_head_kv, n_embd_head] -> [n_seen]
    """
    reduce = {"mean": np.mean, "max": np.max}[heads]
    weights = np.ones(len(prob))
    if kind == "value-norm":
        norms = np.linalg.norm(v, axis=2).T
        prob = prob * np.repeat(norms, len(prob) // len(norms), axis=0)
    if kind == "entropy":
        entropy = np.zeros(len(prob))
        if prob.shape[1] > 1:
            p = prob / prob.sum(axis=1, keepdims=True)
            entropy = -np.sum(p * np.log(np.maximum(p, 1e-300)), axis=1) / np.log(p.shape[1])
        entropy = np.clip(entropy, 0.001, 0.999)
        weights = (1 - entropy) / entropy
    if kind == "keydiff":
        units = k / np.linalg.norm(k, axis=2, keepdims=True)
        mean = units.mean(axis=0)
        prob = 1 - np.einsum("che,he->hc", units, mean / np.linalg.norm(mean, axis=1)[:, None])
        weights = np.ones(len(prob))
    if kind == "key-norm":
        prob = 1 / (1 + np.linalg.norm(k, axis=2).T)
        weights = np.ones(len(prob))
    if kind == "value-len":
        prob = np.linalg.norm(v, axis=2).T
        weights = np.ones(len(prob))
    return reduce(weights[:, None] * prob, axis=0) / reduce(weights)


def kv_mass(
    rows, q, k, mask, row_idx, coef, *, v=None, kind="mass", heads="mean", assign=False, **params
) -> np.ndarray:
    """Rows after the op.

    rows [n_rows, n_cells], q [n_tokens, n_head, n_embd_head],
    k and v [n_stream, n_kv, n_head_kv, n_embd_head], mask [n_stream, n_tokens/n_stream, n_kv],
    row_idx [n_tokens], coef a number; params as in attention()
    """
    n_stream_tokens, n_kv = mask.shape[1:]
    rows = rows.astype(np.float64)

    for t in np.flatnonzero(row_idx >= 0):
        s, i = divmod(t, n_stream_tokens)
        seen = mask[s, i] > -np.inf
        values = np.zeros(n_kv)
        if seen.any():
            prob = attention(q[t : t + 1], k[s], mask[s, i : i + 1], **params)[:, 0, seen]
            v_seen = None if v is None else v[s, seen]
            values[seen] = cell_values(prob, k[s, seen], v_seen, kind, heads)
        row = rows[row_idx[t], :n_kv]
        row[:] = (0 if assign else row) + coef * values
    return rows


def kv_move(a, src, dst, axis) -> np.ndarray:
    """The cells dst along an axis become copies of the cells src."""
    a = np.moveaxis(a.copy(), axis, 0)
    a[dst] = a[src]
    return np.moveaxis(a, 0, axis)


def learned_features(mass, ema, top, key, value, pos) -> np.ndarray:
    """What the learned scorer predicts from, [n, 7], of the cells that the newest query sees."""

    def relative(x):
        return np.log(1e-4 + x / x.mean())

    age, share = np.log(1 + pos.max() - pos), pos / (pos.max() + 1)
    columns = (relative(mass), relative(ema), relative(top), age, relative(key), relative(value))
    return np.stack([*columns, share], axis=1)


def learned_row(scorer, features) -> np.ndarray:
    """The mass it predicts, [n], of arrays as pyinertia.learned.LearnedScorer has them."""
    x = (features - scorer.mean) / scorer.scale
    if scorer.hidden_bias.size:
        x = np.array([scorer.hidden_weight @ cell + scorer.hidden_bias for cell in x])
        x = np.where(x > 0, x, 0)
    return np.exp(np.array([cell @ scorer.weight for cell in x]) + scorer.bias) / len(x)


def first_ranking(prob, lambda_=1.0, n_pool=1) -> np.ndarray:
    """Scores once the first decode query was seen, [n_kv].

    prob [n_query, n_layer, n_head, n_kv]: softmax of the window's queries and of that query
    """
    n_layer = prob.shape[1]
    weights = lambda_ ** np.arange(n_layer - 1, -1, -1.0)
    rows = np.einsum("l,tlhc->tc", weights / weights.sum(), prob) / prob.shape[2]
    best, side = rows.max(axis=0), n_pool // 2
    return np.array([best[max(0, c - side) : c + side + 1].mean() for c in range(len(best))])
