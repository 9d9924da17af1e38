"""What the tests of saved states share."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
from helpers import logits

from pyinertia import KVPolicy, Llama

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
TOKENS = np.random.default_rng(1).integers(0, 256, 600).tolist()
DEFAULTS = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


def load(path, **kwargs) -> Llama:
    return Llama(str(path), **(DEFAULTS | {"kv_policy": POLICY} | kwargs))


def complete(llm: Llama, prompt: list[int], n: int) -> dict:
    """n letters: whole characters, no end."""
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]{60}", verbose=False)
    return llm.create_completion(prompt, max_tokens=n, temperature=0.0, grammar=grammar)


def take(llm: Llama, prompt: list[int], n: int) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0.0), n))


def play(llm: Llama, tokens: list[int]) -> list[tuple]:
    """Decode steps; what can be seen after each of them."""
    seen = []
    for token in tokens:
        llm.eval([token])
        stats = llm.kv_stats()
        counters = stats.n_tokens, stats.n_evicted, stats.n_evictions, stats.n_refreshes
        seen.append((logits(llm), llm.kv_cells(), counters))
    return seen


def assert_same(a: list[tuple], b: list[tuple], atol: float = 0.0) -> None:
    for (logits_a, cells_a, counters_a), (logits_b, cells_b, counters_b) in zip(a, b, strict=True):
        assert np.array_equal(cells_a["pos"], cells_b["pos"])
        assert np.allclose(cells_a["score"], cells_b["score"], rtol=0, atol=atol)
        assert np.allclose(logits_a, logits_b, rtol=0, atol=atol)
        assert counters_a == counters_b
