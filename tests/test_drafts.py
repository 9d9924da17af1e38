"""Speculative decoding: guesses that were not accepted leave no trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import llama_cpp
import numpy as np
import pytest
import serving
import tiny_families
import tiny_models
from helpers import positions
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
from low_level import Context
from replay import Recording, replay

from pyinertia import KVPolicy, Llama, ModelError

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
CONTEXT = {"n_ctx": 1024, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1}
TOKENS = np.random.default_rng(1).integers(0, 256, 400).tolist()
PROMPT = TOKENS[:20] * 6
N_RIGHT = 3


class Guess(LlamaDraftModel):
    """Knows what comes: of five guesses the first three are right."""

    def __init__(self, prompt: list[int], answer: list[int]) -> None:
        self.n_prompt, self.answer, self.ids = len(prompt), answer, []

    def __call__(self, input_ids, /, **kwargs):
        self.ids.append(input_ids.tolist())
        at = len(input_ids) - self.n_prompt
        right = self.answer[at : at + N_RIGHT]
        wrong = [(token + 1) % 256 for token in self.answer[at + N_RIGHT : at + 5]]
        return np.array(right + wrong, np.intc)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def answer(tiny):
    """What comes after PROMPT, one token at a time."""
    return take(load(tiny, cls=llama_cpp.Llama), PROMPT, 60)


def load(path, cls=Llama, **kwargs):
    return cls(str(path), verbose=False, **(CONTEXT | kwargs))


def take(llm, prompt: list[int], n: int) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0.0), n))


# the same answers


@pytest.mark.parametrize("logits_all", [False, True])
@pytest.mark.parametrize("n_batch", [2, 4, 64])
def test_greedy_answers_are_those_without_a_draft(tiny, answer, n_batch, logits_all):
    """Also where five guesses are more than a batch, and without the logits of every token."""
    draft = Guess(PROMPT, answer)
    llm = load(tiny, draft_model=draft, n_batch=n_batch, logits_all=logits_all)
    assert take(llm, PROMPT, 50) == answer[:50]
    n_accepted = 50 - len(draft.ids)
    assert n_accepted >= 50 * min(n_batch - 1, N_RIGHT) // (N_RIGHT + 1) - N_RIGHT
    assert llm.kv_stats().n_tokens - len(PROMPT) - 49 >= (len(draft.ids) - 1) * (n_batch > 4)


def test_a_window_that_was_passed_takes_guesses_back(tmp_path):
    """The window's own cache is full, and its cells are taken again and again."""
    path = tiny_models.write_gemma3(tmp_path / "gemma3.gguf", n_window=32)
    prompt = (TOKENS * 2)[:300]
    expected = take(load(path, swa_full=False), prompt, 300)
    draft = Guess(prompt, expected)
    llm = load(path, swa_full=False, draft_model=draft)
    assert take(llm, prompt, 290) == expected[:290]
    assert llama_cpp.llama_memory_seq_pos_min(llm._ctx.memory, 0) > 300
    assert len(draft.ids) < 290 / 3


def test_after_a_cut_answers_are_those_of_the_same_cells(tiny):
    draft = LlamaPromptLookupDecoding(num_pred_tokens=5)
    llm = load(tiny, cls=Recording, kv_policy=POLICY, draft_model=draft)
    given = take(llm, PROMPT, 80)
    n_steps = [len(step.tokens) for step in llm.steps[1:]]
    assert sum(n_steps) > 79 > len(n_steps) + 5, "nothing was rejected, or accepted"
    rows: dict[int, np.ndarray] = {}
    for step, same in zip(
        llm.steps, replay(tiny, llm.steps, **CONTEXT, logits_all=True), strict=False
    ):
        ends = range(step.n_past, step.n_past + len(step.tokens))
        rows |= {pos: same.scores[pos].copy() for pos in ends}
    assert given == [int(rows[len(PROMPT) - 1 + i].argmax()) for i in range(80)]


def test_rejected_guesses_count_for_nothing_in_the_scores(model):
    """A decode step is scored by its first token, which is no guess."""
    plain, drafted = (Context(model, POLICY) for _ in range(2))
    memory = llama_cpp.llama_get_memory(drafted.ctx)
    for context in (plain, drafted):
        context.announce(0, 30)
        context.decode({0: TOKENS[:30]})
    for at in range(30, 34):
        plain.decode({0: TOKENS[at : at + 1]})
        drafted.decode({0: [TOKENS[at], 7, 8, 9]})
        assert llama_cpp.llama_memory_seq_rm(memory, 0, at + 1, -1)
        drafted.n_past[0] = at + 1
        assert drafted.positions() == plain.positions() == list(range(at + 1))
        assert np.allclose(drafted.cells(0)["score"], plain.cells(0)["score"], rtol=1e-5)
    assert plain.cells(0)["score"].max() > 0
    for context in (plain, drafted):
        llama_cpp.llama_free(context.ctx)


@pytest.mark.parametrize("prefill", ["full", "bounded"])
@pytest.mark.parametrize("n_budget", [11, 12, 14, 40])
def test_guesses_take_the_room_that_the_budget_has(tiny, n_budget, prefill):
    policy = replace(POLICY, n_budget=n_budget, prefill=prefill)
    llm = load(tiny, kv_policy=policy, draft_model=LlamaPromptLookupDecoding())
    counts = []
    for _ in islice(llm.generate(PROMPT, temp=0.0), 60):
        counts.append(len(positions(llm)))
    assert max(counts[10:]) <= n_budget
    assert {0, 1} <= set(positions(llm))


def test_a_logits_processor_sees_no_guesses(tiny):
    """As many even tokens as odd ones: what it allows depends on what it sees."""

    def balance(input_ids, scores):
        seen.append(input_ids.tolist())
        n_odd = int((input_ids % 2).sum())
        is_odd = np.arange(scores.size) % 2 == 1
        return np.where(is_odd == (n_odd <= len(input_ids) // 2), scores, -np.inf)

    settings = {"temp": 0.0, "logits_processor": llama_cpp.LogitsProcessorList([balance])}
    seen: list[list[int]] = []
    expected = list(islice(load(tiny).generate(PROMPT, **settings), 30))
    plain, seen = seen, []
    llm = load(tiny, draft_model=Guess(PROMPT, expected))
    assert list(islice(llm.generate(PROMPT, **settings), 30)) == expected
    assert seen == plain
    assert seen[-1] == PROMPT + expected[:-1]


# the end


class Spy(Recording):
    """Remembers what was yielded."""

    def generate(self, *args, **kwargs):
        self.given = []
        for token in super().generate(*args, **kwargs):
            self.given.append(token)
            yield token


def assert_holds(llm: Llama, tokens: list[int]) -> None:
    assert llm._input_ids.tolist() == tokens
    assert positions(llm)[-1] == len(tokens) - 1


def assert_appends(llm: Recording, prompt: list[int]) -> None:
    """The prompt continues all that is held: only the rest of it is evaluated."""
    n_held = llm.n_tokens
    next(llm.generate(prompt, temp=0.0))
    assert llm.steps[-1].n_past == n_held
    assert llm.steps[-1].tokens == prompt[n_held:]


@pytest.mark.parametrize("n", range(1, 10))
def test_a_closed_generator_takes_its_guesses_along(tiny, answer, n):
    llm = load(tiny, cls=Spy, draft_model=Guess(PROMPT, answer))
    assert take(llm, PROMPT, n) == answer[:n]
    assert_holds(llm, PROMPT + answer[: n - 1])
    assert_appends(llm, PROMPT + answer[:n] + TOKENS[300:310])
    assert_holds(llm, PROMPT + answer[:n] + TOKENS[300:310])


def by_max_tokens(llm: Llama, **kwargs) -> None:
    assert llm.create_completion(max_tokens=7, **kwargs)["usage"]["completion_tokens"] == 7


def by_a_stop_string(llm: Llama, **kwargs) -> None:
    whole = llm.create_completion(max_tokens=20, **kwargs)["choices"][0]["text"]
    llm.reset()
    choice = llm.create_completion(max_tokens=20, stop=whole[6:10], **kwargs)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == whole[: whole.index(whole[6:10])]


def by_leaving_a_stream(llm: Llama, **kwargs) -> None:
    stream = llm.create_completion(max_tokens=20, stream=True, **kwargs)
    for _ in range(7):
        next(stream)
    stream.close()


def by_a_criterion(llm: Llama, **kwargs) -> None:
    # asked once more at the end, it gives the same answer
    stops = llama_cpp.StoppingCriteriaList([lambda ids, _: len(ids) == len(PROMPT) + 7])
    choice = llm.create_completion(stopping_criteria=stops, **kwargs)["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert len(choice["text"]) == 7


def by_an_error(llm: Llama, **kwargs) -> None:
    def fail(ids, _):
        if len(ids) == len(PROMPT) + 7:
            raise KeyboardInterrupt
        return False

    stops = llama_cpp.StoppingCriteriaList([fail])
    with pytest.raises(KeyboardInterrupt):
        llm.create_completion(stopping_criteria=stops, **kwargs)


@pytest.mark.parametrize("policy", [None, POLICY], ids=["full", "policy"])
@pytest.mark.parametrize(
    "end", [by_max_tokens, by_a_stop_string, by_leaving_a_stream, by_a_criterion, by_an_error]
)
def test_whatever_ends_it_the_next_prompt_is_appended(tiny, end, policy):
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]{60}", verbose=False)
    asked = {"prompt": PROMPT, "temperature": 0.0, "grammar": grammar}
    draft = Guess(PROMPT, list(load(tiny)(max_tokens=60, **asked)["choices"][0]["text"].encode()))
    llm = load(tiny, cls=Spy, kv_policy=policy, draft_model=draft)
    end(llm, **asked)
    n_held = len(llm.given) - (end not in (by_a_criterion, by_an_error))
    assert n_held > 0
    assert_holds(llm, PROMPT + llm.given[:n_held])
    assert_appends(llm, PROMPT + llm.given + TOKENS[300:310])


def test_a_chat_with_a_draft_never_starts_over(tiny):
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-c]{60}", verbose=False)
    draft = LlamaPromptLookupDecoding(num_pred_tokens=6)
    llm = load(tiny, cls=Recording, kv_policy=POLICY, draft_model=draft)
    messages = [{"role": "system", "content": "Be brief."}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} abcabc " * 10})
        n_held, n_steps = llm.n_tokens, len(llm.steps)
        answer = llm.create_chat_completion(messages, max_tokens=25, grammar=grammar)
        messages.append(answer["choices"][0]["message"])
        assert llm.steps[n_steps].n_past == n_held
    assert llm.kv_stats().n_evicted > 200
    assert len(llm.steps[-1].tokens) == 7


def test_a_cached_state_holds_no_guesses(tiny):
    llm = load(tiny, cls=Spy, kv_policy=POLICY, draft_model=LlamaPromptLookupDecoding())
    states = llama_cpp.LlamaRAMCache()
    llm.set_cache(states)
    llm.create_completion(PROMPT, max_tokens=9, temperature=0.0)
    (state,) = states.cache_state.values()
    assert state.input_ids.tolist() == PROMPT + llm.given[:-1]


def test_a_served_chat_with_a_draft_never_starts_over(tiny):
    draft = ["--draft-model", "prompt-lookup-decoding", "--draft-model-num-pred-tokens", "5"]
    policy = ["--kv-policy", "inertiakv", "--kv-budget", "256", "--n-batch", "64"]
    messages, n_held = [serving.SYSTEM], 0
    with serving.served(tiny, *serving.THREAD, *policy, *draft) as (address, _):
        client = serving.client_of(address)
        for turn in range(4):
            messages.append({"role": "user", "content": f"{turn} abc abc " * 20})
            answer = client.chat.completions.create(
                model="tiny",
                messages=messages,
                max_tokens=24,
                extra_body={"grammar": "root ::= [a-c]{40}"},
            )
            assert answer.usage.prompt_tokens_details.cached_tokens == n_held
            n_held = answer.usage.prompt_tokens + 24 - 1
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert answer.usage.kv_tokens_evicted > 400


def test_an_old_generator_that_is_closed_late_touches_nothing(tiny, answer):
    llm = load(tiny, draft_model=Guess(PROMPT, answer))
    old = llm.generate(PROMPT, temp=0.0)
    assert [next(old) for _ in range(3)] == answer[:3]
    new = llm.generate(PROMPT, temp=0.0)
    assert [next(new) for _ in range(2)] == answer[:2]
    old.close()
    assert list(islice(new, 40)) == answer[2:42]
    llm.eval([65])
    n_tokens = llm.n_tokens
    new.close()
    assert llm.n_tokens == n_tokens


# other ways in, and what cannot work


def test_tokens_that_are_sent_are_guesses(tiny, answer):
    """llama-cpp-python takes them so, and aborts the process without logits_all."""
    llm = load(tiny, cls=Recording)
    stream = llm.generate(PROMPT, temp=0.0)
    given = [next(stream), stream.send([*answer[1:3], (answer[3] + 1) % 256])]
    assert len(llm.steps[-1].tokens) == 4
    given += islice(stream, 10)
    assert given == answer[:12]


def test_tokens_that_are_sent_to_a_recurrent_model_are_left_out(tmp_path):
    path = tiny_models.write_mamba(tmp_path / "mamba.gguf")
    expected, llm = take(load(path), PROMPT, 8), load(path)
    stream = llm.generate(PROMPT, temp=0.0)
    given = [next(stream)]
    for _ in range(7):
        given.append(stream.send([7, 8]))
    assert given == expected


@pytest.mark.parametrize("name", ["falcon-h1", "mamba"])
def test_a_state_that_cannot_take_tokens_back_is_refused(tmp_path, name):
    path = tmp_path / f"{name}.gguf"
    if name == "mamba":
        tiny_models.write_mamba(path)
    else:
        tiny_families.write(path, name, tiny_families.FAMILIES[name])
    with pytest.raises(ModelError, match=f"draft_model.*'{name}'.*leave draft_model out"):
        load(path, draft_model=LlamaPromptLookupDecoding())
