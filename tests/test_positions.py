"""Positions without end: the gaps are closed when n_ctx is used up, and generation goes on."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import llama_cpp
import numpy as np
import pytest
import stock
import tiny_models
from helpers import HolesLlama, kl, logits, positions
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from pyinertia import KVPolicy, Llama, PolicyError, _native

N_CTX, BUDGET = 256, 64
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
BOUNDED = replace(POLICY, prefill="bounded")
TOKENS = np.random.default_rng(3).integers(0, 256, 8 * N_CTX).tolist()
DEFAULTS = {"n_ctx": N_CTX, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Heads of 64, whose quantised keys can be rotated."""
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "wide.gguf", n_head=2)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return tiny_models.write_gemma3(tmp_path_factory.mktemp("tiny") / "gemma3.gguf", n_window=32)


def load(path, cls=Llama, **kwargs) -> Llama:
    defaults = DEFAULTS | {"kv_policy": POLICY, "kv_positions": "compact"}
    return cls(str(path), **(defaults | kwargs))


def runs(old: np.ndarray) -> list[list[int]]:
    """[p0, p1, shift] of the positions that move, for llama_memory_seq_add."""
    out: list[list[int]] = []
    for new, pos in enumerate(old.tolist()):
        if out and out[-1][1] == pos and out[-1][2] == new - pos:
            out[-1][1] += 1
        else:
            out.append([pos, pos + 1, new - pos])
    return [run for run in out if run[2]]


class Steps:
    """Evaluates, and writes down what a stock cache has to do for the same."""

    def __init__(self, llm: Llama, monkeypatch) -> None:
        self.llm, self.steps, self.logits, self.before, self.n_closed = llm, [], [], set(), 0
        close_gaps = _native.close_gaps

        def watched(ctx, seq_id, n_new):
            old = close_gaps(ctx, seq_id, n_new)
            left = set(old.tolist())
            self.steps += [["rm", sorted(self.before - left)], ["add", runs(old)]]
            self.before = {new for new, pos in enumerate(old.tolist()) if pos in self.before}
            self.n_closed += 1
            return old

        monkeypatch.setattr(_native, "close_gaps", watched)

    def eval(self, part: list[int]) -> None:
        self.llm.eval(part)
        now = set(positions(self.llm))
        self.steps += [["rm", sorted(self.before - now)], ["eval", part]]
        self.logits.append(logits(self.llm))
        self.before = now

    def stock(self, lib_dir, path, **context) -> np.ndarray:
        context = {"n_ctx": N_CTX, "n_batch": 64, "n_threads": 1, **context}
        steps = [step for step in self.steps if step[1]]
        return stock.run(lib_dir, model=path, context=context, steps=steps)["logits"]


@pytest.mark.parametrize(
    ("policy", "kv"),
    [
        (POLICY, {}),
        (BOUNDED, {"flash_attn": True}),
        (POLICY, {"flash_attn": True, "type_k": llama_cpp.GGML_TYPE_Q8_0}),
    ],
    ids=["full", "bounded, flash", "q8_0"],
)
def test_five_contexts_equal_shifts_of_a_stock_cache(
    tiny, wide, stock_lib_dir, monkeypatch, policy, kv
):
    path = wide if "type_k" in kv else tiny
    llm = load(path, HolesLlama, kv_policy=policy, **kv)
    seen = Steps(llm, monkeypatch)
    seen.eval(TOKENS[:100])
    for token in TOKENS[100 : 5 * N_CTX]:
        seen.eval([token])
        assert llm.n_tokens <= N_CTX
        assert positions(llm)[-1] == llm.n_tokens - 1
    assert llm.kv_stats().n_tokens == 5 * N_CTX
    assert seen.n_closed >= 5
    expected = seen.stock(stock_lib_dir, path, **kv)
    assert np.array_equal(np.array(seen.logits), expected)


def test_with_compaction_they_agree_but_for_rounding(tiny, stock_lib_dir, monkeypatch):
    seen = Steps(load(tiny), monkeypatch)
    seen.eval(TOKENS[:100])
    for token in TOKENS[100 : 5 * N_CTX]:
        seen.eval([token])
    expected = seen.stock(stock_lib_dir, tiny)
    assert np.allclose(np.array(seen.logits), expected, atol=0.05)
    assert np.mean([kl(a, b) for a, b in zip(expected, seen.logits, strict=True)]) < 1e-4


def test_a_window_keeps_its_distances(gemma, stock_lib_dir, monkeypatch):
    """With n_recent above the window a cut takes nothing that the window sees."""
    policy = replace(POLICY, n_recent=40)
    llm = load(gemma, HolesLlama, kv_policy=policy, swa_full=True)
    seen = Steps(llm, monkeypatch)
    seen.eval(TOKENS[:100])
    for token in TOKENS[100 : 3 * N_CTX]:
        seen.eval([token])
    assert seen.n_closed >= 3
    expected = seen.stock(stock_lib_dir, gemma, swa_full=True)
    assert np.allclose(np.array(seen.logits), expected, atol=1e-2)


def test_gaps_within_a_window_stay(gemma, monkeypatch):
    llm = load(gemma, kv_policy=replace(POLICY, n_recent=2), swa_full=True)
    seen = Steps(llm, monkeypatch)
    seen.eval(TOKENS[:100])
    while not seen.n_closed:
        before, n_before = positions(llm), llm.n_tokens
        seen.eval([TOKENS[llm.n_tokens]])
    window = [pos - n_before for pos in before if pos >= n_before - 32]
    now = [pos - (llm.n_tokens - 1) for pos in positions(llm)]
    assert set(now) & set(range(-32, 0)) <= set(window)
    assert now[:20] == list(range(now[0], now[0] + 20))
    for token in TOKENS[300:400]:
        seen.eval([token])
        assert np.isfinite(seen.logits[-1]).all()


# what follows the cells


def test_scores_and_tokens_stay_with_their_cells(tiny, monkeypatch):
    """A frozen ranking changes no score, so each must be where its token is."""
    llm = load(tiny, kv_policy=replace(POLICY, frozen=True))
    seen = Steps(llm, monkeypatch)
    seen.eval(TOKENS[:100])
    for token in TOKENS[100:N_CTX]:
        seen.eval([token])
    assert llm.n_tokens == N_CTX
    known = {llm.input_ids[c["pos"]]: c["score"] for c in llm.kv_cells() if c["score"] > 0}
    before = llm.input_ids[positions(llm)].tolist()
    seen.eval([7])
    assert seen.n_closed == 1
    assert llm.n_tokens == BUDGET
    ids = llm._input_ids.tolist()
    assert ids[-1] == 7
    removed = len(before) - (len(ids) - 1)
    assert removed == 1
    assert [t for t in before if t in ids] == [t for t in ids[:-1] if t in before]
    for cell in llm.kv_cells():
        if cell["score"] > 0:
            assert known[ids[cell["pos"]]] == cell["score"]


def test_protected_ranges_follow(tiny):
    llm = load(tiny, kv_policy=replace(POLICY, protect=((30, 40), (600, 610))))
    wanted = TOKENS[30:40]
    llm.eval(TOKENS[:100])
    for i, token in enumerate(TOKENS[100 : 4 * N_CTX]):
        llm.eval([token])
        if i > 10:
            ids = llm.input_ids[positions(llm)].tolist()
            assert any(ids[k : k + 10] == wanted for k in range(len(ids)))
    # positions 600 to 609 had not been there when the gaps were first closed
    later = TOKENS[600:610]
    assert any(ids[k : k + 10] == later for k in range(len(ids)))
    llm.reset()
    assert llm._kv_ranges == [(30, 40), (600, 610)]


# through the rest of the API


def test_completions_go_on_under_one_grammar(tiny):
    llm = load(tiny)
    text = "abcdefghij" * 80
    grammar = llama_cpp.LlamaGrammar.from_string(f'root ::= "{text}"', verbose=False)
    answer = llm.create_completion(TOKENS[:50], max_tokens=None, grammar=grammar)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert llm.n_tokens <= N_CTX
    assert llm.kv_stats().n_tokens == 50 + 800


def test_generated_tokens_are_those_of_single_steps(tiny):
    """Restarting the parent's generator over a renumbering changes nothing."""
    llm, again = load(tiny), load(tiny)
    got = list(islice(llm.generate(TOKENS[:50], temp=0.0), 3 * N_CTX))
    again.eval(TOKENS[:50])
    for token in got[:-1]:
        assert int(np.argmax(logits(again))) == token
        again.eval([token])


def test_a_bounded_prompt_of_many_contexts(tiny):
    llm, parts = load(tiny, kv_policy=BOUNDED), load(tiny, kv_policy=BOUNDED)
    llm.kv_query("")  # the question's tokens would count
    answer = list(islice(llm.generate(TOKENS[: 5 * N_CTX], temp=0.0), 20))
    assert len(answer) == 20
    assert llm.n_tokens <= N_CTX
    assert len(positions(llm)) == BUDGET
    assert llm.kv_stats().n_tokens == 5 * N_CTX + 19
    parts.eval(TOKENS[: 5 * N_CTX])
    assert parts.n_tokens <= N_CTX
    history = llm._cached().tokens.tolist()
    assert history[: 5 * N_CTX] == TOKENS[: 5 * N_CTX]
    # and the conversation goes on from all of it
    n_before = llm.kv_stats().n_tokens
    next(llm.generate([*history, 1, 2, 3], temp=0.0))
    assert llm.kv_stats().n_tokens == n_before + 3


def test_a_named_question_ranks_an_endless_prompt(tiny):
    llm = load(tiny, kv_policy=BOUNDED)
    llm.kv_query("where?")
    assert len(list(islice(llm.generate(TOKENS[: 3 * N_CTX], temp=0.0), 10))) == 10
    assert len(positions(llm)) == BUDGET


def test_a_chat_without_end_keeps_its_system_message(tiny):
    llm = load(tiny, kv_policy=BOUNDED, kv_budget=96, chat_format="chatml")
    llm.kv_query("")  # the question's tokens would count
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]{60}", verbose=False)
    messages = [{"role": "system", "content": "Be short."}]
    head, n_evaluated = b"<|im_start|>system\nBe short.", []
    for turn in range(20):
        messages.append({"role": "user", "content": f"{turn} is the turn."})
        answer = llm.create_chat_completion(messages, max_tokens=12, grammar=grammar, seed=1)
        messages.append(answer["choices"][0]["message"])
        n_evaluated.append(llm.kv_stats().n_tokens)
        assert bytes(llm.input_ids[1 : 1 + len(head)].tolist()) == head
        assert set(range(1 + len(head))) <= set(positions(llm))
    assert n_evaluated[-1] > 5 * N_CTX
    assert max(np.diff(n_evaluated)) < 120, "a turn was evaluated again"


def test_a_saved_state_knows_the_tokens_that_left(tiny):
    saved, restored = load(tiny), load(tiny)
    list(islice(saved.generate(TOKENS[:50], temp=0.0), 2 * N_CTX))
    restored.load_state(saved.save_state())
    assert np.array_equal(restored._cached().tokens, saved._cached().tokens)
    prompt = saved._cached().tokens.tolist() + TOKENS[:5]
    for llm in (saved, restored):
        n_before = llm.kv_stats().n_tokens
        next(llm.generate(prompt, temp=0.0))
        assert llm.kv_stats().n_tokens == n_before + 5
    assert positions(saved) == positions(restored)


def test_a_state_saved_right_after_renumbering_is_whole(tiny):
    """Keys are rotated at once, not with the next batch."""
    llm, restored = load(tiny), load(tiny)
    for token in TOKENS[:N_CTX]:
        llm.eval([token])
    llm._close_gaps(1)
    assert llm.n_tokens == BUDGET - 1
    restored.load_state(llm.save_state())
    for token in TOKENS[N_CTX : N_CTX + 40]:
        for one in (llm, restored):
            one.eval([token])
        assert np.allclose(logits(llm), logits(restored), atol=1e-2)
        assert positions(llm) == positions(restored)


def test_a_new_prompt_starts_from_the_first_position(tiny):
    llm, cold = load(tiny), load(tiny)
    list(islice(llm.generate(TOKENS[:50], temp=0.0), 2 * N_CTX))
    prompt = TOKENS[500:600]
    assert list(islice(llm.generate(prompt, temp=0.0), 9)) == list(
        islice(cold.generate(prompt, temp=0.0), 9)
    )
    assert llm.n_tokens == 108


def test_a_departure_after_renumbering_counts_its_own_tokens(tiny):
    policy = replace(POLICY, beta=0.95, protect=((30, 40),))  # forgets some of the prompt by then
    llm = load(tiny, kv_policy=policy)
    list(islice(llm.generate(TOKENS[:50], temp=0.0), 2 * N_CTX))
    n_whole = llm._cached().n_whole
    assert POLICY.n_sink <= n_whole < 50
    prompt = TOKENS[:50] + TOKENS[700:800]
    n_before = llm.kv_stats().n_tokens
    next(llm.generate(prompt, temp=0.0))
    assert llm.kv_stats().n_tokens == n_before + len(prompt) - n_whole
    assert llm._cached().tokens.tolist() == prompt
    assert llm._kv_ranges == [(30, 40)]
    next(llm.generate([*prompt, 5, 6], temp=0.0))
    assert llm.kv_stats().n_tokens == n_before + len(prompt) - n_whole + 2


# what is refused


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kv_policy": None}, "kv_policy=None evicts nothing"),
        ({"draft_model": LlamaPromptLookupDecoding()}, "a draft_model takes positions back"),
        ({"logits_all": True}, "logits_all=True numbers the logits by position"),
    ],
)
def test_what_cannot_be_renumbered_is_refused(tiny, kwargs, message):
    with pytest.raises(PolicyError, match=f"kv_positions='compact': {message}"):
        load(tiny, **kwargs)


def test_a_small_window_cache_is_refused(gemma):
    with pytest.raises(PolicyError, match="sliding windows without swa_full=True"):
        load(gemma, n_ctx=1024)


def test_quantised_keys_that_llama_cpp_would_crash_on_are_refused(tiny):
    with pytest.raises(PolicyError, match="quantised keys of heads whose size is no multiple"):
        load(tiny, flash_attn=True, type_k=llama_cpp.GGML_TYPE_Q8_0)


def test_a_prompt_beyond_the_cells_is_refused(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:20])
    with pytest.raises(ValueError, match="300 new tokens beside 0 in the cache exceed its 256"):
        next(llm.generate(TOKENS[100:400]))
    assert positions(llm) == list(range(20))


def test_a_prompt_that_does_not_fit_beside_the_cache_evaluates_nothing(tiny):
    """A full prefill evicts nothing before its end."""
    llm = load(tiny)
    history = TOKENS[:100]
    history += list(islice(llm.generate(history, temp=0.0), 20))[:-1]
    before, n_before = positions(llm), llm.kv_stats().n_tokens
    n_new = 256 - len(before)
    for call in (lambda: next(llm.generate(history + TOKENS[:n_new])), lambda: llm.eval([1] * 256)):
        with pytest.raises(ValueError, match=f"beside {len(before)} in the cache"):
            call()
        assert positions(llm) == before
        assert llm.kv_stats().n_tokens == n_before
    assert list(islice(llm.generate(history + TOKENS[: n_new - 1], temp=0.0), 30))


def test_keep_ends_at_n_ctx(tiny):
    llm = load(tiny, kv_positions="keep")
    llm.eval(TOKENS[:N_CTX])
    with pytest.raises(ValueError, match="257 tokens exceed the context window of 256"):
        llm.eval([1])


def test_the_c_call_is_safe(tiny):
    lib, llm = _native.load(), load(tiny)
    assert lib.llama_kv_evict_close_gaps(None, 0, 1, None, 0) == -1
    assert lib.llama_kv_evict_close_gaps(llm.ctx, 7, 1, None, 0) == -1
    assert lib.llama_kv_evict_close_gaps(llm.ctx, 0, 1, None, 0) == 0  # nothing is there
    llm.eval(TOKENS[:20])
    assert lib.llama_kv_evict_close_gaps(llm.ctx, 0, -5, None, 10) == 20
