"""Calls of C that are wrong: the engine's say so, and some of llama.cpp's end the process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import bootstrap
import llama_cpp as lc
import numpy as np
import pytest
import tiny_models
from low_level import Context

from pyinertia import KVPolicy, _native

POLICY = KVPolicy(n_budget=40, n_sink=2, n_recent=6)


@pytest.fixture
def context(model):
    context = Context(model, POLICY)
    yield context
    lc.llama_free(context.ctx)


@pytest.fixture
def shared(model):
    """A unified cache for several sequences, which has no engine."""
    context = Context(model, POLICY, n_seq=3, unified=True)
    yield context
    lc.llama_free(context.ctx)


@pytest.mark.parametrize("seq_id", [-(2**31), -1, 1, 256, 2**31 - 1])
def test_a_sequence_that_does_not_exist(context, seq_id):
    """llama.cpp's own calls abort on it; the engine's say so."""
    lib, ctx = _native.load(), context.ctx
    position = np.zeros(4, np.int32)
    assert not lib.llama_kv_evict_prompt(ctx, seq_id, 1)
    assert not lib.llama_kv_evict_probe(ctx, seq_id, 1)
    assert lib.llama_kv_evict_cells(ctx, seq_id, None, 0) == -1
    assert lib.llama_kv_evict_keep(ctx, seq_id, position.ctypes.data, 1) == -1
    assert lib.llama_kv_evict_close_gaps(ctx, seq_id, 1, position.ctypes.data, 4) == -1
    assert lib.llama_kv_evict_state_get(ctx, seq_id, None, 0) == 0
    assert not lib.llama_kv_evict_state_set(ctx, seq_id, b"abc", 3, None, 0)


@pytest.mark.parametrize("which", ["no context", "no engine"])
def test_a_context_that_has_no_engine(shared, which):
    lib, ctx = _native.load(), shared.ctx if which == "no engine" else None
    weights = np.ones(2, np.float32)
    stats, text = _native.EvictStats(), ctypes.create_string_buffer(100)
    assert lib.llama_kv_evict_n_layer(ctx) == -1
    assert not lib.llama_kv_evict_set_layer_weights(ctx, weights.ctypes.data, 2)
    assert not lib.llama_kv_evict_protect(ctx, 0, 4)
    assert not lib.llama_kv_evict_unprotect(ctx)
    assert not lib.llama_kv_evict_prompt(ctx, 0, 1)
    assert not lib.llama_kv_evict_probe(ctx, 0, 1)
    assert lib.llama_kv_evict_cells(ctx, 0, None, 0) == -1
    assert lib.llama_kv_evict_keep(ctx, 0, None, 0) == -1
    assert lib.llama_kv_evict_close_gaps(ctx, 0, 1, None, 0) == -1
    assert lib.llama_kv_evict_state_get(ctx, 0, None, 0) == 0
    assert not lib.llama_kv_evict_state_set(ctx, 0, None, 0, text, len(text))
    assert text.value
    assert not lib.llama_kv_evict_get_stats(ctx, ctypes.byref(stats))
    if ctx is None:
        params = _native.make_params(POLICY, True)
        assert not lib.llama_kv_evict_attach(None, params, text, len(text))
        assert text.value == b"there is no context"


def test_pointers_and_counts_that_do_not_fit(context):
    """Nothing is written beyond what was given, and nothing is taken from nowhere."""
    context.decode({0: list(range(20))})
    lib, ctx, before = _native.load(), context.ctx, context.cells(0).tolist()
    room = np.full(64, 77, np.uint8)
    assert lib.llama_kv_evict_cells(ctx, 0, room.ctypes.data, 2) == 20
    assert lib.llama_kv_evict_cells(ctx, 0, room.ctypes.data, -5) == 20
    assert (room[:8] != 77).any()
    assert (room[16:] == 77).all()
    size = lib.llama_kv_evict_state_get(ctx, 0, None, 2**40)
    assert lib.llama_kv_evict_state_get(ctx, 0, room.ctypes.data, 16) == size > 16
    assert (room[16:] == 77).all()
    for pos, n in ((None, 3), (None, -1), (room.ctypes.data, -1)):
        assert lib.llama_kv_evict_keep(ctx, 0, pos, n) == -2
    assert not lib.llama_kv_evict_set_layer_weights(ctx, None, 2)
    assert not lib.llama_kv_evict_set_layer_weights(ctx, room.ctypes.data, -1)
    assert not lib.llama_kv_evict_get_stats(ctx, None)
    for p0, p1 in ((-1, 3), (3, 3), (5, 2), (0, 2**31 - 1), (-(2**31), 2**31 - 1)):
        assert not lib.llama_kv_evict_protect(ctx, p0, p1)
    assert lib.llama_kv_evict_close_gaps(ctx, 0, -(2**31), None, 0) == 20
    assert lib.llama_kv_evict_close_gaps(ctx, 0, 0, room.ctypes.data, -1) == 20
    assert (room[16:] == 77).all()
    assert lib.llama_kv_evict_prompt(ctx, 0, -(2**31))
    assert context.cells(0).tolist() == before


ABORTS = {
    "no such sequence": "lc.llama_memory_seq_keep(memory, 2)",
    "below 0": "lc.llama_memory_seq_pos_max(memory, -1)",
    "a part to another stream": "lc.llama_memory_seq_cp(memory, 0, 1, 2, 4)",
    "more than n_batch": "context.decode({0: [0] * (n_batch + 1)})",
}


@pytest.mark.parametrize("call", ABORTS)
def test_what_llama_cpp_aborts_on(tmp_path, call):
    """What llama-kv-evict.h says of it; if one no longer does, take it off there."""
    path = tiny_models.write_llama(tmp_path / "llama.gguf")
    code = f"""
import pyinertia
import llama_cpp as lc
from low_level import Context
from test_c_abi_misuse import POLICY

model = lc.llama_model_load_from_file({str(path)!r}.encode(), lc.llama_model_default_params())
context = Context(model, POLICY, n_seq=2)
memory, n_batch = lc.llama_get_memory(context.ctx), lc.llama_n_batch(context.ctx)
context.decode({{0: [1, 2, 3, 4, 5]}})
print("so far", flush=True)
{ABORTS[call]}
print("and on", flush=True)
"""
    folders = [str(bootstrap.ROOT), *sys.path]
    env = os.environ | {"GGML_NO_BACKTRACE": "1", "PYTHONPATH": os.pathsep.join(folders)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert done.stdout == "so far\n"
    assert "GGML_ASSERT" in done.stderr
