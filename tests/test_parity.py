"""Without a cut the logits are those of an unpatched build, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import stock
from helpers import logits, tokens

from pyinertia import Llama

F16, Q8_0 = 1, 8
N_PROMPT, N_DECODE = 600, 24


@pytest.mark.parametrize(
    "context",
    [
        {"flash_attn": False},
        {"flash_attn": True},
        {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0},
    ],
    ids=["no-fa", "fa", "fa-q8_0"],
)
def test_without_a_cut_logits_are_stock_logits(smollm2, stock_lib_dir, context):
    common = {"n_ctx": 1024, "n_threads": 2, **context}

    def ours(**kv) -> np.ndarray:
        llm = Llama(smollm2, n_batch=512, verbose=False, **common, **kv)
        ids = tokens(llm, N_PROMPT + N_DECODE)
        out = []
        llm.eval(ids[:N_PROMPT])
        out.append(logits(llm))
        for token in ids[N_PROMPT:]:
            llm.eval([token])
            out.append(logits(llm))
        stats = llm.kv_stats()
        assert stats.n_evicted == 0
        assert stats.n_used == N_PROMPT + N_DECODE
        scored = kv.get("kv_policy") == "inertiakv"
        assert stats.n_refreshes == (N_DECODE if scored else 0)
        ours.ids = ids
        return np.array(out)

    none, full = ours(), ours(kv_policy="full")
    unreached = ours(kv_policy="inertiakv", kv_budget=1024)
    steps = [["eval", ours.ids[:N_PROMPT]], *(["eval", [t]] for t in ours.ids[N_PROMPT:])]
    expected = stock.run(stock_lib_dir, model=smollm2, context=common, steps=steps)["logits"]

    assert np.array_equal(none, expected)
    assert np.array_equal(full, expected)
    assert np.array_equal(unreached, expected)


@pytest.mark.parametrize(
    ("policy", "refreshes"), [("inertiakv", 40), ("inertiakv-lazy", 5), ("score-free", 0)]
)
def test_a_step_without_refresh_reuses_the_graph(smollm2, policy, refreshes):
    llm = Llama(smollm2, n_ctx=1024, n_threads=2, verbose=False, kv_policy=policy, kv_budget=512)
    ids = tokens(llm, 700)
    llm.eval(ids[:600])
    for token in ids[600:604]:  # first query, cut and compaction, padding settles
        llm.eval([token])
    before = llm.kv_stats()
    for token in ids[604:644]:
        llm.eval([token])
    after = llm.kv_stats()

    assert after.n_refreshes - before.n_refreshes == refreshes
    assert after.n_evicted - before.n_evicted == 40
    assert after.n_reused - before.n_reused == 40
    assert after.n_moved == before.n_moved
