"""Chats: nothing is computed twice, the system prompt stays, there is no last position."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from command_line import ask, call, greedy, notices, start
from helpers import positions
from tiny_models import BOS, EOS

from pyinertia import Llama
from pyinertia.cli import memory
from pyinertia.cli.conversation import Conversation
from pyinertia.cli.template import ChatTemplate
from pyinertia.errors import CommandError

SYSTEM = "You are kind."
SMALL = {"kv_policy": "inertiakv", "kv_budget": 256, "kv_prefill": "bounded", "n_batch": 128}
OWN_SYSTEM = (
    "{% if messages[0]['role'] != 'system' %}<s>system\nBy default.</s>\n{% endif %}"
    + tiny_models.CHAT_TEMPLATE
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + tiny_models.CHAT_TEMPLATE
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny(folder) -> Path:
    return tiny_models.write_chat(folder / "chat.gguf")


@pytest.fixture
def opened():
    """Opens models, and closes them."""
    models = []

    def open_model(path: Path, n_ctx: int = 4096, **kwargs) -> Llama:
        models.append(
            Llama(path, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, verbose=False, **kwargs)
        )
        return models[-1]

    yield open_model
    for model in models:
        model.close()


def turn(role: str, text: str) -> list[int]:
    """A turn as the template writes it; a byte is its own token."""
    return [BOS, *f"{role}\n{text}".encode(), EOS, *b"\n"]


def begin() -> list[int]:
    return [BOS, *b"assistant\n"]


def test_the_cache_is_appended_to_and_never_computed_again(tiny, opened):
    llm = opened(tiny)
    talk = Conversation(llm, greedy(), SYSTEM)
    expected = turn("system", SYSTEM)
    n_evaluated = 0
    evaluate = llm.eval

    def counted(tokens):
        nonlocal n_evaluated
        n_evaluated += len(tokens)
        evaluate(tokens)

    llm.eval = counted
    for text in ("one", "two", "three"):
        ask(talk, text)
        expected += [*turn("user", text), *begin(), *talk.answer.tokens]
        assert talk.tokens == expected
        assert llm._input_ids.tolist() == expected[:-1]  # the last one has not been evaluated
        assert n_evaluated == len(expected) - 1
        expected += [EOS, *b"\n"]


def test_a_chat_says_what_one_prompt_would_say(tiny, opened):
    talk = Conversation(opened(tiny), greedy(), SYSTEM)
    ask(talk, "one")
    first = talk.answer.tokens
    ask(talk, "two")
    prompt = [*turn("system", SYSTEM), *turn("user", "one"), *begin(), *first]
    prompt += [EOS, *b"\n", *turn("user", "two"), *begin()]
    cold = opened(tiny)
    answer = [t for t, _ in zip(cold.generate(prompt, temp=0), range(24), strict=False)]
    assert talk.answer.tokens == answer[: len(talk.answer.tokens)]


def test_the_system_prompt_never_leaves(tiny, opened):
    llm = opened(tiny, **SMALL)
    talk = Conversation(llm, greedy(48), SYSTEM * 3)
    n_system = len(turn("system", SYSTEM * 3))
    for i in range(12):
        ask(talk, f"message {i} " * 9)
        kept = llm.kv_cells()["pos"]
        assert len(kept) <= 256
        assert set(range(n_system)) <= set(kept.tolist())
    assert llm.kv_stats().n_evicted > 256


def test_what_the_template_says_by_itself_never_leaves(folder, opened):
    llm = opened(tiny_models.write_chat(folder / "own-system.gguf", OWN_SYSTEM), **SMALL)
    talk = Conversation(llm, greedy(48))
    for i in range(4):
        ask(talk, f"message {i} " * 9)
    own = turn("system", "By default.")
    assert talk.tokens[: len(own)] == own
    assert llm.kv_stats().n_evicted > 0
    assert set(range(len(own))) <= set(positions(llm))


def test_what_the_template_says_by_itself_needs_no_room(folder, opened):
    path = tiny_models.write_chat(folder / "long-system.gguf", OWN_SYSTEM.replace("By", "B" * 300))
    llm = opened(path, **SMALL)
    ask(Conversation(llm, greedy(8)), "message " * 50)
    assert llm.kv_policy.protect == ()
    assert len(positions(llm)) <= 256


def test_what_is_told_is_what_is_there(tiny, opened):
    llm = opened(tiny, **SMALL)
    talk = Conversation(llm, greedy(48), SYSTEM)
    ask(talk, "hi")
    assert memory.used(llm) == f"{llm.n_tokens} of 256 cells, nothing dropped"
    for _ in range(4):
        ask(talk, "tell me more " * 9)
    kept = llm.kv_cells()["pos"]
    n_dropped = llm.n_tokens - len(kept)
    assert n_dropped == llm.kv_stats().n_evicted > 0
    assert f"{n_dropped:,} of {llm.n_tokens:,} tokens dropped" in memory.used(llm)
    spans = list(talk.kept())
    assert [t for span in spans for t in span.tokens] == talk.tokens[: llm.n_tokens]
    assert sum(len(span.tokens) for span in spans if not span.kept) == n_dropped
    flags = np.concatenate([np.full(len(span.tokens), span.kept) for span in spans])
    assert np.flatnonzero(flags).tolist() == kept.tolist()


def test_there_is_no_last_position(tiny, opened):
    llm = opened(tiny, n_ctx=512, **SMALL)
    told, notice = notices()
    talk = Conversation(llm, greedy(48), SYSTEM, notice)
    system = turn("system", SYSTEM)
    for i in range(12):
        ask(talk, f"message {i} " * 5)
        assert talk.tokens[: len(system)] == system
        assert set(range(len(system))) <= set(llm.kv_cells()["pos"].tolist())
        assert llm.n_tokens <= 512
    assert len(talk.messages) == 24  # all of it can be saved
    assert told
    assert "the model starts anew: it sees the system prompt, the newest" in told[0]
    n_kept = int(told[0].split("newest ")[1].split()[0])
    assert 0 < n_kept < 24
    seen = llm.detokenize(talk.tokens).decode("utf-8", "replace")
    first = talk.messages[talk.n_forgotten]["content"]
    assert talk.n_forgotten > 0
    assert f"the first {talk.n_forgotten} messages and " in memory.used(llm, talk.n_forgotten)
    assert first in seen
    assert talk.messages[talk.n_forgotten - 2]["content"] not in seen


def test_a_message_longer_than_all_positions_is_refused_and_nothing_is_lost(tiny, opened):
    llm = opened(tiny, n_ctx=512)
    talk = Conversation(llm, greedy(48), SYSTEM)
    ask(talk, "hi")
    before = list(talk.tokens)
    with pytest.raises(CommandError, match=r"this message and the system prompt have \d+ tokens"):
        ask(talk, "x" * 600)
    assert talk.tokens == before
    assert len(talk.messages) == 2
    ask(talk, "still there?")
    assert talk.tokens[: len(before)] == before


def test_an_answer_that_is_cut_short_is_kept(tiny, opened):
    llm = opened(tiny)
    talk = Conversation(llm, greedy(100))
    pieces = talk.ask("hi")
    said = next(pieces) + next(pieces)
    pieces.close()
    assert talk.messages[-1] == {"role": "assistant", "content": said}
    expected = [*turn("user", "hi"), *begin(), *talk.answer.tokens]
    assert talk.tokens == expected
    ask(talk, "go on")
    assert talk.tokens[: len(expected)] == expected


def test_a_message_that_was_never_read_does_not_count(tiny, opened, monkeypatch):
    llm = opened(tiny)
    talk = Conversation(llm, greedy(), SYSTEM)
    ask(talk, "one")
    monkeypatch.setattr(llm, "eval", lambda tokens: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        ask(talk, "two")
    monkeypatch.undo()
    assert [m["content"] for m in talk.messages[::2]] == ["one"]
    ask(talk, "three")
    assert len(talk.messages) == 4


def test_saved_chats_go_on(tiny, opened, tmp_path):
    talk = Conversation(opened(tiny), greedy(), SYSTEM)
    ask(talk, "one")
    talk.save(tmp_path / "chat.json")
    saved = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert saved == [{"role": "system", "content": SYSTEM}, *talk.messages]
    other = Conversation(opened(tiny), greedy(), SYSTEM)
    ask(other, "something else")
    other.load(tmp_path / "chat.json")
    assert other.messages == talk.messages
    ask(other, "two")
    assert "one" in other._llm.detokenize(other.tokens).decode("utf-8", "replace")
    assert len(other.messages) == 4


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no conversation"),
        ("{}", "holds no conversation"),
        ('{"messages": 3}', "holds no conversation"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "must take turns"),
        ('{"messages": []}', "no system prompt; start the chat with the same"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_file_that_is_no_chat_changes_nothing(tiny, opened, tmp_path, text, says):
    path = tmp_path / "chat.json"
    if text is not None:
        path.write_text(text)
    talk = Conversation(opened(tiny), greedy(), SYSTEM)
    ask(talk, "one")
    before = list(talk.tokens)
    with pytest.raises(CommandError, match=says):
        talk.load(path)
    assert talk.tokens == before
    with pytest.raises(CommandError, match="cannot be written"):
        talk.save(tmp_path / "no" / "chat.json")


def test_a_system_prompt_that_has_no_room_says_what_would(tiny, opened):
    llm = opened(tiny, **SMALL)
    with pytest.raises(CommandError, match=r"is never dropped, --kv-budget 256 .* at least 3\d\d,"):
        Conversation(llm, greedy(), "x" * 300)


def test_templates_without_a_place_for_it_get_it_in_the_first_message(folder, opened):
    path = tiny_models.write_chat(folder / "no-system.gguf", NO_SYSTEM)
    llm = opened(path, **SMALL)
    talk = Conversation(llm, greedy(), SYSTEM)
    ask(talk, "one")
    expected = [*turn("user", f"{SYSTEM}\n\none"), *begin()]
    assert talk.tokens[: len(expected)] == expected
    assert llm.kv_policy.protect == ((0, len(turn("user", f"{SYSTEM}\n\n")) - 2),)
    ask(talk, "two")
    assert talk.tokens[: len(expected)] == expected


def test_a_model_without_a_template_gets_chatml_and_its_end_is_not_shown(folder, opened):
    llm = opened(tiny_models.write_llama(folder / "llama.gguf"))
    template = ChatTemplate(llm)
    assert not template.is_own
    text = llm.detokenize(template.tokens([{"role": "user", "content": "hi"}])).decode()
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    from pyinertia.cli.generation import Generation

    answer = Generation(llm, [BOS], greedy(), template.stop)
    answer._decode = lambda: iter(b"so it is<|im_x <|im_end|> and more")
    assert "".join(answer) == "so it is<|im_x "
    assert answer.end == "stop"


def test_protected_positions_survive_pickling(tiny, opened):
    llm = opened(tiny, **SMALL)
    llm.kv_protect(0, 40)
    assert llm.__getstate__()["kv_policy"].protect == ((0, 40),)
    with pytest.raises(ValueError, match="no room"):
        llm.kv_protect(40, 300)
    assert llm.kv_policy == replace(llm.kv_policy, protect=((0, 40),))


# the process


LINES = "one\n/kept\ntwo \\\nlines\n/stats\n/nonsense\n/help\n/save {file}\n/reset\n/load {file}\n"


def test_a_piped_chat_answers_line_by_line(tiny, tmp_path):
    file = tmp_path / "my chat.json"
    arguments = ["-m", tiny, "-t", "1", "--temp", "0", "-n", "12", "--system", SYSTEM]
    done = call("chat", *arguments, stdin=LINES.format(file=file) + "three\n/quit\nfour\n")
    saved = json.loads(file.read_text())["messages"]
    assert [m["content"] for m in saved[1::2]] == ["one", "two \nlines"]
    assert f"system\n{SYSTEM}" in done.stdout  # /kept
    for part in ("n_evicted", "error: /nonsense is no command", "/load FILE", "4 messages are in"):
        assert part in done.stderr
    status = [line for line in done.stderr.splitlines() if "tokens/s" in line]
    assert len(status) == 3
    assert all("cells, nothing dropped]" in line for line in status)
    assert "Traceback" not in done.stderr


def test_a_slip_of_typing_ends_no_chat(tiny, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "deep.json").write_text("[" * 100_000)
    paths = (".", "/", "~nobody-is-called-so/x", "folder", "no/x", "a\0b", "x" * 300)
    slips = [f"/save {path}" for path in paths] + [f"/load {path}" for path in paths]
    slips.append("/load deep.json")
    text = "\n".join(["one", *slips]).encode() + b"\n\xff two\n\xff\\\nlines\n/save chat.json\n"
    arguments = ["-m", tiny, "-t", "1", "--temp", "0", "-n", "12"]
    done = call("chat", *arguments, stdin=text, cwd=tmp_path)
    said = json.loads((tmp_path / "chat.json").read_text())["messages"]
    assert [m["content"] for m in said if m["role"] == "user"] == ["one"]
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(slips) + 2
    assert (
        errors[-1]
        == errors[-2]
        == ("error: this message is not UTF-8 text and is left out; convert it")
    )
    assert {p.name for p in tmp_path.iterdir()} == {"folder", "chat.json", "deep.json"}


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny):
    endless = ["-t", "1", "--temp", "0", "-c", "10000000", "-n", "-1"]
    with start("chat", "-m", tiny, *endless) as process:
        process.stdin.write(b"Once upon a time\n")
        process.stdin.flush()
        assert process.stdout.read(200)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(b"/stats\n", timeout=30)
    assert process.returncode == 0
    assert b"[stopped, " in err
    assert b"positions" in err
