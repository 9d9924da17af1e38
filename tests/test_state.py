"""Saved states: continued they give the same logits and evictions; damaged they are refused."""

from __future__ import annotations

import copy
import ctypes
import pickle
import subprocess
import sys
from dataclasses import replace
from itertools import islice
from pathlib import Path

import llama_cpp
import numpy as np
import pytest
import tiny_models
from helpers import logits, positions
from hypothesis import given, settings
from hypothesis import strategies as st
from low_level import Context

from pyinertia import KVPolicy, Llama, PolicyError, _native

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
TOKENS = np.random.default_rng(1).integers(0, 256, 600).tolist()
DEFAULTS = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}

POLICIES = {
    "ema": POLICY,
    "frozen": replace(POLICY, frozen=True),
    "mean": replace(POLICY, aggregation="mean"),
    "recency": replace(POLICY, scorer="recency"),
    "random": replace(POLICY, scorer="random", seed=7),
    "share": replace(POLICY, n_budget=0.3),
    "bounded": replace(POLICY, n_budget=64, prefill="bounded"),
}
SAVED_AFTER = {"prompt": 0, "first decode step": 1, "cut": 2, "decode": 30}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


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


# continue equals continue


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
from test_state import TOKENS, load, play
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


# states that do not fit: refused, and the cache as before


@pytest.fixture
def used(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:300])
    play(llm, TOKENS[300:330])
    return llm


@pytest.fixture(scope="module")
def state(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[200:330])
    play(llm, TOKENS[330:350])
    return llm.save_state()


@pytest.fixture(scope="module")
def expected(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:300])
    play(llm, TOKENS[300:330])
    return play(llm, TOKENS[330:340])


def refused(llm: Llama, state, error, message: str, expected: list[tuple]) -> None:
    with pytest.raises(error, match=message):
        llm.load_state(state)
    assert_same(play(llm, TOKENS[330:340]), expected)


def changed(state, **fields):
    other = copy.copy(state)
    vars(other).update(fields)
    return other


def test_a_damaged_state(used, state, expected):
    for fields in (
        {"llama_state": state.llama_state[:-1]},
        {"llama_state": bytes(100) + state.llama_state[100:]},
        {"engine": state.engine[:-4]},
        {"engine": b""},
        {"seed": 5},
        {"input_ids": state.input_ids[::-1].copy()},
    ):
        with pytest.raises(ValueError, match="its checksum is wrong"):
            used.load_state(changed(state, **fields))
    assert_same(play(used, TOKENS[330:340]), expected)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"version": 2}, ValueError, "version 2, this pyinertia reads version 1"),
        ({"n_tokens": 151}, ValueError, "its tokens are not all there"),
        ({"n_tokens": 10**6}, ValueError, "exceed the context window of 512"),
        ({"input_ids": np.full(150, 10**6, np.intc)}, ValueError, "unknown tokens"),
    ],
)
def test_a_state_that_says_something_else(used, state, expected, fields, error, message):
    refused(used, changed(state, **fields), error, message, expected)


def test_no_state_at_all(used, expected):
    refused(used, b"something", ValueError, "needs what save_state returned, got bytes", expected)


def test_a_state_of_another_model(used, expected, tmp_path):
    other = load(tiny_models.write_llama(tmp_path / "other.gguf", n_layer=3))
    other.eval(TOKENS[:50])
    refused(used, other.save_state(), ValueError, "is of another model: llama", expected)


def test_a_state_of_another_cache_type(tiny, used, expected):
    other = load(tiny, type_k=llama_cpp.GGML_TYPE_F32)
    other.eval(TOKENS[:50])
    message = "saved with type_k=0, this Llama has type_k=1"
    refused(used, other.save_state(), ValueError, message, expected)


def test_a_state_of_more_cells(tiny, expected):
    """Its tokens fit, but not its cells: they are as many as one batch and the budget."""
    whole = load(tiny, kv_policy=None)
    whole.eval(TOKENS[:400])
    small = load(tiny, kv_prefill="bounded")
    small.eval(TOKENS[:150])
    before = small.kv_cells()
    with pytest.raises(ValueError, match=r"llama\.cpp does not accept its cells"):
        small.load_state(whole.save_state())
    assert np.array_equal(small.kv_cells(), before)
    assert small.n_tokens == 150
    small.eval(TOKENS[150:160])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.5}, "ranked with beta=0.95"),
        ({"aggregation": "sum"}, "ranked with aggregation='ema'"),
        ({"scorer": "recency"}, "ranked with scorer='attention'"),
        ({"layer_weights": (1.0, 2.0)}, "ranked with layer_weights=None"),
    ],
)
def test_a_state_of_another_ranking(tiny, state, fields, message):
    llm = load(tiny, kv_policy=replace(POLICY, **fields))
    llm.eval(TOKENS[:50])
    with pytest.raises(PolicyError, match=message):
        llm.load_state(state)
    assert positions(llm) == list(range(50))


@pytest.mark.parametrize("budget", [30, 100])
def test_another_budget_takes_over_the_scores(tiny, state, budget):
    llm = load(tiny, kv_budget=budget)
    llm.load_state(state)
    play(llm, TOKENS[350:420])
    assert len(positions(llm)) == budget
    if budget == 30:
        again = load(tiny, kv_budget=budget)
        again.load_state(state)
        scores = again.kv_cells()
        play(again, TOKENS[350:351])
        middle = scores[(scores["pos"] >= 2) & (scores["pos"] < 142)]
        lowest = set(middle["pos"][np.argsort(middle["score"])[:11]].tolist())
        assert lowest == set(scores["pos"].tolist()) - set(positions(again))


def test_a_state_without_a_policy_is_ranked_like_a_prompt(tiny):
    whole, llm = load(tiny, kv_policy=None), load(tiny)
    whole.eval(TOKENS[:150])
    llm.load_state(whole.save_state())
    play(llm, TOKENS[150:151])
    assert positions(llm) == list(range(151)), "the first decode query sees every cell"
    assert np.count_nonzero(llm.kv_cells()["score"]) == 151
    play(llm, TOKENS[151:152])
    assert len(positions(llm)) == BUDGET


def test_a_state_loads_without_a_policy(tiny, state):
    llm = load(tiny, kv_policy=None)
    llm.load_state(state)
    assert positions(llm) == state.cached.positions.tolist()


# bytes that nobody vouches for


def test_a_state_of_the_parent_class(tiny):
    parent = llama_cpp.Llama(str(tiny), **DEFAULTS)
    parent.eval(TOKENS[:100])
    ours, cold = load(tiny), load(tiny)
    ours.load_state(parent.save_state())
    prompt = TOKENS[:100] + TOKENS[300:310]
    assert take(ours, prompt, 12) == take(cold, prompt, 12)
    assert ours.kv_stats().n_tokens == 10 + 11


def foreign(state, data: bytes) -> llama_cpp.LlamaState:
    n = state.n_tokens
    scores = np.zeros((n, 258), np.float32)
    return llama_cpp.LlamaState(state.input_ids, scores, n, data, len(data), 1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_garbage_is_refused_and_the_cache_stays(tiny, state, data):
    llm = _shared(tiny)
    raw = bytearray(state.llama_state)
    head = 4 + len("llama")
    kind = data.draw(st.sampled_from(["cut", "bytes", "pos", "count"]))
    if kind == "cut":
        del raw[data.draw(st.integers(1, len(raw) - 1)) :]
    elif kind == "bytes":
        at = data.draw(st.integers(0, head + 300))
        raw[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    elif kind == "pos":
        at = head + 8 + 12 * data.draw(st.integers(0, BUDGET - 1))
        raw[at : at + 4] = data.draw(st.integers(-(2**31), 2**31 - 1)).to_bytes(
            4, "little", signed=True
        )
    else:
        raw[head + 4 : head + 8] = data.draw(st.integers(0, 2**32 - 1)).to_bytes(4, "little")
    before = llm.kv_cells()
    if bytes(raw) == state.llama_state:
        return
    message = ""
    try:
        llm.load_state(foreign(state, bytes(raw)))
    except ValueError as error:
        message = str(error)
    if message:
        assert message.startswith("this state cannot be loaded")
        assert np.array_equal(llm.kv_cells(), before)
    else:  # other positions, but possible ones
        pos = positions(llm)
        assert pos == sorted(set(pos))
        assert pos[-1] == state.n_tokens - 1
    llm.eval([TOKENS[llm.n_tokens]])


def timeless(engine: bytes) -> bytes:
    """Without the milliseconds, which go on: 12 words, 2 layer weights and 5 counters before."""
    n = 4 * (12 + 2 + 2 * 5)
    return engine[:n] + engine[n + 24 :]


SHARED: list[Llama] = []


def _shared(path) -> Llama:
    if not SHARED or SHARED[0].n_tokens > 400:
        SHARED[:] = [load(path)]
        SHARED[0].eval(TOKENS[:150])
        play(SHARED[0], TOKENS[150:160])
    return SHARED[0]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_the_engine_takes_no_bytes_on_trust(tiny, data):
    """Below Python's checksum: any damage is refused or harmless, and refused changes nothing."""
    llm = _shared(tiny)
    raw = bytearray(_native.get_state(llm.ctx, 0))
    kind = data.draw(st.sampled_from(["cut", "longer", "bytes"]))
    if kind == "cut":
        del raw[data.draw(st.integers(1, len(raw) - 1)) :]
    elif kind == "longer":
        raw += data.draw(st.binary(min_size=1, max_size=64))
    else:
        at = data.draw(st.integers(0, len(raw) - 4))
        raw[at : at + 4] = data.draw(st.binary(min_size=4, max_size=4))
    before, genuine = llm.kv_cells(), timeless(_native.get_state(llm.ctx, 0))
    if message := _native.set_state(llm.ctx, 0, bytes(raw)):
        assert message.startswith(("the state", "these bytes"))
        assert np.array_equal(llm.kv_cells(), before)
        assert timeless(_native.get_state(llm.ctx, 0)) == genuine
    else:
        assert kind == "bytes"
        assert np.isfinite(llm.kv_cells()["score"]).all()
        llm.eval([TOKENS[0]])
        assert len(positions(llm)) <= BUDGET + 1
        llm.reset()
        SHARED.clear()


def test_the_engine_refuses_what_is_not_its_own(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:50])
    lib, state = _native.load(), _native.get_state(llm.ctx, 0)
    assert lib.llama_kv_evict_state_get(None, 0, None, 0) == 0
    assert lib.llama_kv_evict_state_get(llm.ctx, 5, None, 0) == 0
    assert not lib.llama_kv_evict_state_set(llm.ctx, 5, state, len(state), None, 0)
    assert not lib.llama_kv_evict_state_set(llm.ctx, 0, None, 10, None, 0)
    llm.eval(TOKENS[50:51])
    assert "other cells than the sequence" in _native.set_state(llm.ctx, 0, state)


def test_one_sequence_moves_to_another_context(model):
    """The C calls, beside llama.cpp's own for one sequence."""
    source, target = Context(model, POLICY, n_seq=2), Context(model, POLICY, n_seq=2)
    source.decode({0: TOKENS[:60], 1: TOKENS[100:400]})
    for i in range(20):
        source.decode({0: [TOKENS[60 + i]], 1: [TOKENS[400 + i]]})
    size = llama_cpp.llama_state_seq_get_size(source.ctx, 1)
    cells = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(source.ctx, cells, size, 1) == size
    engine = _native.get_state(source.ctx, 1)
    target.decode({1: TOKENS[:30]})
    assert _native.set_state(target.ctx, 0, engine).startswith("the state has other cells")
    assert llama_cpp.llama_state_seq_set_data(target.ctx, cells, size, 0) == size
    assert _native.set_state(target.ctx, 0, engine) == ""
    target.n_past[0] = source.n_past[1]
    for token in TOKENS[420:450]:
        source.decode({1: [token]})
        target.decode({0: [token]})
        assert target.positions(0) == source.positions(1)
    assert target.positions(1) == list(range(30))
    for context in (source, target):
        llama_cpp.llama_free(context.ctx)


# caches of states


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


def test_tokens_that_were_taken_back_by_hand_are_not_saved(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:30])
    llm.n_tokens = 20
    state = llm.save_state()
    llm.load_state(state)
    assert positions(llm) == list(range(20))


def test_a_state_without_logits_is_no_state_with_them(tiny):
    llm, other = load(tiny, logits_all=True), load(tiny)
    other.eval(TOKENS[:30])
    llm.eval(TOKENS[100:120])
    with pytest.raises(ValueError, match="without logits_all"):
        llm.load_state(other.save_state())
    assert positions(llm) == list(range(20))
