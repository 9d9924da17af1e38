"""Many prompts in one context: each is as it would be alone, and none is lost."""

from __future__ import annotations

import re
from contextlib import closing
from dataclasses import replace
from itertools import count

import llama_cpp
import numpy as np
import pytest
import tiny_models
from forced import ForcedSlots, alone, mean_kl, together
from helpers import tokens
from tiny_models import EOS

from pyinertia import KVPolicy, Llama, ModelError, PolicyError
from pyinertia.batch import Completion, generate_many, summarise
from pyinertia.batch.schedule import Job, Schedule, Settings
from pyinertia.batch.slots import Slots

POLICY = KVPolicy(n_budget=64, n_sink=2, n_recent=8, n_window=8, n_pool=3)
# f32 cells: batched and alone agree but for rounding
TINY = {"n_threads": 1, "n_threads_batch": 1, "n_batch": 64, "type_k": 0, "type_v": 0}
RNG = np.random.default_rng(5)
LENGTHS = [300, 20, 64, 65, 129, 90, 1, 128, 513]
PROMPTS = [RNG.integers(0, 256, n).tolist() for n in LENGTHS]
# of unlike lengths, so that the last ones close gaps between the slots
ANSWERS = [[*RNG.integers(0, 256, n).tolist(), EOS] for n in (40, 10, 25, 33, 15, 4, 2, 9, 12)]


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("batch") / "llama.gguf")


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return tiny_models.write_gemma3(tmp_path_factory.mktemp("batch") / "gemma.gguf")


@pytest.fixture
def contexts(monkeypatch):
    """The contexts that are open."""
    open_ones = set()
    init, free = llama_cpp.llama_cpp.llama_init_from_model, llama_cpp.llama_cpp.llama_free

    def spy_init(*args):
        ctx = init(*args)
        open_ones.add(ctx)
        return ctx

    def spy_free(ctx):
        open_ones.discard(ctx)
        free(ctx)

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_init_from_model", spy_init)
    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_free", spy_free)
    return open_ones


def many(prompts, llama, call=generate_many, **kwargs):
    settings = {"kv_policy": POLICY, "max_tokens": 8, "temperature": 0.0, **TINY, **kwargs}
    if call is summarise:
        settings["instruction"] = "Sum up."
    return call(prompts, model=llama, **settings)


# each as it would be alone


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, n_refresh=8), None])
def test_a_sequence_is_as_it_is_alone(architecture, policy, request):
    path = request.getfixturevalue(architecture)
    answers, outcomes = together(
        path, PROMPTS, ANSWERS, n_parallel=4, kv_policy=policy, n_ctx=1024, **TINY
    )
    for i, prompt in enumerate(PROMPTS):
        reference = alone(path, prompt, ANSWERS[i], policy, n_ctx=1024, **TINY)
        assert mean_kl(answers[i], reference) < 1e-5, LENGTHS[i]
        assert answers[i].positions == reference.positions, LENGTHS[i]
        n_seen = len(prompt) + len(ANSWERS[i]) - 1
        assert outcomes[i].n_kept == len(reference.positions)
        assert outcomes[i].n_evicted == n_seen - outcomes[i].n_kept
        assert outcomes[i].finish_reason == "stop"


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
def test_a_prompt_that_is_moved_as_it_enters_is_as_it_is_alone(architecture, request, monkeypatch):
    path, n_left = request.getfixturevalue(architecture), []
    move = ForcedSlots.move
    monkeypatch.setattr(ForcedSlots, "move", lambda *a: n_left.append(a[3]) or move(*a))
    answers, _ = together(
        path,
        [PROMPTS[1], PROMPTS[8]],
        [[65, EOS], ANSWERS[8]],
        n_parallel=2,
        kv_policy=POLICY,
        n_ctx=1024,
        **TINY,
    )
    assert len(n_left) == 1
    assert n_left[0] > 64
    reference = alone(path, PROMPTS[8], ANSWERS[8], POLICY, n_ctx=1024, **TINY)
    assert mean_kl(answers[1], reference) < 1e-5
    assert answers[1].positions == reference.positions


@pytest.mark.parametrize("architecture", ["llama", "gemma"])
@pytest.mark.parametrize("policy", [POLICY, None])
def test_a_shared_prefix_is_as_if_evaluated_with_each(architecture, policy, request):
    path = request.getfixturevalue(architecture)
    prefix = RNG.integers(0, 256, 25).tolist()
    prompts = [prefix + prompt for prompt in PROMPTS[:4]] + PROMPTS[4:6]
    answers, _ = together(
        path, prompts, ANSWERS[:6], share=True, n_parallel=3, kv_policy=policy, n_ctx=1024, **TINY
    )
    kept = policy and replace(policy, protect=((0, len(prefix)),))
    for i, prompt in enumerate(prompts):
        reference = alone(path, prompt, ANSWERS[i], kept, n_ctx=1024, **TINY)
        assert mean_kl(answers[i], reference) < 1e-5, i
        assert answers[i].positions == reference.positions, i
        if policy:
            assert answers[i].positions[:25] == list(range(25))


def test_a_prefix_is_evaluated_once(llama):
    prefix = list(range(30))
    with closing(Slots(llama, n_parallel=2, kv_policy=POLICY, **TINY)) as slots:
        slots.share(prefix)
        jobs = iter([Job(key=i, tokens=[*prefix, *PROMPTS[2], i]) for i in range(5)])
        schedule = Schedule(slots, Settings(max_tokens=4))
        outcomes = list(schedule.run(lambda: next(jobs, None)))
        assert schedule.clock.n_prompt == 5 * 65
        assert {outcome.n_prompt for outcome in outcomes} == {95}


def test_a_prefix_without_room_is_refused(llama):
    with closing(Slots(llama, n_parallel=2, kv_policy=POLICY, **TINY)) as slots:
        with pytest.raises(PolicyError, match=r"no room for a prefix of 60 tokens.*at least 69"):
            slots.share(list(range(60)))
        assert slots.share(list(range(60)), 20) == 20


def test_smollm2_in_a_batch_is_as_it_is_alone(smollm2):
    policy = KVPolicy(
        n_budget=128, prefill="bounded"
    )  # 256 cells: the prompts are cut as they enter
    kwargs = {"n_ctx": 2048, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1}
    kwargs |= {"flash_attn": True}
    with closing(Llama(str(smollm2), verbose=False, n_ctx=32)) as llm:
        ids = tokens(llm, 700)
    prompts, answers = [ids[:320], ids[350:650]], [ids[320:332], ids[650:662]]
    batched, outcomes = together(
        smollm2, prompts, answers, n_parallel=2, kv_policy=policy, **kwargs
    )
    assert all(outcome.n_kept == 128 for outcome in outcomes)
    for i in range(2):
        reference = alone(smollm2, prompts[i], answers[i], policy, **kwargs)
        assert mean_kl(batched[i], reference) < 0.02


def test_memory_is_that_of_the_budgets(llama):
    with closing(Slots(llama, n_parallel=3, kv_policy=POLICY, n_ctx=1024, **TINY)) as slots:
        assert slots.kv_stats().n_cells == 3 * 256  # 64 + 64, padded
        assert slots.n_positions == 1024
    with closing(Slots(llama, n_parallel=3, n_ctx=1024, **TINY)) as slots:
        assert slots.kv_stats().n_cells == 3 * 1024


# sampling and stopping


def test_prompt_i_is_sampled_with_seed_plus_i(llama):
    prompts = ["one", "two", "three"]
    settings = {"temperature": 1.5, "top_k": 20, "seed": 7, "n_parallel": 2}
    texts = {one.index: one.text for one in many(prompts, llama, **settings)}
    again = {one.index: one.text for one in many(prompts, llama, **settings)}
    assert texts == again
    with closing(Llama(str(llama), n_ctx=1024, verbose=False, **TINY)) as llm:
        for i, prompt in enumerate(prompts):
            llm.set_seed(7 + i)
            ids = llm.tokenize(prompt.encode(), special=True)
            stream = llm.generate(ids, temp=1.5, top_k=20)
            sampled = [next(stream) for _ in range(8)]
            expected = b"".join(bytes([t]) for t in sampled if t < 256)
            assert texts[i] == expected.decode(errors="ignore")


def test_a_stop_string_ends_the_answer_wherever_tokens_end(llama):
    answer = list(b"the quick brown fox")  # a token is a byte
    for stop, text in {("fox",): "the quick brown ", ("wn", "ck b", "k"): "the quic"}.items():
        (_,), (one,) = together(
            llama, PROMPTS[:1], [answer], stop=stop, n_parallel=1, kv_policy=POLICY, **TINY
        )
        assert (one.text, one.finish_reason) == (text, "stop")
    assert one.n_generated == len("the quick")


def test_the_end_of_generation_ends_the_answer(llama):
    answers = [[65, 66, EOS, 67], [65, 66, 67, 68]]
    _, outcomes = together(llama, PROMPTS[:2], answers, n_parallel=2, kv_policy=POLICY, **TINY)
    assert [one.text for one in outcomes] == ["AB", "ABCD"]
    assert [one.finish_reason for one in outcomes] == ["stop", "length"]
    assert [one.n_generated for one in outcomes] == [2, 4]


def test_an_answer_ends_with_the_last_position(llama):
    (one,) = many([PROMPT_200], llama, n_ctx=256, max_tokens=None)
    assert (one.n_prompt, one.n_generated, one.finish_reason) == (201, 55, "length")


PROMPT_200 = "ab" * 100


def test_long_tokens_come_out_whole(smollm2):
    with closing(Slots(smollm2, n_parallel=1, n_ctx=256, n_threads=1, n_batch=8)) as slots:
        long = max((slots._model.token_get_text(t) for t in range(49152)), key=len)
        (token,) = [t for t in range(49152) if slots._model.token_get_text(t) == long]
        text = slots.piece(token)
        assert len(text) > 32
        assert slots.tokenize(text, add_bos=False) == [token]


# nothing is lost


def test_prompts_are_read_as_slots_need_them(llama):
    n_read = 0

    def endless():
        nonlocal n_read
        for n_read in count(1):
            yield f"prompt {n_read}"

    with closing(many(endless(), llama, n_parallel=3)) as results:
        for n_done, _ in zip(range(1, 11), results, strict=False):
            assert n_read <= n_done + 2


def test_bad_prompts_end_with_errors_and_disturb_no_other(llama):
    prompts = ["good", "", 7, [], None, "x" * 2000, [{"text": "no role"}], "also good"]
    results = {one.index: one for one in many(prompts, llama, n_parallel=2)}
    assert sorted(results) == list(range(8))
    assert all(isinstance(one, Completion) for one in results.values())
    bad = {i: one.error for i, one in results.items() if one.finish_reason == "error"}
    assert sorted(bad) == [1, 2, 3, 4, 5, 6]
    assert "empty" in bad[1]
    assert "this one is 7" in bad[2]
    assert "empty list of messages" in bad[3]
    assert "2001 tokens" in bad[5]
    assert "n_ctx=1024" in bad[5]
    good = {one.index: one.text for one in many(["good", "also good"], llama)}
    assert (results[0].text, results[7].text) == (good[0], good[1])


@pytest.mark.parametrize("call", [generate_many, summarise])
def test_what_was_read_is_finished_when_the_reading_fails(llama, contexts, call):
    def broken():
        yield "one"
        yield "two"
        raise OSError("the disk is gone")

    results = many(broken(), llama, n_parallel=4, call=call)
    done = [next(results), next(results)]
    assert contexts
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert sorted(one.index for one in done) == [0, 1]
    assert all(one.n_generated == 8 for one in done)
    assert not contexts


@pytest.mark.parametrize("call", [generate_many, summarise])
def test_closing_frees_the_context(llama, contexts, call):
    results = many((f"prompt {i}" for i in count()), llama, n_parallel=3, call=call)
    next(results)
    assert len(contexts) == 1
    results.close()
    assert not contexts


def test_without_free_cells_chunks_and_calls_are_halved(llama):
    """Slots of 256 cells that take themselves to have 300: the last cells are found one by one."""
    answers = [[65] * 40, [66] * 100, [67] * 100]
    kwargs = {"n_parallel": 3, "kv_policy": None, "n_ctx": 256, **TINY}

    class Optimists(ForcedSlots):
        n_positions = 1000

    from forced import Answer

    with closing(Optimists(llama, answers=[Answer(a) for a in answers], **kwargs)) as slots:
        lengths = [270, 200, 100]
        jobs = iter([Job(key=i, tokens=PROMPTS[8][:n], seed=i) for i, n in enumerate(lengths)])
        run = Schedule(slots, Settings(max_tokens=100)).run(lambda: next(jobs, None))
        outcomes = {one.job.key: one for one in run}
    assert "token 257 cannot be evaluated: the cache has no free cells" in outcomes[0].error
    assert outcomes[0].n_generated == 0
    # 200 cells of prompt, 56 of the answer: the 57th token was still sampled
    assert (outcomes[1].finish_reason, outcomes[1].n_generated) == ("error", 57)
    assert outcomes[1].text == "B" * 57
    assert (outcomes[2].finish_reason, outcomes[2].n_generated) == ("length", 100)


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"n_parallel": 0}, ValueError, r"n_parallel=0 must be a whole number in \[1, 256\]"),
        ({"n_parallel": 300}, ValueError, "n_parallel=300"),
        ({"max_tokens": 0}, ValueError, "max_tokens=0"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"stop": [""]}, ValueError, "none of them empty"),
        ({"top_q": 1}, TypeError, "no keyword 'top_q'; the nearest one is 'top_"),
        ({"kv_prefill": "full"}, TypeError, "no keyword 'kv_prefill'"),
        ({"n_ctx": -1}, ValueError, "n_ctx=-1"),
        ({"prefix": 7}, TypeError, "the prefix must be text, or a list of messages"),
        ({"prefix": []}, ValueError, "the prefix is an empty list"),
        ({"kv_policy": "inertia"}, PolicyError, "Did you mean 'inertiakv'"),
        ({"kv_policy": "inertiakv", "kv_budget": 0.5}, PolicyError, "n_budget as a count"),
        ({"kv_policy": None, "kv_budget": 512}, TypeError, "need a policy that evicts"),
    ],
)
def test_bad_arguments_are_refused_at_once(llama, kwargs, error, message):
    with pytest.raises(error, match=message):
        many([], llama, **kwargs)


def test_a_single_prompt_is_no_list_of_prompts(llama):
    with pytest.raises(TypeError, match="prompts must be several"):
        many("one prompt", llama)
    with pytest.raises(TypeError, match="not iterable"):
        many(7, llama)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"grammar": llama_cpp.LlamaGrammar.from_string("root ::= [")}, "cannot be parsed"),
        ({"grammar": "root ::= 'a'"}, "the grammar is a llama_cpp.LlamaGrammar"),
        ({"top_k": "many", "temperature": 1.0}, "top_k='many'"),
    ],
)
def test_samplers_that_cannot_be_are_refused(llama, contexts, kwargs, message):
    with pytest.raises(ValueError, match=message):
        next(many(["a"], llama, **kwargs))
    assert not contexts


def test_a_grammar_is_kept(llama):
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "x" [0-9] [0-9] "!"')
    results = list(many(["a", "b", "c"], llama, grammar=grammar, temperature=1.0, n_parallel=2))
    assert all(re.fullmatch(r"x\d\d!", one.text) for one in results)
    assert {one.finish_reason for one in results} == {"stop"}


def test_slots_that_cannot_be_are_refused(llama, contexts):
    with pytest.raises(ValueError, match=r"n_parallel=65 slots need .* n_batch=64"):
        next(many(["a"], llama, n_parallel=65))
    with pytest.raises(ValueError, match=r"n_ctx=67108864 times n_parallel=256 is more"):
        next(many(["a"], llama, n_parallel=256, n_ctx=2**26, n_batch=256))
    with pytest.raises(ValueError, match=r"no context of n_parallel=8 .* flash_attn=True if"):
        next(many(["a"], llama, type_v=llama_cpp.GGML_TYPE_Q8_0))
    assert not contexts - {None}


def test_a_missing_model_is_named(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        next(generate_many(["a"], model=tmp_path / "none.gguf"))
