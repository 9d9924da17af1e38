"""No memory: an error that says so, the process goes on, and so does the object when there is some.

Each case is a process of its own, whose address space is limited.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_models

resource = pytest.importorskip("resource", reason="only POSIX limits a process's memory")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells and limits address space"),
    pytest.mark.skipif(
        "libasan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer reserves terabytes"
    ),
]

START = """
import resource, sys
from pathlib import Path

import numpy as np
from pyinertia import KVPolicy, Llama, PolicyError, _native

import llama_cpp
from low_level import Context

MIB = 1 << 20
small = {"n_threads": 1, "n_threads_batch": 1, "verbose": False}
policy = KVPolicy(n_budget=300, n_sink=2, n_recent=8)
tokens = np.random.default_rng(0).integers(0, 256, 3000).tolist()

def n_pages():
    return int(Path("/proc/self/statm").read_text().split()[0])

def limit(n_more=None):
    n_bytes = resource.RLIM_INFINITY
    if n_more is not None:
        n_bytes = n_pages() * resource.getpagesize() + n_more
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes, resource.RLIM_INFINITY))

def load(**kwargs):
    return Llama(sys.argv[1], **(small | {"kv_policy": policy} | kwargs))

def answer(llm):
    return [token for token, _ in zip(llm.generate(tokens[:400], temp=0.0), range(20))]

def says(call):
    try:
        call()
    except (MemoryError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""

first = load()
expected = answer(first)
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    # heads of 64: the positions of quantised keys can change
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf", n_head=2)


def run(tiny, code: str) -> str:
    env = os.environ | {"GGML_NO_BACKTRACE": "1", "OPENBLAS_NUM_THREADS": "1"}
    env |= {"PYTHONPATH": str(Path(__file__).parent)}
    # what was freed before is no reserve
    env |= {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", START + code, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_a_context_that_is_too_large(tiny):
    code = """
limit(200 * MIB)
for kwargs in ({"n_ctx": 1 << 20}, {"n_ctx": 1 << 20, "kv_policy": None}):
    print(says(lambda: load(**kwargs)))
assert answer(first) == expected and answer(load()) == expected
"""
    lines = run(tiny, code).splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("ValueError: Failed to create llama_context with n_ctx=1048576, ")
        assert "no memory" in line


def test_scores_that_are_too_large(tiny):
    code = """
limit(200 * MIB)
wide = KVPolicy(n_budget=1024, n_window=512)
print(says(lambda: load(n_ctx=1 << 17, n_batch=16, n_ubatch=16, kv_policy=wide)))
assert answer(first) == expected and answer(load()) == expected
"""
    line = run(tiny, code)
    assert line.startswith("PolicyError: ")
    assert "no memory for the scores of 131072 cells: 256 MiB" in line


def test_logits_that_are_too_large(tiny):
    code = """
limit(200 * MIB)
print(says(lambda: load(n_ctx=1 << 17, n_batch=16, n_ubatch=16, logits_all=True)))
assert answer(first) == expected and answer(load()) == expected
"""
    assert "MemoryError: Unable to allocate 129. MiB" in run(tiny, code)


def test_a_batch_that_finds_no_memory(tiny):
    """Whatever it is that does not fit: an error, and then the right answer."""
    code = """
n_failed = 0
wide = {"n_ctx": 1024, "n_batch": 1024, "n_ubatch": 1024}
for kwargs in (wide, wide | {"flash_attn": True, "type_k": 8}, wide | {"logits_all": True}):
    expected = answer(load(**kwargs))
    for n_more in [0, *(1 << n for n in range(12, 24))]:
        llm = load(**kwargs)
        limit(n_more)
        text = says(lambda: llm.eval(tokens[:1000]))
        limit()
        n_failed += bool(text)
        assert "llama_decode returned -2" in text or "MemoryError" in text or not text, text
        llm.reset()
        assert answer(llm) == expected, n_more
        llm.close()
print(n_failed)
"""
    assert int(run(tiny, code)) > 0


def test_an_engine_that_finds_no_memory(tiny):
    """The context serves as before, and takes an engine once there is memory."""
    code = """
plain, n_failed = answer(load(kv_policy=None)), 0
for n_more in [0, *(1 << n for n in range(10, 24))]:
    llm = load(kv_policy=None)
    limit(n_more)
    text = _native.attach(llm.ctx, policy, True)
    limit()
    n_failed += bool(text)
    assert not text or "graphs" in text or "memory" in text, text
    assert answer(llm) == (plain if text else expected), n_more
    llm.reset()
    assert _native.attach(llm.ctx, policy, True) == ""
    assert answer(llm) == expected, n_more
    llm.close()
print(n_failed)
"""
    assert int(run(tiny, code)) > 0


def test_gaps_that_are_closed_without_memory(tiny):
    """The next batch rotates the keys; copies that were pending, and later ones, keep scores."""
    code = """
params = llama_cpp.llama_model_default_params()
model = llama_cpp.llama_model_load_from_file(sys.argv[1].encode(), params)
small = KVPolicy(n_budget=48, n_sink=2, n_recent=8, n_window=8, n_pool=3)

def play(n_more):
    context = Context(model, small, n_seq=3, n_ctx=4096, n_ubatch=8, type_k=8)
    memory = llama_cpp.llama_get_memory(context.ctx)
    context.decode({0: tokens[:200]})
    for token in tokens[200:210]:
        context.decode({0: [token]})
    llama_cpp.llama_memory_seq_cp(memory, 0, 1, -1, -1)
    limit(n_more)
    n_before = n_pages()
    _native.close_gaps(context.ctx, 0, 1)
    grown = n_pages() > n_before
    limit()
    llama_cpp.llama_memory_seq_cp(memory, 0, 2, -1, -1)
    n_past = llama_cpp.llama_memory_seq_pos_max(memory, 0) + 1
    context.n_past = [n_past, 210, n_past]
    context.decode({0: tokens[210:211], 1: tokens[210:211], 2: tokens[210:211]})
    rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(context.ctx), shape=(3, 258)).copy()
    seen = [context.cells(s) for s in range(3)]
    llama_cpp.llama_free(context.ctx)
    return grown, seen, rows

grown, expected, logits = play(None)
assert grown
assert all(cells.size == small.n_budget and cells["score"].max() > 0 for cells in expected)
assert (expected[0] == expected[2]).all() and (expected[0]["pos"] < expected[1]["pos"]).any()
for n_more in (0, 1 << 16, 1 << 20):
    grown, seen, rows = play(n_more)
    assert not grown and (rows == logits).all(), n_more
    assert all((a == b).all() for a, b in zip(seen, expected)), n_more
"""
    run(tiny, code)
