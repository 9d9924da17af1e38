"""Sequences of one context have their own streams, budgets and scores."""

from __future__ import annotations

import llama_cpp as lc
import numpy as np
import pytest
from low_level import Context

from pyinertia import KVPolicy

POLICY = KVPolicy(n_budget=48, n_sink=2, n_recent=8, n_window=8, n_pool=3)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (150, 90)]
STEPS = [RNG.integers(0, 256, 60).tolist() for _ in PROMPTS]


@pytest.fixture(scope="module")
def alone(model):
    """The cells of each sequence when it has a context of its own."""
    out = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        context = Context(model, POLICY)
        context.decode({0: prompt})
        for token in steps:
            context.decode({0: [token]})
        out.append(context.cells(0))
        lc.llama_free(context.ctx)
    return out


def test_sequences_in_one_batch_keep_what_each_keeps_alone(model, alone):
    context = Context(model, POLICY, n_seq=2)
    assert context.refusal == ""
    for seq_id, prompt in enumerate(PROMPTS):
        context.decode({seq_id: prompt})
    for tokens in zip(*STEPS, strict=True):
        context.decode({seq_id: [token] for seq_id, token in enumerate(tokens)})
    for seq_id, expected in enumerate(alone):
        cells = context.cells(seq_id)
        assert len(cells) == POLICY.n_budget
        assert cells["pos"].tolist() == expected["pos"].tolist()
        np.testing.assert_allclose(cells["score"], expected["score"], rtol=1e-3, atol=1e-7)
    lc.llama_free(context.ctx)


def test_a_prompt_entering_does_not_disturb_a_sequence_that_decodes(model, alone):
    context = Context(model, POLICY, n_seq=2)
    context.decode({0: PROMPTS[0]})
    for token in STEPS[0][:20]:
        context.decode({0: [token]})
    context.decode({0: STEPS[0][20:21], 1: PROMPTS[1]})
    assert len(context.cells(0)) == POLICY.n_budget
    assert len(context.cells(1)) == len(PROMPTS[1])
    for i in range(21, 60):
        context.decode({0: STEPS[0][i : i + 1], 1: STEPS[1][i - 21 : i - 20]})
    assert context.cells(0)["pos"].tolist() == alone[0]["pos"].tolist()
    lc.llama_free(context.ctx)


def test_a_copied_sequence_takes_its_scores_along(model):
    context = Context(model, POLICY, n_seq=2)
    context.decode({0: PROMPTS[0]})
    for token in STEPS[0][:30]:
        context.decode({0: [token]})
    lc.llama_memory_seq_cp(lc.llama_get_memory(context.ctx), 0, 1, -1, -1)
    context.n_past[1] = context.n_past[0]
    for token in STEPS[0][30:]:  # the same tokens in both
        context.decode({0: [token], 1: [token]})
    assert context.cells(0)["pos"].tolist() == context.cells(1)["pos"].tolist()
    np.testing.assert_allclose(
        context.cells(0)["score"], context.cells(1)["score"], rtol=1e-3, atol=1e-7
    )
    lc.llama_free(context.ctx)


def test_a_moved_sequence_takes_its_scores_along(model, alone):
    """Copy, then remove the source before the next batch."""
    context = Context(model, POLICY, n_seq=2)
    context.decode({0: PROMPTS[0]})
    for token in STEPS[0][:30]:
        context.decode({0: [token]})
    memory = lc.llama_get_memory(context.ctx)
    lc.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    lc.llama_memory_seq_rm(memory, 0, -1, -1)
    context.n_past[1] = context.n_past[0]
    for token in STEPS[0][30:]:
        context.decode({1: [token]})
    assert context.cells(1)["pos"].tolist() == alone[0]["pos"].tolist()
    np.testing.assert_allclose(context.cells(1)["score"], alone[0]["score"], rtol=1e-3, atol=1e-7)
    lc.llama_free(context.ctx)


def test_a_copied_prefix_does_not_end_an_announced_prompt(model):
    context = Context(model, POLICY, n_seq=2)
    context.announce(0, 60)
    context.decode({0: PROMPTS[0][:60]})
    lc.llama_memory_seq_cp(lc.llama_get_memory(context.ctx), 0, 1, -1, -1)
    context.n_past[1] = 60
    context.announce(1, 90)
    for i in range(60, 150, 30):
        context.decode({1: PROMPTS[0][i : i + 30]})
    context.decode({1: STEPS[0][:1]})
    assert len(context.cells(1)) == 151
    context.decode({1: STEPS[0][1:2]})
    assert len(context.cells(1)) == POLICY.n_budget
    lc.llama_free(context.ctx)


def test_a_unified_cache_for_several_sequences_is_refused(model):
    context = Context(model, POLICY, n_seq=2, unified=True)
    assert "unified" in context.refusal
    context.decode({0: PROMPTS[0], 1: PROMPTS[1]})  # and still works
    lc.llama_free(context.ctx)
