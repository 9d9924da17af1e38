"""A batch that is aborted, and Ctrl-C at any moment: what follows is as if it had not begun."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path

import llama_cpp as lc
import numpy as np
import pytest
import tiny_models
from first_layer import FirstLayer
from helpers import logits, positions
from llama_cpp.llama_speculative import LlamaDraftModel
from low_level import Context
from states import TOKENS, load

from pyinertia import KVPolicy, Llama, _native
from pyinertia.interrupts import deferred

POLICY = KVPolicy(n_budget=48, n_sink=2, n_recent=8, n_window=8, n_pool=3)
LAZY = replace(POLICY, n_refresh=4)
BOUNDED = replace(POLICY, prefill="bounded", n_budget=300)
NO_ABORT = lc.ggml_abort_callback()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def stop_after(n_calls: int):
    """An abort callback that says stop the time after."""
    left = [n_calls]

    def stop(_) -> bool:
        left[0] -= 1
        return left[0] < 0

    return lc.ggml_abort_callback(stop)


# aborted batches


def seen(context: Context) -> tuple:
    stats = context.stats()
    counters = [stats[name] for name in ("n_used", "n_evicted", "n_evictions", "n_refreshes")]
    n_vocab = tiny_models.BOS + 2
    rows = np.ctypeslib.as_array(lc.llama_get_logits(context.ctx), shape=(n_vocab,))
    return context.cells(0).tolist(), counters, rows.tolist()


@pytest.mark.parametrize("n_calls", [0, 3, 15, 25])
@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        LAZY,
        BOUNDED,
        replace(POLICY, scorer="recency"),
        replace(LAZY, scorer="keydiff", frozen=True),
        replace(POLICY, n_budget=0.3, heads="max"),
    ],
    ids=["ema", "lazy", "bounded", "recency", "keydiff", "share"],
)
def test_an_aborted_batch_has_not_been(model, policy, n_calls):
    """In any phase: batches of a prompt, the first decode step, scored and other steps, a turn."""
    aborted, whole = Context(model, policy), Context(model, policy)
    prompts = [TOKENS[:250], TOKENS[250:450]]
    steps = [TOKENS[i : i + 1] for i in range(450, 461)]
    turn = [[TOKENS[461:561]], [TOKENS[i : i + 1] for i in range(561, 566)]]
    n_aborted = 0
    for context in (aborted, whole):
        context.announce(0, 450)
    for tokens in (*prompts, *steps, *turn[0], *turn[1]):
        stop = stop_after(n_calls)
        lc.llama_set_abort_callback(aborted.ctx, stop, None)
        code = aborted.try_decode({0: tokens})
        n_aborted += code != 0
        lc.llama_set_abort_callback(aborted.ctx, NO_ABORT, None)
        if code:
            assert code == 2
            assert aborted.n_past[0] - 1 == lc.llama_memory_seq_pos_max(
                lc.llama_get_memory(aborted.ctx), 0
            )
            aborted.decode({0: tokens})
        whole.decode({0: tokens})
        assert seen(aborted) == seen(whole)
        if tokens is prompts[1]:
            for context in (aborted, whole):
                context.announce(0, -1)
    assert n_aborted == 2 + 11 + 1 + 5
    for context in (aborted, whole):
        lc.llama_free(context.ctx)


def test_an_aborted_batch_before_closed_gaps(model):
    """Keys are rotated all or not at all, whatever the abort callback says."""
    contexts = [Context(model, POLICY) for _ in range(2)]
    memories = [lc.llama_get_memory(context.ctx) for context in contexts]
    for context in contexts:
        context.decode({0: TOKENS[:200]})
        for token in TOKENS[200:210]:
            context.decode({0: [token]})
    stop = stop_after(0)
    lc.llama_set_abort_callback(contexts[0].ctx, stop, None)
    for context, memory in zip(contexts, memories, strict=True):
        assert _native.close_gaps(context.ctx, 0, 1).size == POLICY.n_budget - 1
        context.n_past[0] = lc.llama_memory_seq_pos_max(memory, 0) + 1
    contexts[0].decode({0: [TOKENS[210]]}, expected=2)
    lc.llama_set_abort_callback(contexts[0].ctx, NO_ABORT, None)
    for context in contexts:
        context.decode({0: [TOKENS[210]]})
    assert seen(contexts[0]) == seen(contexts[1])
    for context in contexts:
        lc.llama_free(context.ctx)


def test_an_aborted_generation_goes_on(tiny):
    llm, whole = (load(tiny, kv_policy=LAZY) for _ in range(2))
    expected = list(islice(whole.generate(TOKENS[:200], temp=0.0), 30))
    stream, got = llm.generate(TOKENS[:200], temp=0.0), []
    got += islice(stream, 10)
    stop = stop_after(20)
    lc.llama_set_abort_callback(llm.ctx, stop, None)
    with pytest.raises(RuntimeError, match="llama_decode returned 2"):
        next(stream)
    lc.llama_set_abort_callback(llm.ctx, NO_ABORT, None)
    for token in expected[9:29]:
        llm.eval([token])
        got.append(int(np.argmax(logits(llm))))
    assert got == expected
    whole.eval(expected[29:])
    llm.eval(expected[29:])
    assert (llm.kv_cells() == whole.kv_cells()).all()


# Ctrl-C

PROMPT, FEW, ASKED, N_NEW = TOKENS[:100], TOKENS[140:146], TOKENS[100:140], 8
N_CALLS = len(PROMPT) + len(FEW) + len(ASKED)


def first_turn(llm: Llama) -> list[int]:
    """Evaluate a prompt and a few steps; return the prompt that goes on from there."""
    llm.reset()
    llm.eval(PROMPT)
    for token in FEW:
        llm.eval([token])
    return [*PROMPT, *FEW, *ASKED]


def interrupted(call, n_lines: int, within: str = "") -> bool:
    """Run a call with Ctrl-C after so many lines of Python; returns whether it came that far.

    within: count those of this function, else all of llama_cpp and pyinertia.
    """
    left = n_lines

    def trace(frame, event, _):
        nonlocal left
        if Path(frame.f_code.co_filename).parent.name not in ("llama_cpp", "pyinertia"):
            return None
        if event == "line" and frame.f_code.co_name == (within or frame.f_code.co_name):
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert left > 0, "Ctrl-C was lost"
    return False


# llama_cpp's sampler, interrupted in its constructor, fails in its destructor
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"kv_policy": None},
        {"kv_policy": POLICY},
        {"kv_policy": LAZY},
        {"kv_policy": replace(BOUNDED, n_budget=130), "n_batch": 32},
    ],
    ids=["none", "ema", "lazy", "bounded"],
)
def test_ctrl_c_anywhere_in_a_generation(tiny, kwargs):
    """Tokens, cells and scores are as if the step that it came in had not begun."""
    llm = load(tiny, **kwargs)
    llm.kv_query("")  # `eval`, which takes up what is left, does not know the prompt's end
    prompt = first_turn(llm)
    tokens, at = list(prompt), {llm.n_tokens: llm.kv_cells()}
    for token in islice(llm.generate(prompt, temp=0.0), N_NEW):
        tokens.append(token)
        at[llm.n_tokens] = llm.kv_cells()

    def generate() -> None:
        # one that is left to the garbage collector swallows Ctrl-C at its end
        with closing(llm.generate(prompt, temp=0.0)) as stream:
            list(islice(stream, N_NEW))

    rng, n_lines, n_interrupted = random.Random(0), 0, 0
    while True:
        n_lines += rng.randint(1, 60)
        first_turn(llm)
        if not interrupted(generate, n_lines):
            break
        n_interrupted += 1
        n = llm.n_tokens
        if n_interrupted % 2 and len(prompt) <= n < len(tokens):
            # what the step had made room for is gone: evaluated again, its logits are others
            is_same = kwargs["kv_policy"] is None or not llm._requires_eval
            token = next(llm.generate(tokens[:n], temp=0.0))
            assert token == tokens[n] or not is_same, "logits of another token"
            continue
        while (n := llm.n_tokens) < len(tokens) - 1:
            assert llm._input_ids.tolist() == tokens[:n], n_lines
            llm.eval(tokens[n : len(prompt)] if n < len(prompt) else tokens[n : n + 1])
            assert (llm.kv_cells() == at[llm.n_tokens]).all(), (n_lines, n)
    assert n_interrupted > 10


def interrupt_after(monkeypatch, llm: Llama, n_calls: int) -> None:
    """Let Ctrl-C come right after a batch was computed."""
    decode, left = llm._ctx.decode, [n_calls]

    def decode_and_stop(batch) -> None:
        decode(batch)
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm._ctx, "decode", decode_and_stop)


@pytest.mark.parametrize("query", [None, "which?"])
def test_ctrl_c_in_a_later_batch_leaves_no_logits_of_another_token(tiny, monkeypatch, query):
    """With a question, the batches of the prompt and of the question take turns."""
    llm, other = (load(tiny, kv_policy=replace(BOUNDED, n_budget=100)) for _ in range(2))
    for one in (llm, other) if query else ():
        one.kv_query(query)
    interrupt_after(monkeypatch, llm, 2)
    with pytest.raises(KeyboardInterrupt):
        llm.eval(TOKENS[:200])
    monkeypatch.undo()
    n = llm.n_tokens
    assert 0 < n < 100
    llm.kv_query(None)
    other.kv_query(None)
    assert next(llm.generate(TOKENS[:n], temp=0.0)) == next(other.generate(TOKENS[:n], temp=0.0))


def test_ctrl_c_in_a_step_leaves_no_score_whoever_looks_first(tiny, monkeypatch):
    llm = load(tiny)
    list(islice(llm.generate(TOKENS[:60], temp=0.0), 3))
    before = {cell["pos"]: cell["score"] for cell in llm.kv_cells()}
    interrupt_after(monkeypatch, llm, 1)
    with pytest.raises(KeyboardInterrupt):
        llm.eval([7])
    monkeypatch.undo()
    llm._cached()  # as any prompt does
    after = {cell["pos"]: cell["score"] for cell in llm.kv_cells()}
    assert len(after) == len(before) - 1  # it had made room
    assert after == {pos: before[pos] for pos in after}


def test_a_prompt_that_is_cached_whole_is_not_evaluated_again(tiny, monkeypatch):
    llm = load(tiny)
    (token,) = islice(llm.generate(TOKENS[:60], temp=0.0), 1)
    interrupt_after(monkeypatch, llm, 1)  # there is nothing to interrupt
    for _ in range(2):
        assert next(llm.generate(TOKENS[:60], temp=0.0)) == token


def test_ctrl_c_while_positions_are_renumbered(tiny):
    """n_tokens and input_ids say what the cells hold, whenever it came."""
    layer = FirstLayer(tiny)
    llm = load(tiny, kv_policy=POLICY, kv_positions="compact", n_ctx=104, type_k=0, type_v=0)

    def generate() -> None:
        with closing(llm.generate(TOKENS[:100], temp=0.0)) as stream:
            list(islice(stream, 8))

    for n_lines in range(1, 1000):
        llm.reset()
        if not interrupted(generate, n_lines, within="_close_gaps"):
            break
        llm.eval(TOKENS[:1])
        size = lc.llama_state_seq_get_size(llm.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        lc.llama_state_seq_get_data(llm.ctx, state, size, 0)
        ids = llm._input_ids.tolist()
        layer.check({pos: ids[pos] for pos in positions(llm)}, bytes(state))
    assert n_lines > 10


class Wrong(LlamaDraftModel):
    """Guesses that are never right."""

    def __call__(self, input_ids, /, **kwargs):
        return np.full(5, 256, np.intc)  # BOS


def test_ctrl_c_while_guesses_leave(tiny):
    """What n_tokens counts is in the cells, whenever it came."""
    llm = load(tiny, kv_policy=POLICY, draft_model=Wrong())

    def generate() -> None:
        with closing(llm.generate(TOKENS[:100], temp=0.0)) as stream:
            list(islice(stream, 3))

    for n_lines in range(1, 100):
        llm.reset()
        if not interrupted(generate, n_lines, within="_drop_drafted"):
            break
        assert set(range(100, llm.n_tokens)) <= set(positions(llm)), n_lines
        n_held = llm.n_tokens
        llm.eval(TOKENS[:1])
        assert positions(llm)[-1] == n_held
    assert n_lines > 3


CHILD = """
import sys, time
from pathlib import Path
from pyinertia import KVPolicy, Llama, _native

policy = KVPolicy(n_budget=48, n_sink=2, n_recent=8)
llm = Llama(sys.argv[1], n_ctx=512, n_threads=1, n_threads_batch=1, verbose=False, kv_policy=policy)
prompt = list(range(200))
expected = [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(100))]
for i in range(int(sys.argv[2])):
    got = []
    print("go", flush=True)
    try:
        while True:
            got = []
            for token, _ in zip(llm.generate(prompt, temp=0.0), range(len(expected))):
                got.append(token)
            assert got == expected
    except KeyboardInterrupt:
        pass
    assert got == expected[: len(got)], got
assert [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(100))] == expected
print("ok", flush=True)
"""


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_ctrl_c_from_outside(tiny):
    """A real signal, wherever it strikes: the next prompt is answered as ever."""
    n = 15
    command = [sys.executable, "-c", CHILD, str(tiny), str(n)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        rng = random.Random(0)
        for _ in range(n):
            assert child.stdout.readline() == "go\n"
            time.sleep(rng.uniform(0, 0.05))
            child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == "ok\n"
    assert child.returncode == 0


def test_deferred_waits_and_then_interrupts():
    done = []

    @deferred()
    def work() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("within")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["within"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=deferred()(lambda: done.append("thread")))
    thread.start()
    thread.join()
    assert done == ["within", "thread"]
