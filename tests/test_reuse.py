"""What a prompt reuses of the cache: the truth about prefixes, and chats that never start over."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
import pytest
import tiny_models
from helpers import kl, logits, positions
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from pyinertia import KVPolicy, Llama, PolicyError
from pyinertia.reuse import Cached, Closed, n_reused

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
TOKENS = np.random.default_rng(1).integers(0, 256, 600).tolist()
DEFAULTS = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
LETTERS = "root ::= [a-z]{60}"
TRIMMED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def load(path, **kwargs) -> Llama:
    return Llama(str(path), **(DEFAULTS | {"kv_policy": POLICY} | kwargs))


def take(llm: Llama, prompt: list[int], n: int) -> list[int]:
    return list(islice(llm.generate(prompt, temp=0.0), n))


# the rule itself


def cached(resident, n: int, **kwargs) -> Cached:
    """n tokens that are their own positions, of which some are resident."""
    kwargs = {"closed": Closed(), **kwargs}
    return Cached(np.arange(n, dtype=np.intc), np.array(resident, np.int32), n, **kwargs)


WHOLE = cached(range(20), 20)
CUT = cached([0, 1, 2, 7, 8, 12, 18, 19], 20)


@pytest.mark.parametrize(
    ("cache", "prompt", "append", "strict", "lossy"),
    [
        (WHOLE, [*range(20), 99], 20, 20, 20),
        (WHOLE, [*range(10), 99], 10, 10, 10),
        (WHOLE, list(range(20)), 19, 19, 19),  # the last token gives the logits
        (WHOLE, list(range(10)), 9, 9, 9),
        (WHOLE, [99], 0, 0, 0),
        (CUT, [*range(20), 99], 20, 0, 20),
        (CUT, [*range(10), 99], 3, 0, 9),  # 8 is the last that is left below 10
        (CUT, [*range(14), 99], 3, 0, 13),
        (CUT, [*range(2), 99], 2, 0, 2),
        (CUT, list(range(20)), 19, 0, 19),  # 18 is resident: 19 sees again what it saw
        (CUT, list(range(19)), 3, 0, 13),
        (cached([5, 6, 19], 20), [*range(10), 99], 0, 0, 7),
    ],
)
def test_how_many_tokens_are_reused(cache, prompt, append, strict, lossy):
    assert [n_reused(cache, prompt, mode) for mode in ("append", "strict", "lossy")] == [
        append,
        strict,
        lossy,
    ]


def test_logits_that_are_there_spare_the_last_token():
    assert n_reused(CUT, list(range(20)), has_logits=True) == 20
    assert n_reused(WHOLE, list(range(10)), has_logits=True) == 9


def test_a_sliding_window_must_reach_back_from_the_departure():
    window = {"pos_min": 8, "n_swa": 6}
    cache = cached(range(20), 20, **window)
    assert n_reused(cache, [*range(14), 99]) == 14  # sees 8 .. 13
    assert n_reused(cache, [*range(13), 99]) == 0
    assert n_reused(cache, [*range(20), 99]) == 20


def test_renumbered_positions_are_no_tokens():
    # 30 tokens; the first 20 stand for 6 positions now, of which 3 never moved
    closed = Closed(list(range(20)), n_pos=6, n_whole=3)
    cache = Cached(
        np.arange(30, dtype=np.intc), np.arange(16, dtype=np.int32), n_tokens=16, closed=closed
    )
    assert n_reused(cache, [*range(30), 99]) == 30
    assert cache.position(30) == 16
    assert n_reused(cache, [*range(25), 99]) == 3
    assert n_reused(cache, [*range(25), 99], "lossy") == 25
    assert cache.position(25) == 11
    assert n_reused(cache, [*range(10), 99], "lossy") == 3


# on a model


def test_a_departure_reuses_what_is_whole_and_answers_as_a_cold_run(tiny):
    used, cold = load(tiny), load(tiny)
    take(used, TOKENS[:120], 20)
    n_whole = next(i for i, pos in enumerate(positions(used)) if i != pos)
    n_before = used.kv_stats().n_tokens
    prompt = TOKENS[:100] + TOKENS[300:330]
    assert take(used, prompt, 12) == take(cold, prompt, 12)
    assert used.kv_stats().n_tokens == n_before + len(prompt) - n_whole + 11
    assert n_whole >= POLICY.n_sink
    assert np.allclose(logits(used), logits(cold), atol=1e-2)


def test_strict_answers_as_a_cold_run_even_where_the_prompt_continues(tiny):
    used, cold = load(tiny, kv_reuse="strict"), load(tiny)
    take(used, TOKENS[:120], 20)
    prompt = used._input_ids.tolist() + TOKENS[300:320]
    assert take(used, prompt, 12) == take(cold, prompt, 12)
    assert np.array_equal(logits(used), logits(cold))
    assert used.kv_stats().n_tokens == len(prompt) + 11


def test_lossy_keeps_what_is_left_below_the_departure(tiny):
    llm = load(tiny, kv_reuse="lossy")
    take(llm, TOKENS[:120], 20)
    before, n_before = positions(llm), llm.kv_stats().n_tokens
    prompt = TOKENS[:118] + TOKENS[300:310]
    left = [pos for pos in before if pos < 118]
    next(llm.generate(prompt, temp=0.0))
    assert llm.kv_stats().n_tokens == n_before + len(prompt) - (left[-1] + 1)
    assert positions(llm) == left + list(range(left[-1] + 1, len(prompt)))


def test_a_sliding_window_is_reused_as_far_as_it_reaches(tmp_path):
    path = tiny_models.write_gemma3(tmp_path / "gemma3.gguf", n_window=32)
    used, cold = (load(path, kv_policy=None, swa_full=False) for _ in range(2))
    used.eval(TOKENS[:400])
    n_before = used.kv_stats().n_tokens
    prompt = TOKENS[:390] + TOKENS[450:460]  # the window's own cache holds 144 and above
    assert take(used, prompt, 5) == take(cold, prompt, 5)
    assert used.kv_stats().n_tokens == n_before + 10 + 4


@pytest.mark.parametrize("name", ["kv_reuse", "kv_positions"])
def test_a_bad_value_is_named(tiny, name):
    with pytest.raises(PolicyError, match=f"{name}='all': {name} must be one of '"):
        load(tiny, **{name: "all"})
    with pytest.raises(TypeError, match=r"'kv_reus'.*'kv_reuse'"):
        load(tiny, kv_reus="append")


# chats


def talk(llm: Llama, messages: list[dict], text: str, **kwargs) -> str:
    """One turn; the reply is appended to the messages."""
    messages.append({"role": "user", "content": text})
    answer = llm.create_chat_completion(messages, **{"max_tokens": 12, "seed": 1, **kwargs})
    messages.append(answer["choices"][0]["message"])
    return messages[-1]["content"]


def letters() -> llama_cpp.LlamaGrammar:
    return llama_cpp.LlamaGrammar.from_string(LETTERS, verbose=False)


def test_a_chat_of_fifty_turns_starts_over_never(tiny):
    """In this model a byte is a token, so what a turn must evaluate can be counted by hand."""
    llm = load(tiny, n_ctx=8192, kv_budget=96, kv_prefill="bounded", chat_format="chatml")
    llm.kv_query("")  # the question's tokens would count
    system = "You like letters and nothing else."
    messages = [{"role": "system", "content": system}]
    n_system = len(f"<|im_start|>system\n{system}") + 1  # BOS
    due, n_evaluated = 1 + len(f"<|im_start|>system\n{system}<|im_end|>\n"), 0
    for turn in range(50):
        text = f"This is turn {turn}. Say more letters."
        reply = talk(llm, messages, text, grammar=letters(), temperature=1.0)
        assert len(reply) == 12
        due += len(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        # the last token of a reply that max_tokens ended comes with the next turn
        n_evaluated += due + 11
        due = 1 + len("<|im_end|>\n")
        stats = llm.kv_stats()
        assert stats.n_tokens == n_evaluated
        assert stats.n_cells == 256  # 96 + 64, rounded up by llama.cpp
        assert stats.n_used <= 96 + 64
        assert set(range(n_system)) <= set(positions(llm))
    assert len(positions(llm)) == 96
    assert llm.n_tokens > 4000


def test_protection_follows_the_system_message(tiny):
    llm = load(tiny, n_ctx=2048, kv_budget=120, chat_format="chatml")
    for system in ("Be short, please: one word.", "Sing!", "Always answer in rhymes of your own."):
        messages = [{"role": "system", "content": system}]
        for turn in range(4):
            talk(llm, messages, f"{turn} " * 30, grammar=letters())
        resident = set(positions(llm))
        n_system = 1 + len(f"<|im_start|>system\n{system}")
        assert set(range(n_system)) <= resident
        assert llm._kv_n_system == n_system
        assert len(resident) == 120
    take(llm, TOKENS[:200], 20)  # no chat: the positions mean something else
    assert llm._kv_n_system == 0
    assert not set(range(n_system)) <= set(positions(llm))


@pytest.mark.parametrize("system", ["a", "system", "s", "user"])
def test_a_system_message_of_a_word_is_not_mistaken_for_the_template(tiny, system):
    llm = load(tiny, n_ctx=2048, kv_budget=120, chat_format="chatml")
    messages = [{"role": "system", "content": system}]
    talk(llm, messages, "hello " * 40, grammar=letters())
    n_least = 1 + len(f"<|im_start|>system\n{system}")
    n_most = 1 + len(f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n")
    assert n_least <= llm._kv_n_system <= n_most
    assert set(range(n_least)) <= set(positions(llm))


def test_protect_none_ranks_the_system_message(tiny):
    llm = load(tiny, n_ctx=2048, kv_budget=60, chat_format="chatml")
    messages = [{"role": "system", "content": "x" * 200}]
    talk(llm, messages, "hello " * 20, grammar=letters(), protect=None)
    assert len(positions(llm)) == 60
    with pytest.raises(PolicyError, match="protect='all': protect must be one of 'system', None"):
        llm.create_chat_completion(messages, protect="all")


def test_a_system_message_beyond_the_budget_is_refused_before_anything_is_evaluated(tiny):
    llm = load(tiny, n_ctx=2048, kv_budget=60, chat_format="chatml")
    messages = [{"role": "system", "content": "Short."}]
    talk(llm, messages, "hello " * 20, grammar=letters())
    before, stats = positions(llm), llm.kv_stats()
    long = [{"role": "system", "content": "x" * 60}, {"role": "user", "content": "hello"}]
    needed = 1 + len("<|im_start|>system\n") + 60 + POLICY.n_recent + POLICY.n_refresh
    with pytest.raises(PolicyError, match=f"must be at least {needed}, it is 60"):
        llm.create_chat_completion(long)
    assert positions(llm) == before
    assert llm.kv_stats().n_tokens == stats.n_tokens
    n_before = stats.n_tokens
    talk(llm, messages, "again", grammar=letters())  # and the chat goes on where it was
    assert llm.kv_stats().n_tokens - n_before < 100


def test_what_the_template_says_by_itself_never_leaves(tiny):
    own = "<system>As always.</s>"
    template = (
        "{% if messages[0].role != 'system' %}" + own + "{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
    )
    formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>")
    llm = load(tiny, n_ctx=2048, kv_budget=60, chat_handler=formatter.to_chat_handler())
    messages = []
    for turn in range(3):
        talk(llm, messages, f"{turn} " * 30, grammar=letters())
        n_own = len(llm.tokenize(own.encode(), False, True))
        assert llm._kv_n_system == n_own + len("<user>")
        assert set(range(n_own)) <= set(positions(llm))
    messages = []
    talk(llm, messages, "hello " * 20, grammar=letters(), protect=None)
    assert llm._kv_n_system == 0


def test_a_format_that_drops_the_system_message_is_told(tiny):
    llm = load(tiny, n_ctx=2048, chat_format="gemma")
    with pytest.warns(UserWarning, match="'gemma' leaves the system message out of the prompt"):
        talk(llm, [{"role": "system", "content": "Be short."}], "hello", grammar=letters())


def test_a_template_that_moves_the_system_message_to_the_last_turn_is_told(tiny):
    """Protecting all before it would protect the whole conversation."""
    template = (
        "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
        "{% if loop.last %}{{ messages[0].content }}\n{% endif %}{{ m.content }}{% endfor %}"
    )
    formatter = Jinja2ChatFormatter(template, eos_token="</s>", bos_token="<s>")
    llm = load(tiny, n_ctx=2048, chat_handler=formatter.to_chat_handler())
    messages = [{"role": "system", "content": "Be short."}]
    talk(llm, messages, "What is the first question?", grammar=letters())
    assert llm._kv_n_system == len("<user>Be short.")
    with pytest.warns(UserWarning, match="leaves the system message out"):
        talk(llm, messages, "And another one?", grammar=letters())
    assert llm._kv_n_system == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_handler_that_leaves_the_tokenizing_to_the_parent_is_protected(tiny, stream):
    def handler(*, llama, messages, stream=False, **kwargs):
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        done = llama.create_completion(text, stream=stream, max_tokens=30, grammar=letters())
        return [*done] if stream else done

    llm = load(tiny, n_ctx=2048, chat_handler=handler)
    system = "Be short."
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "hello " * 40}]
    llm.create_chat_completion(messages, stream=stream)
    n_system = 1 + len(f"<system>{system}")
    assert llm._kv_n_system == n_system
    assert set(range(n_system)) <= set(positions(llm))
    assert llm.kv_stats().n_evicted > 0


def test_messages_may_be_anything_that_the_template_takes(tiny):
    llm = load(tiny, n_ctx=2048, chat_format="chatml")
    parts = [{"type": "text", "text": None}, {"type": "text", "text": "hello"}]
    for content in ("hello", None, ["hello"], parts):
        messages = ({"role": "user", "content": content} for _ in range(1))
        assert llm.create_chat_completion(messages, max_tokens=2)["choices"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_that_trims_replies_still_appends(tiny, stream):
    formatter = Jinja2ChatFormatter(TRIMMED, eos_token="</s>", bos_token="<s>")
    llm = load(tiny, n_ctx=2048, chat_handler=formatter.to_chat_handler())
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "  ab c \\n"', verbose=False)
    messages = [{"role": "system", "content": " Trim. "}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"{turn} " * 30})
        n_before = llm.kv_stats().n_tokens
        answer = llm.create_chat_completion(messages, max_tokens=20, grammar=grammar, stream=stream)
        if stream:
            deltas = [part["choices"][0]["delta"] for part in answer]
            reply = "".join(delta.get("content") or "" for delta in deltas)
        else:
            reply = answer["choices"][0]["message"]["content"]
        assert reply == "  ab c \n"
        messages.append({"role": "assistant", "content": reply})
        assert llm._kv_n_system == len("<system>Trim.") + 1  # every turn
        if turn:
            new = 1 + len(f"<user>{'x ' * 30}".strip()) + 1 + len("<assistant>") + len(reply)
            assert llm.kv_stats().n_tokens - n_before == new
    assert llm.kv_stats().n_evicted > 0


def test_a_reply_that_the_caller_went_on_writing_is_text(tiny):
    """What the model ended with blanks, and the caller continued, has no blanks in it."""
    formatter = Jinja2ChatFormatter(TRIMMED, eos_token="</s>", bos_token="<s>")
    llm = load(tiny, n_ctx=2048, chat_handler=formatter.to_chat_handler())
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "ab  "', verbose=False)
    messages = [{"role": "user", "content": "hello"}]
    llm.create_chat_completion(messages, max_tokens=20, grammar=grammar)
    messages += [{"role": "assistant", "content": "ab and more"}, {"role": "user", "content": "?"}]
    llm.create_chat_completion(messages, max_tokens=1, grammar=grammar)
    text = llm.detokenize(llm._input_ids.tolist(), special=True)
    assert text == b"<user>hello</s><assistant>ab and more</s><user>?</s><assistant>"


def test_an_edited_history_is_no_continuation(tiny):
    llm, cold = (load(tiny, n_ctx=2048, chat_format="chatml") for _ in range(2))
    messages = [{"role": "system", "content": "Be short."}]
    for turn in range(3):
        talk(llm, messages, f"{turn} " * 30, grammar=letters())
    messages[2] = {"role": "assistant", "content": "something else"}
    again = [dict(message) for message in messages]
    assert talk(llm, messages, "and now?", grammar=letters(), temperature=0.0) == talk(
        cold, again, "and now?", grammar=letters(), temperature=0.0
    )


class Recorder(Llama):
    """Writes down every evaluation: tokens, resident positions after it, logits."""

    def eval(self, tokens):
        super().eval(tokens)
        if len(tokens):
            self.__dict__.setdefault("record", []).append(
                (list(tokens), positions(self), logits(self))
            )


def test_a_real_chat_appends_and_agrees_with_a_cold_run(smollm2):
    """The model's replies come back as text, and the cold run replays tokens and evictions."""
    kwargs = {"n_ctx": 2048, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1}
    kwargs |= {"flash_attn": True, "verbose": False}
    llm = Recorder(str(smollm2), kv_policy="inertiakv", kv_budget=96, **kwargs)
    messages = [{"role": "system", "content": "You are a friendly guide to the sea."}]
    questions = ("What lives in the sea?", "Tell me about whales.", "Which one is the largest?")
    for question in (*questions, "Thank you."):
        n_before, n_tokens = llm.kv_stats().n_tokens, llm.n_tokens
        talk(llm, messages, question, max_tokens=16, temperature=0.0)
        n_new = llm.n_tokens - n_tokens
        assert llm.kv_stats().n_tokens - n_before == n_new < 70, "something was evaluated again"
        assert len(positions(llm)) <= 96
    assert llm.kv_stats().n_evicted > 30
    text = llm.detokenize(llm.input_ids[: llm._kv_n_system].tolist(), special=True).decode()
    assert text == f"<|im_start|>system\n{messages[0]['content']}<|im_end|>"
    assert set(range(llm._kv_n_system)) <= set(positions(llm))

    cold, divergence, before = Llama(str(smollm2), **kwargs), [], set()
    for tokens, after, expected in llm.record:
        if gone := before - set(after):
            cold.kv_evict(sorted(before - gone))
        cold.eval(tokens)
        divergence.append(kl(expected, logits(cold)))
        before = set(after)
    assert np.mean(divergence) < 0.02
