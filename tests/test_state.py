"""Saved states: continued they give the same logits and evictions, also in another process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models
from helpers import logits, positions
from states import POLICY, TOKENS, assert_same, load, play, take

POLICIES = {
    "ema": POLICY,
    "frozen": replace(POLICY, frozen=True),
    "mean": replace(POLICY, aggregation="mean"),
    "recency": replace(POLICY, scorer="recency"),
    "learned": replace(POLICY, scorer="learned"),
    "random": replace(POLICY, scorer="random", seed=7),
    "share": replace(POLICY, n_budget=0.3),
    "bounded": replace(POLICY, n_budget=64, prefill="bounded"),
}
SAVED_AFTER = {"prompt": 0, "first decode step": 1, "cut": 2, "decode": 30}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.mark.parametrize("when", SAVED_AFTER)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loaded_state_continues_bit_for_bit(tiny, policy, when):
    saved, restored = (load(tiny, kv_policy=POLICIES[policy]) for _ in range(2))
    saved.eval(TOKENS[:300])
    n = SAVED_AFTER[when]
    play(saved, TOKENS[300 : 300 + n])
    state = pickle.loads(pickle.dumps(saved.save_state()))
    take(restored, TOKENS[300:400], 10)  # whatever was there before
    restored.load_state(state)
    assert np.array_equal(restored.kv_cells(), saved.kv_cells())
    rest = TOKENS[300 + n : 340 + n]
    # cells that leave holes are packed by a load, so sums have another order: 256 are not moved
    atol = 1e-3 if policy == "bounded" else 0.0
    assert_same(play(saved, rest), play(restored, rest), atol)


def test_a_lazy_policy_continues_with_the_same_evictions(tiny):
    """A lazy cut leaves holes, which a load closes: sums have another order then."""
    saved, restored = (load(tiny, kv_refresh=8) for _ in range(2))
    saved.eval(TOKENS[:300])
    play(saved, TOKENS[300:315])
    restored.load_state(saved.save_state())
    for token in TOKENS[315:350]:
        for llm in (saved, restored):
            llm.eval([token])
        assert positions(restored) == positions(saved)
        assert np.allclose(logits(restored), logits(saved), atol=1e-2)


def test_the_cache_of_a_sliding_window_is_part_of_it(tmp_path):
    path = tiny_models.write_gemma3(tmp_path / "gemma3.gguf", n_window=32)
    saved, restored = load(path), load(path)
    saved.eval(TOKENS[:300])
    play(saved, TOKENS[300:320])
    restored.load_state(saved.save_state())
    # the window's cells are packed, its sums have another order
    assert_same(play(saved, TOKENS[320:380]), play(restored, TOKENS[320:380]), atol=1e-2)


CONTINUE = """
import pickle, sys
import pyinertia  # first: it finds the library
import numpy as np
from states import TOKENS, load, play
llm = load(sys.argv[1])
with open(sys.argv[2], "rb") as file:
    llm.load_state(pickle.load(file))
with open(sys.argv[3], "wb") as file:
    pickle.dump(play(llm, TOKENS[330:370]), file)
"""


def test_another_process_continues_bit_for_bit(tiny, tmp_path):
    llm = load(tiny)
    llm.eval(TOKENS[:300])
    play(llm, TOKENS[300:330])
    state, out = tmp_path / "state", tmp_path / "out"
    state.write_bytes(pickle.dumps(llm.save_state()))
    root = Path(__file__).parent
    code = f"import sys; sys.path[:0] = [{str(root.parent)!r}, {str(root)!r}]" + CONTINUE
    subprocess.run([sys.executable, "-c", code, tiny, state, out], check=True)
    assert_same(play(llm, TOKENS[330:370]), pickle.loads(out.read_bytes()))


def test_a_chat_goes_on_after_a_restart(tiny):
    kwargs = {"n_ctx": 2048, "kv_budget": 80, "chat_format": "chatml"}
    saved, restored = (load(tiny, **kwargs) for _ in range(2))
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]{60}", verbose=False)
    messages = [{"role": "system", "content": "Be short."}]
    options = {"max_tokens": 12, "temperature": 0.0, "grammar": grammar}
    for turn in range(3):
        messages.append({"role": "user", "content": f"{turn} " * 30})
        answer = saved.create_chat_completion(messages, **options)
        messages.append(answer["choices"][0]["message"])
    restored.load_state(pickle.loads(pickle.dumps(saved.save_state())))
    messages.append({"role": "user", "content": "And now?"})
    answers = [llm.create_chat_completion(messages, **options) for llm in (saved, restored)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert positions(saved) == positions(restored)
    assert saved.kv_stats().n_tokens == restored.kv_stats().n_tokens
    assert set(range(restored._kv_n_system)) <= set(positions(restored))


def test_logits_of_all_tokens_are_restored(tiny):
    saved, restored = (load(tiny, logits_all=True) for _ in range(2))
    saved.eval(TOKENS[:50])
    restored.load_state(saved.save_state())
    assert np.array_equal(restored._scores, saved._scores)
    assert len(load(tiny).save_state().scores) == 0


def test_tokens_that_were_taken_back_by_hand_are_not_saved(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:30])
    llm.n_tokens = 20
    state = llm.save_state()
    llm.load_state(state)
    assert positions(llm) == list(range(20))
