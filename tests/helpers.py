"""What the tests on real models share."""

from __future__ import annotations

import numpy as np

from pyinertia import Llama


class HolesLlama(Llama):
    """Leaves the holes of a cut in place, as removing positions from a stock cache does."""

    _kv_compact = False


def tokens(llm: Llama, n: int) -> list[int]:
    """n tokens of prose that every Python installation has."""
    import pydoc_data.topics

    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    return llm.tokenize(text.encode()[: 8 * n])[:n]


def play(llm: Llama, n_prompt: int, n_decode: int) -> None:
    """Evaluate a prompt and then decode steps of one token."""
    ids = tokens(llm, n_prompt + n_decode)
    llm.eval(ids[:n_prompt])
    for token in ids[n_prompt:]:
        llm.eval([token])


def logits(llm: Llama) -> np.ndarray:
    """The logits [n_vocab] of the last token."""
    return np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()


def positions(llm: Llama) -> list[int]:
    return llm.kv_cells()["pos"].tolist()


def kl(p: np.ndarray, q: np.ndarray) -> float:
    """KL(softmax(p) || softmax(q)) in nats."""
    p, q = p.astype(np.float64), q.astype(np.float64)
    p -= p.max() + np.log(np.exp(p - p.max()).sum())
    q -= q.max() + np.log(np.exp(q - q.max()).sum())
    return float((np.exp(p) * (p - q)).sum())
