"""LlamaRAMCache and LlamaDiskCache: a prompt gets the state that saves it the most, or none."""

from __future__ import annotations

from dataclasses import replace

import llama_cpp
import pytest
import tiny_models
from helpers import positions
from states import POLICY, TOKENS, complete, load


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def test_a_cache_offers_the_state_that_a_prompt_continues(tiny, tmp_path):
    """Regenerating a turn: the newest state departs, the one before it continues."""
    caches = llama_cpp.LlamaRAMCache(), llama_cpp.LlamaDiskCache(str(tmp_path / "states"))
    for cache in caches:
        llm = load(tiny)
        llm.set_cache(cache)
        first = complete(llm, TOKENS[:120], 10)
        assert first["usage"]["completion_tokens"] == 10
        history = llm._input_ids.tolist()
        cells = llm.kv_cells()
        complete(llm, history + TOKENS[300:330], 10)
        n_tokens = llm.kv_stats().n_tokens
        assert n_tokens == len(history) + 30 + 9
        # the last turn again, in other words
        complete(llm, history + TOKENS[400:430], 1)
        assert llm.kv_stats().n_tokens == len(history) + 30, "the state's counter, and the turn"
        assert set(cells["pos"].tolist()) <= set(positions(llm))


def test_a_cached_state_with_holes_is_no_prefix(tiny):
    cold, llm = load(tiny), load(tiny)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    complete(llm, TOKENS[:120], 20)
    complete(llm, TOKENS[300:400], 5)
    prompt = TOKENS[:100] + TOKENS[500:520]
    got = complete(llm, prompt, 12)
    expected = complete(cold, prompt, 12)
    assert got["choices"] == expected["choices"]
    assert len(llm.cache.states.cache_state) == 3


def test_two_chats_take_turns(tiny):
    llm = load(tiny, n_ctx=2048)
    llm.set_cache(llama_cpp.LlamaRAMCache())
    prompts, n_evaluated = {0: TOKENS[:100], 1: TOKENS[300:400]}, {0: 0, 1: 0}
    for turn in range(3):
        for chat, prompt in prompts.items():
            done = complete(llm, prompt, 8)
            assert done["usage"]["prompt_tokens"] == len(prompt)
            history = llm._input_ids.tolist()
            assert history[: len(prompt)] == prompt
            n_evaluated[chat] += (21 if turn else 100) + 7
            assert llm.kv_stats().n_tokens == n_evaluated[chat]
            prompts[chat] = history + TOKENS[500 + turn : 521 + turn]


def test_a_cache_skips_states_of_another_model_or_policy(tiny):
    cache = llama_cpp.LlamaRAMCache()
    other = load(tiny, kv_policy=replace(POLICY, beta=0.5))
    other.set_cache(cache)
    complete(other, TOKENS[:120], 4)
    llm = load(tiny)
    llm.set_cache(cache)
    complete(llm, TOKENS[:120], 4)
    assert llm.kv_stats().n_tokens == 120 + 3
    llm.set_cache(None)
    assert llm.cache is None


def test_a_cached_state_of_more_cells_than_there_are_is_passed_over(tiny):
    cache = llama_cpp.LlamaRAMCache()
    large = load(tiny, kv_policy=None, n_ctx=1024)
    large.set_cache(cache)
    complete(large, TOKENS[:500] + TOKENS[:100], 2)
    small = load(tiny, n_ctx=1024, kv_policy=replace(POLICY, n_budget=64, prefill="bounded"))
    small.set_cache(cache)
    history = large._input_ids.tolist()
    for _ in range(2):
        assert complete(small, history + TOKENS[:5], 2)["usage"]["completion_tokens"] == 2


def test_a_state_that_is_used_leaves_the_cache_last(tiny):
    llm, cache = load(tiny, kv_policy=None), llama_cpp.LlamaRAMCache()
    llm.set_cache(cache)
    complete(llm, TOKENS[:60], 2)
    complete(llm, TOKENS[100:160], 2)
    complete(llm, [*TOKENS[:60], 7], 2)  # loads the first
    first, *_ = cache.cache_state
    assert list(first[:60]) == TOKENS[100:160]
