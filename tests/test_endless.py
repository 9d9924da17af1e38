"""Five times the trained context: perplexity stays where StreamingLLM's positions keep it.

The rival is llama.cpp's own cache, unranked: the first 4 and the newest tokens stay and move
together (StreamingLLM, arXiv 2309.17453), by llama_memory_seq_rm and llama_memory_seq_add.
"""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
from helpers import logits, tokens

from pyinertia import Llama
from pyinertia.loading import n_ctx_train

pytestmark = pytest.mark.slow  # 40,960 tokens of a real model, twice

N_BUDGET, N_BATCH, N_SINK = 512, 256, 4
N_WINDOWS, N_SCORED = 20, 256  # each window is a prompt, and tokens whose likelihood counts


class Streaming(Llama):
    """Keeps the first N_SINK and the newest tokens, N_BUDGET together, at positions 0, 1, ..."""

    def eval(self, tokens) -> None:
        if self.n_tokens + len(tokens) > N_BUDGET + N_BATCH:
            n_old, memory = self.n_tokens - N_BUDGET, llama_cpp.llama_get_memory(self.ctx)
            assert llama_cpp.llama_memory_seq_rm(memory, 0, N_SINK, N_SINK + n_old)
            llama_cpp.llama_memory_seq_add(memory, 0, N_SINK + n_old, -1, -n_old)
            self.n_tokens -= n_old
        super().eval(tokens)


def negative_log_likelihoods(llm: Llama, ids: list[int]) -> np.ndarray:
    """float64 [N_WINDOWS, N_SCORED], in nats, of the tokens at the end of each window."""
    n_window, out = len(ids) // N_WINDOWS, np.empty((N_WINDOWS, N_SCORED))
    for window in range(N_WINDOWS):
        part = ids[window * n_window : (window + 1) * n_window]
        prompt, scored = part[:-N_SCORED], part[-N_SCORED:]
        for start in range(0, len(prompt), N_BATCH):
            llm.eval(prompt[start : start + N_BATCH])
        for i, token in enumerate(scored):
            x = logits(llm).astype(np.float64)
            out[window, i] = np.log(np.exp(x - x.max()).sum()) + x.max() - x[token]
            llm.eval([token])
    return out


def test_perplexity_stays_over_five_trained_contexts(smollm2):
    n_tokens = 5 * n_ctx_train(str(smollm2))
    shared = {"n_batch": N_BATCH, "flash_attn": True, "verbose": False}
    nll = {}
    for name, cls, kwargs in (
        ("streaming", Streaming, {"n_ctx": N_BUDGET + N_BATCH, "kv_policy": None}),
        (
            "inertiakv",
            Llama,
            {
                "n_ctx": 4096,
                "kv_policy": "inertiakv",
                "kv_budget": N_BUDGET,
                "kv_prefill": "bounded",
                "kv_positions": "compact",
            },
        ),
    ):
        llm = cls(str(smollm2), **shared, **kwargs)
        nll[name] = negative_log_likelihoods(llm, tokens(llm, n_tokens))
        cells = llm.kv_stats() if name == "inertiakv" else None
        llm.close()
    assert cells.n_cells <= N_BUDGET + N_BATCH
    perplexity = {name: np.exp(values.mean(axis=1)) for name, values in nll.items()}
    print({name: values.round(1).tolist() for name, values in perplexity.items()})  # noqa: T201
    worse = (nll["inertiakv"] - nll["streaming"]).mean(axis=1)  # nats a token, by window
    quarter = N_WINDOWS // 4
    for start in range(0, N_WINDOWS, quarter):  # the last is 4 to 5 trained contexts deep
        assert worse[start : start + quarter].mean() < 0.05
