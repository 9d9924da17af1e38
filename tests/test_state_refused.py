"""Saved states that do not fit, are damaged or are foreign: refused, and the cache as before."""

from __future__ import annotations

import copy
import ctypes
from dataclasses import replace

import llama_cpp
import numpy as np
import pytest
import tiny_models
from helpers import positions
from hypothesis import given, settings
from hypothesis import strategies as st
from low_level import Context
from states import BUDGET, DEFAULTS, POLICY, TOKENS, assert_same, load, play, take

from pyinertia import Llama, PolicyError, _native


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


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
        ({"version": 1}, ValueError, "version 1, this pyinertia reads version 2"),
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


@pytest.mark.parametrize("cell", [0, BUDGET - 1])
def test_a_position_below_zero(state, used, expected, cell):
    raw = bytearray(state.llama_state)
    at = 4 + len("llama") + 8 + 12 * cell
    raw[at : at + 4] = (-2).to_bytes(4, "little", signed=True)
    message = "llama.cpp does not accept its cells"
    refused(used, foreign(state, bytes(raw)), ValueError, message, expected)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beta": 0.5}, "ranked with beta=0.99"),
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


def test_a_state_without_logits_is_no_state_with_them(tiny):
    llm, other = load(tiny, logits_all=True), load(tiny)
    other.eval(TOKENS[:30])
    llm.eval(TOKENS[100:120])
    with pytest.raises(ValueError, match="without logits_all"):
        llm.load_state(other.save_state())
    assert positions(llm) == list(range(20))


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
        SHARED.clear()  # the next example starts anew, also if this one fails
        assert kind == "bytes"
        assert np.isfinite(llm.kv_cells()["score"]).all()
        llm.eval([TOKENS[0]])
        assert len(positions(llm)) <= BUDGET + 1
        llm.reset()


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
