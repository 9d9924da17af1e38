"""Several models in one process and in threads; nothing of them is left when they are gone."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from threading import Barrier

import llama_cpp
import numpy as np
import pytest
import tiny_models
from helpers import logits
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from pyinertia import KVPolicy, Llama, ModelError

TOKENS = np.random.default_rng(1).integers(0, 256, 400).tolist()
CONTEXT = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
POLICY = KVPolicy(n_budget=40, n_sink=2, n_recent=8, n_window=4, n_pool=1)
STATM = Path("/proc/self/statm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny(folder):
    return tiny_models.write_chat(folder / "llama.gguf")


@pytest.fixture(scope="module")
def lora(folder):
    return tiny_models.write_lora(folder / "adapter.gguf")


# side by side

SIDES = {
    "full": {},
    "ema": {"kv_policy": POLICY},
    "bounded": {"kv_policy": POLICY, "kv_prefill": "bounded", "flash_attn": True},
    "h2o": {"kv_policy": "h2o", "kv_budget": 64, "kv_refresh": 3},
    "recency": {"kv_policy": "streaming-llm", "kv_budget": 50, "type_k": 8},
    "draft": {"kv_policy": "tova", "kv_budget": 64, "draft_model": LlamaPromptLookupDecoding()},
}


def live(path: Path, kwargs: dict, start: Callable[[], object] = int) -> list:
    """A prompt, an answer, another prompt and answer: tokens, cells, logits."""
    start()
    with Llama(path, **CONTEXT, **kwargs) as llm:
        out = list(islice(llm.generate(TOKENS[:150], temp=0.0), 40))
        prompt = llm._input_ids.tolist() + TOKENS[200:260]
        out += islice(llm.generate(prompt, temp=0.0), 40)
        return [*out, llm.kv_cells().tobytes(), logits(llm).tobytes()]


def test_models_in_threads_do_what_they_do_alone(tiny):
    alone = [live(tiny, kwargs) for kwargs in SIDES.values()]
    barrier = Barrier(len(SIDES))
    with ThreadPoolExecutor(len(SIDES)) as pool:
        jobs = [pool.submit(live, tiny, kwargs, barrier.wait) for kwargs in SIDES.values()]
        together = [job.result() for job in jobs]
    for name, expected, given in zip(SIDES, alone, together, strict=True):
        assert given == expected, name


def test_models_that_take_turns_do_what_they_do_alone(tiny):
    llms = {name: Llama(tiny, **CONTEXT, **kwargs) for name, kwargs in SIDES.items()}
    streams = [llm.generate(TOKENS[:150], temp=0.0) for llm in llms.values()]
    turns = list(islice(zip(*streams, strict=True), 40))
    for (name, kwargs), given in zip(SIDES.items(), zip(*turns, strict=True), strict=True):
        assert list(given) == live(tiny, kwargs)[:40], name


def test_loading_in_threads_keeps_stdout(tiny):
    """While it loads a model, llama-cpp-python turns it off for the whole process."""

    def streams() -> tuple:
        return sys.stdout, sys.stderr, *(os.fstat(n).st_ino for n in (1, 2))

    before = streams()
    barrier = Barrier(4)

    def load_some() -> None:
        barrier.wait()
        for _ in range(8):
            Llama(tiny, **CONTEXT, kv_policy=POLICY).close()

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(load_some) for _ in range(4)]:
            job.result()
    assert streams() == before


def test_a_redirection_that_fails_stops_no_other(tiny, monkeypatch):
    """Nobody waits for what a load without file descriptors began."""

    def no_descriptors(_) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as few:
        few.setattr(os, "dup", no_descriptors)
        with pytest.raises(OSError, match="Too many open files"):
            Llama(tiny, **CONTEXT)
    other = threading.Thread(target=lambda: Llama(tiny, **CONTEXT).close(), daemon=True)
    other.start()
    other.join(60)
    assert not other.is_alive()


# the end of a model


def used(llm: Llama) -> None:
    llm.create_completion(TOKENS[:100], max_tokens=12)


def streamed(llm: Llama) -> None:
    for stream in (
        llm.create_completion(TOKENS[:100], stream=True),
        llm.generate(TOKENS[:90], temp=0.0),
    ):
        next(iter(stream))


def asked(llm: Llama) -> None:
    llm.set_cache(llama_cpp.LlamaRAMCache())
    messages = [{"role": "system", "content": "Hi."}, {"role": "user", "content": "Hello."}]
    for _ in range(2):
        llm.create_chat_completion(messages, max_tokens=3)
    llm.load_state(llm.save_state())


def ruled(llm: Llama) -> None:
    processors = llama_cpp.LogitsProcessorList([lambda ids, scores: scores])
    stops = llama_cpp.StoppingCriteriaList([lambda ids, scores: False])
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]+", verbose=False)
    rules = {"logits_processor": processors, "stopping_criteria": stops, "grammar": grammar}
    llm.create_completion(TOKENS[:100], max_tokens=5, logit_bias={65: 1.0}, **rules)


KINDS = {
    "full": {},
    "policy": {"kv_policy": POLICY},
    "lora": {"kv_policy": POLICY, "lora_path": None},  # a fixture's
    "draft": {"kv_policy": POLICY, "draft_model": LlamaPromptLookupDecoding()},
}


def with_file(kwargs: dict, lora: Path) -> dict:
    return {name: value or str(lora) for name, value in kwargs.items()}


@pytest.mark.parametrize("use", [used, streamed, asked, ruled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deleted_model_is_gone_at_once(tiny, lora, kind, use):
    """No cycle of references waits for the garbage collector, which knows nothing of its size."""
    kwargs = with_file(KINDS[kind], lora)
    gc.collect()
    gc.disable()
    try:
        llm = Llama(tiny, **CONTEXT, **kwargs)
        use(llm)
        model, gone = llm._model, weakref.ref(llm)
        del llm
        assert gone() is None
        assert model.model is None
    finally:
        gc.enable()


AT_EXIT = """
import atexit, sys
atexit.register(lambda: print("closed" if llm._model.model is None else "open"))  # runs last
from pyinertia import Llama
llm = Llama(sys.argv[1], n_ctx=512, n_threads=1, verbose=False)
"""


def test_a_model_that_is_open_at_the_end_is_closed(tiny):
    """Before Python takes its own parts down: llama.cpp's log goes through them."""
    command = [sys.executable, "-c", AT_EXIT, str(tiny)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


@pytest.mark.skipif(not STATM.exists(), reason="memory is read from /proc")
def test_memory_does_not_grow_with_the_models_that_were(tiny, lora):
    kinds = [with_file(kind, lora) for kind in KINDS.values()]

    def cycle(i: int) -> None:
        kwargs = kinds[i % len(kinds)]
        with Llama(tiny, **CONTEXT, **kwargs) as llm:
            used(llm)
            llm.reset()
            asked(llm)
        with pytest.raises(ModelError):
            Llama(tiny, **CONTEXT, lora_path=str(tiny))

    def n_resident() -> int:
        gc.collect()
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for i in range(8):
        cycle(i)
    before = n_resident()
    for i in range(40):
        cycle(i)
    assert n_resident() - before < 10 * tiny.stat().st_size  # of 80 models
