"""Sequences of one context have their own streams, budgets and scores."""

from __future__ import annotations

import llama_cpp as lc
import numpy as np
import pytest
import tiny_models

from pyinertia import KVPolicy, _native

POLICY = KVPolicy(n_budget=48, n_sink=2, n_recent=8, n_window=8, n_pool=3)
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in (150, 90)]
STEPS = [RNG.integers(0, 256, 60).tolist() for _ in PROMPTS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    yield model
    lc.llama_model_free(model)


class Context:
    """A context for n_seq sequences with an engine attached."""

    def __init__(self, model, n_seq: int, *, unified: bool = False, policy=POLICY) -> None:
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = 512 * n_seq, n_seq, unified
        params.n_threads = params.n_threads_batch = 1
        params.type_k = params.type_v = 0  # f32: batched and alone agree but for rounding
        self.ctx = lc.llama_init_from_model(model, params)
        self.n_past = [0] * n_seq
        self.refusal = _native.attach(self.ctx, policy, True)

    def decode(self, ids: dict[int, list[int]]) -> None:
        n = sum(map(len, ids.values()))
        batch = lc.llama_batch_init(n, 0, 1)
        for seq_id, values in ids.items():
            for token in values:
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, self.n_past[seq_id]
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
                batch.logits[i] = True
                batch.n_tokens += 1
                self.n_past[seq_id] += 1
        assert lc.llama_decode(self.ctx, batch) == 0
        lc.llama_batch_free(batch)

    def cells(self, seq_id: int) -> np.ndarray:
        return _native.cells(self.ctx, seq_id)


@pytest.fixture(scope="module")
def alone(model):
    """The cells of each sequence when it has a context of its own."""
    out = []
    for prompt, steps in zip(PROMPTS, STEPS, strict=True):
        context = Context(model, 1)
        context.decode({0: prompt})
        for token in steps:
            context.decode({0: [token]})
        out.append(context.cells(0))
        lc.llama_free(context.ctx)
    return out


def test_sequences_in_one_batch_keep_what_each_keeps_alone(model, alone):
    context = Context(model, 2)
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
    context = Context(model, 2)
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
    context = Context(model, 2)
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


def test_a_unified_cache_for_several_sequences_is_refused(model):
    context = Context(model, 2, unified=True)
    assert "unified" in context.refusal
    context.decode({0: PROMPTS[0], 1: PROMPTS[1]})  # and still works
    lc.llama_free(context.ctx)
