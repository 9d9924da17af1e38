"""Calls of llama.cpp between two batches: shifts, loaded states, failed batches, removed tokens."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import llama_cpp as lc
import numpy as np
import pytest
import tiny_models
from low_level import Context

from pyinertia import KVPolicy, _native

BUDGET = 48
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=8, n_pool=3)
TOKENS = np.random.default_rng(5).integers(0, 256, 600).tolist()


@pytest.fixture
def context(model, request):
    context = Context(model, getattr(request, "param", POLICY))
    assert context.refusal == ""
    yield context
    lc.llama_free(context.ctx)


def steps(context: Context, n: int) -> None:
    for _ in range(n):
        context.decode({0: [TOKENS[context.n_past[0]]]})


@pytest.mark.parametrize(
    "context", [POLICY, replace(POLICY, scorer="recency")], indirect=True, ids=["ema", "recency"]
)
def test_a_context_shift_moves_positions_and_nothing_else(context):
    """What llama.cpp's servers do at the end of the context: drop some, shift the rest down."""
    context.decode({0: TOKENS[:200]})
    steps(context, 20)
    before = context.positions()
    memory = lc.llama_get_memory(context.ctx)
    assert lc.llama_memory_seq_rm(memory, 0, 50, 100)
    lc.llama_memory_seq_add(memory, 0, 100, -1, -50)
    context.n_past[0] -= 50
    steps(context, 1)
    expected = {p if p < 50 else p - 50 for p in before if not 50 <= p < 100}
    n_cut = len(expected) - (BUDGET - 1)
    assert len(expected - set(context.positions())) == max(0, n_cut)
    steps(context, 60)
    pos = context.positions()
    assert len(pos) == BUDGET
    if context.policy.scorer == "recency":
        newest = context.n_past[0]
        assert pos == [0, 1, *range(newest - BUDGET + 2, newest)]


def test_a_loaded_state_is_ranked_before_it_is_cut(model, context):
    """Its first decode query still sees all of it, whatever the context did before."""
    other = Context(model, POLICY)
    other.decode({0: TOKENS[200:400]})
    size = lc.llama_state_get_size(other.ctx)
    state = (ctypes.c_uint8 * size)()
    lc.llama_state_get_data(other.ctx, state, size)
    lc.llama_free(other.ctx)

    context.decode({0: TOKENS[:150]})
    steps(context, 20)
    assert len(context.positions()) == BUDGET
    assert lc.llama_state_set_data(context.ctx, state, size) == size
    context.n_past[0] = 200
    assert context.positions() == list(range(200))
    steps(context, 1)
    assert context.positions() == list(range(201))
    assert np.count_nonzero(context.cells(0)["score"]) == 201
    steps(context, 1)
    pos = context.positions()
    assert len(pos) == BUDGET
    assert sum(2 <= p < 202 - BUDGET for p in pos) > 5  # not just the newest


def test_a_failed_batch_of_a_prompt_is_still_to_come(context):
    stop = lc.ggml_abort_callback(lambda _: True)
    context.announce(0, 150)
    lc.llama_set_abort_callback(context.ctx, stop, None)
    context.decode({0: TOKENS[:150]}, expected=2)
    lc.llama_set_abort_callback(context.ctx, lc.ggml_abort_callback(), None)
    context.decode({0: TOKENS[:75]})
    context.decode({0: TOKENS[75:150]})
    steps(context, 1)
    assert context.positions() == list(range(151))
    steps(context, 1)
    assert len(context.positions()) == BUDGET


def test_a_first_step_that_is_taken_back_comes_again(context):
    """Speculative decoding and retries remove the newest tokens."""
    context.decode({0: TOKENS[:150]})
    steps(context, 1)
    assert lc.llama_memory_seq_rm(lc.llama_get_memory(context.ctx), 0, 150, -1)
    context.n_past[0] = 150
    steps(context, 1)
    assert context.positions() == list(range(151))
    assert context.stats()["n_evicted"] == 0
    steps(context, 1)
    assert len(context.positions()) == BUDGET


def test_a_prompt_that_fills_the_cache_can_be_decoded(context):
    context.decode({0: TOKENS[:512]})
    steps(context, 1)
    assert len(context.positions()) == 512
    steps(context, 1)
    assert len(context.positions()) == BUDGET


@pytest.mark.parametrize("context", [replace(POLICY, n_budget=0.9)], indirect=True)
def test_a_share_is_never_more_than_the_cells(context):
    """It is a share of all positions, also of those that have left."""
    context.decode({0: TOKENS[:480]})
    steps(context, 60)
    assert len(context.positions()) == 432
    context.decode({0: TOKENS[540:570]})
    steps(context, 30)
    assert len(context.positions()) <= 512


@pytest.mark.parametrize(
    "context", [replace(POLICY, n_budget=256, prefill="bounded")], indirect=True
)
def test_a_batch_that_cannot_fit_evicts_nothing(context):
    context.decode({0: TOKENS[:300]})
    context.decode({0: TOKENS[:512]}, expected=1)
    assert context.positions() == list(range(300))
    assert not _native.probe(context.ctx, 0, 2**31 - 1)
    context.decode({0: TOKENS[300:550]})
    assert len(context.positions()) == 512


def test_a_context_without_room_for_what_stays_is_refused(model):
    context = Context(model, replace(POLICY, n_budget=1024, n_sink=500, n_recent=100))
    assert "has 512 cells" in context.refusal
    assert "n_sink + n_recent + n_refresh need 601" in context.refusal
    lc.llama_free(context.ctx)


def test_layers_without_attention_are_left_out(tmp_path):
    path = tiny_models.write_deci(tmp_path / "deci.gguf")
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    context = Context(model, replace(POLICY, layer_weights=(1.0, 3.0)))
    assert context.refusal == ""
    context.decode({0: TOKENS[:300]})
    steps(context, 40)
    assert len(context.positions()) == BUDGET
    assert context.cells(0)["score"].max() > 0
    assert context.stats()["kv_bytes_resident"] > 0
    lc.llama_free(context.ctx)
    lc.llama_model_free(model)


def test_a_cleared_cache_starts_over(context):
    context.decode({0: TOKENS[:150]})
    steps(context, 20)
    lc.llama_memory_clear(lc.llama_get_memory(context.ctx), True)
    context.n_past[0] = 0
    context.decode({0: TOKENS[:60]})
    stats = context.stats()
    assert (stats["n_tokens"], stats["n_evicted"], stats["n_used"]) == (60, 0, 60)
    assert not context.cells(0)["score"].any()


def test_the_newest_cell_stays_without_recent_ones(model):
    context = Context(model, replace(POLICY, scorer="random", n_recent=0))
    context.decode({0: TOKENS[:150]})
    for _ in range(60):
        newest = context.n_past[0]
        steps(context, 1)
        assert context.positions()[-1] == newest
    lc.llama_free(context.ctx)


def test_a_snapshot_in_another_sequence_costs_no_cells(context):
    """Cells that two sequences share stay, and do not count against more than their owner."""
    context.decode({0: TOKENS[:150]})
    steps(context, 20)
    kept = context.positions()
    lc.llama_memory_seq_cp(lc.llama_get_memory(context.ctx), 0, 5, -1, -1)
    steps(context, 10)
    assert len(context.positions()) == BUDGET
    assert len(set(kept) & set(context.positions())) > BUDGET - 15


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scorer", 99),
        ("aggregation", -1),
        ("beta", float("nan")),
        ("lambda_", 2.0),
        ("budget_share", 1.5),
        ("n_pool", 4),
        ("n_window", 2**32 - 1),
        ("n_refresh", 0),
        ("n_budget", 10),
        ("n_sink", 2**31),
    ],
)
def test_bad_parameters_leave_the_engine_that_is_there(context, field, value):
    context.decode({0: TOKENS[:150]})
    steps(context, 5)
    kept = context.positions()
    params, text = _native.make_params(POLICY, True), ctypes.create_string_buffer(200)
    setattr(params, field, value)
    assert not _native.load().llama_kv_evict_attach(context.ctx, params, text, len(text))
    assert text.value.decode().startswith("a count" if field == "n_sink" else field.rstrip("_"))
    assert context.positions() == kept
    steps(context, 5)
    assert len(context.positions()) == BUDGET
