"""Other libraries with our `Llama`: their classes, their words, and the examples of their page."""

from __future__ import annotations

from contextlib import closing
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pages
import pytest
import tiny_models

from pyinertia import Llama

# what those libraries warn about among themselves is not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")

SMALL = {"n_ctx": 1024, "n_batch": 64, "kv_policy": "inertiakv", "kv_budget": 96}
SMALL |= {"kv_prefill": "bounded"}
PAGE = "docs/how-to/other-libraries.md"
SYSTEM = "You are kind to all who ask."
LETTERS = "root ::= [a-z]{12}"


def needs(module: str, extra: str) -> pytest.MarkDecorator:
    try:
        there = find_spec(module) is not None
    except ModuleNotFoundError:  # of what it is a part of
        there = False
    return pytest.mark.skipif(not there, reason=f"pip install 'pyinertia[{extra}]'")


langchain = needs("langchain_community", "langchain")
llama_index = needs("llama_index.llms.llama_cpp", "llama-index")
llm = needs("llm", "llm")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture
def here(tmp_path, monkeypatch, tiny) -> Path:
    """A folder with model.gguf, which is where the examples run."""
    monkeypatch.chdir(tmp_path)
    Path("model.gguf").symlink_to(tiny)
    return tmp_path


@pytest.fixture
def n_evaluated(monkeypatch):
    """Tokens that models evaluate, counted from call to call."""
    n, evaluate = 0, Llama.eval

    def counted(model: Llama, tokens) -> None:
        nonlocal n
        n += len(tokens)
        evaluate(model, tokens)

    def take() -> int:
        nonlocal n
        n, taken = 0, n
        return taken

    monkeypatch.setattr(Llama, "eval", counted)
    return take


def n_turn(role: str, text: str) -> int:
    """Tokens of a turn in the tiny model's template: one per byte, <s>, </s> and a line end."""
    return 1 + len(f"{role}\n{text}") + 2


N_BEGIN = 1 + len("assistant\n")


def check_chat(turn, model, n_evaluated, n_answer: int = 12) -> None:
    """Each turn evaluates what is new and nothing else, and the system message never leaves.

    Args:
        turn: Says a text, and takes an answer.
        model: Returns the model.
        n_evaluated: The fixture.
        n_answer: Tokens of each answer.
    """
    n_before = n_turn("system", SYSTEM)
    for i in range(6):  # more than the budget holds
        text = f"Question {i}, long enough to fill the cache."
        turn(text)
        assert n_evaluated() == n_before + n_turn("user", text) + N_BEGIN + n_answer
        n_before = 2  # </s> and the line end of the answer
    n_system = n_turn("system", SYSTEM) - 1
    assert model().kv_stats().n_evicted > 0
    assert model().kv_cells()["pos"].tolist()[:n_system] == list(range(n_system))


# LangChain


@langchain
def test_langchain_s_example(here, capsys):
    example = pages.python_with(PAGE, "pyinertia.integrations.langchain")
    assert len(example.splitlines()) <= 12
    found: dict = {}
    exec(example, found)
    assert type(found["llm"].client) is Llama
    assert found["llm"].client.kv_policy.n_budget == 1024
    assert "KVStats(" in capsys.readouterr().out


@langchain
def test_langchain_s_chat_is_appended_to(tiny, n_evaluated):
    from pyinertia.integrations.langchain import ChatLlamaCpp

    model = ChatLlamaCpp(
        model_path=str(tiny), verbose=False, n_threads=1, grammar=LETTERS, temperature=0, **SMALL
    )
    chat: list = [("system", SYSTEM)]

    def turn(text: str) -> None:
        chat.append(("human", text))
        chat.append(model.invoke(chat))
        assert len(chat[-1].content) == 12

    check_chat(turn, lambda: model.client, n_evaluated)
    pieces = [piece.content for piece in model.stream([*chat, ("human", "Bye.")])]
    assert len("".join(pieces)) == 12
    assert len(pieces) > 2


@langchain
def test_langchain_s_plain_text_is_what_llama_says(tiny):
    from pyinertia.integrations.langchain import LlamaCpp

    model = LlamaCpp(model_path=str(tiny), verbose=False, temperature=0, max_tokens=8, **SMALL)
    said = model.invoke("Once upon a time")
    assert model.client.kv_policy.n_budget == 96
    with closing(Llama(tiny, verbose=False, **SMALL)) as plain:
        answer = plain.create_completion(
            "Once upon a time", max_tokens=8, temperature=0, repeat_penalty=1.1
        )
    assert said == answer["choices"][0]["text"]


@langchain
def test_langchain_takes_a_llama_that_is_open(tiny):
    from pyinertia.integrations.langchain import ChatLlamaCpp, LlamaCpp

    opened = Llama(tiny, verbose=False, **SMALL)
    for kind in (ChatLlamaCpp, LlamaCpp):
        assert kind(client=opened, max_tokens=4).client is opened
        with pytest.raises(ValueError, match="flash_attn, kv_budget, n_ctx: the client is loaded"):
            kind(client=opened, n_ctx=512, kv_budget=96, model_kwargs={"flash_attn": True})
    opened.close()


@langchain
@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"kv_polcy": "inertiakv"}, "kv_polcy"),
        ({"kv_policy": "inertia"}, "inertia"),
        ({"model_path": "missing.gguf"}, "missing.gguf does not exist"),
        ({"model_path": ""}, "pass model_path=FILE"),
        ({"grammar": LETTERS, "grammar_path": "letters.gbnf"}, "pass one of them"),
    ],
)
def test_langchain_refuses_by_name(given, says, tiny):
    from pyinertia.integrations.langchain import ChatLlamaCpp

    with pytest.raises(ValueError, match=says):
        ChatLlamaCpp(**{"model_path": str(tiny), "verbose": False, **given})


# llama-index


@llama_index
def test_llama_index_s_example(here, capsys):
    example = pages.python_with(PAGE, "pyinertia.integrations.llama_index")
    assert len(example.splitlines()) <= 12
    found: dict = {}
    exec(example, found)
    assert type(found["llm"].llama) is Llama
    assert found["llm"].llama.kv_policy.n_budget == 1024
    assert "KVStats(" in capsys.readouterr().out


def index_model(tiny: Path, **more):
    from pyinertia.integrations.llama_index import LlamaCPP

    small = {name: value for name, value in SMALL.items() if name.startswith("kv_")}
    return LlamaCPP(
        model_path=str(tiny),
        verbose=False,
        context_window=1024,
        temperature=0,
        model_kwargs={"n_batch": 64, "n_threads": 1},
        **{**small, **more},
    )


@llama_index
def test_llama_index_s_chat_is_appended_to(tiny, n_evaluated):
    from llama_cpp import LlamaGrammar
    from llama_index.core.llms import ChatMessage

    letters = LlamaGrammar.from_string(LETTERS)
    model = index_model(tiny, generate_kwargs={"grammar": letters, "repeat_penalty": 1.1})
    chat = [ChatMessage(role="system", content=SYSTEM)]

    def turn(text: str) -> None:
        chat.append(ChatMessage(role="user", content=text))
        chat.append(model.chat(chat).message)
        assert len(chat[-1].content) == 12

    check_chat(turn, lambda: model.llama, n_evaluated)
    pieces = [*model.stream_chat([*chat, ChatMessage(role="user", content="Bye.")])]
    assert pieces[-1].message.content == "".join(piece.delta for piece in pieces)
    assert len(pieces[-1].message.content) == 12


@llama_index
def test_llama_index_completes_and_renders_as_it_is_told(tiny):
    from llama_index.core.llms import ChatMessage

    def rendered(messages) -> str:
        return "".join(f"{one.role.value}: {one.content}\n" for one in messages)

    model = index_model(tiny, max_new_tokens=8, messages_to_prompt=rendered)
    with closing(Llama(tiny, verbose=False, **SMALL)) as plain:
        for text, said in [
            ("Once upon", str(model.complete("Once upon"))),
            ("user: Hello\n", model.chat([ChatMessage("Hello")]).message.content),
        ]:
            answer = plain.create_completion(text, max_tokens=8, temperature=0)
            assert said == answer["choices"][0]["text"]


@llama_index
def test_llama_index_refuses_by_name(tiny):
    from llama_index.core.llms import ChatMessage, ImageBlock

    from pyinertia.integrations.llama_index import LlamaCPP

    with pytest.raises(ValueError, match="model_path=FILE, or model_url=URL"):
        LlamaCPP(kv_policy="inertiakv")
    with pytest.raises(ValueError, match="budget"):
        index_model(tiny, kv_budget=1)
    message = ChatMessage(role="user", blocks=[ImageBlock(image=b"x")])
    with pytest.raises(ValueError, match="ImageBlock; this model reads text only"):
        index_model(tiny).chat([message])


# llm


@pytest.fixture
def user(tmp_path, monkeypatch) -> Path:
    """llm's own folder."""
    folder = tmp_path / "llm"
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    return folder


def run_llm(*args: str | Path, code: int = 0, stdin: str = "") -> str:
    from click.testing import CliRunner
    from llm.cli import cli

    done = CliRunner().invoke(cli, [*map(str, args)], input=stdin)
    assert done.exit_code == code, done.output + repr(done.exception)
    return done.output


@llm
def test_llm_finds_the_plugin():
    (entry,) = (one for one in entry_points(group="llm") if one.name == "pyinertia")
    assert entry.value == "pyinertia.integrations.llm"
    assert "pyinertia" in run_llm("plugins")


@llm
def test_llm_s_example(here, user):
    lines = pages.shell(PAGE, "llm pyinertia add")
    assert len(lines) <= 10
    for program, *args in lines:
        assert program == "llm"
        said = run_llm(*args, stdin="Hello.\nexit\n" if args[0] == "chat" else "")
        assert said or args[0] == "pyinertia"
    assert run_llm("pyinertia", "list") == f"brief: {here / 'model.gguf'}\n"


@llm
def test_llm_s_chat_is_appended_to(tiny, user, n_evaluated):
    import llm as library

    run_llm("pyinertia", "add", "tiny", tiny)
    model = library.get_model("tiny")
    talk = model.conversation()
    small = {name: value for name, value in SMALL.items() if name != "kv_policy"}
    schema = {"enum": ["a" * 10]}  # which is 12 bytes of JSON

    def turn(text: str) -> None:
        system = None if talk.responses else SYSTEM
        answer = talk.prompt(text, system=system, schema=schema, temperature=0, **small)
        assert answer.text() == '"aaaaaaaaaa"'
        assert answer.output_tokens == 12
        details = answer.token_details
        assert sum(details.values()) == answer.input_tokens + 12
        assert details["kv_tokens_kept"] == model._llama.kv_cells()["pos"].size

    check_chat(turn, lambda: model._llama, n_evaluated)
    before = model._llama
    model.prompt("Hello", kv_budget=128, max_tokens=2).text()
    assert model._llama.kv_policy.n_budget == 128
    assert before._ctx.ctx is None  # one model at a time


@llm
def test_llm_s_own_defaults_and_options_reach_the_model(tiny, user, monkeypatch):
    from pyinertia.integrations import llm_llama

    loaded = []

    def load(path: str, **options):
        loaded.append(options)
        return plain(path, **options)

    plain = llm_llama.load
    monkeypatch.setattr(llm_llama, "load", load)
    run_llm("pyinertia", "add", "tiny", tiny)
    run_llm("models", "options", "set", "tiny", "kv_budget", "300")
    run_llm("-m", "tiny", "-o", "n_ctx", "512", "-o", "max_tokens", "3", "Hello")
    assert loaded == [{"kv_budget": 300, "n_ctx": 512}]
    with closing(plain(str(tiny))) as llama:
        assert llama.kv_policy.n_budget == 1024
        assert llama.kv_policy.prefill == "bounded"
        assert llama._kv_arguments["kv_positions"] == "keep"  # 1,024 positions: nothing to close
    with closing(plain(str(tiny), kv_budget=300, n_threads=1)) as llama:
        assert llama._kv_arguments["kv_positions"] == "compact"
        assert llama.n_threads == 1


@llm
def test_llm_s_list_and_what_it_refuses(tiny, user, tmp_path):
    assert "does not exist" in run_llm("pyinertia", "add", "tiny", tmp_path / "no.gguf", code=2)
    assert run_llm("pyinertia", "list") == ""
    run_llm("pyinertia", "add", "tiny", tiny)
    assert run_llm("pyinertia", "list") == f"tiny: {tiny}\n"
    assert "tiny" in run_llm("models")
    assert "kv_bugdet" in run_llm("-m", "tiny", "-o", "kv_bugdet", "1", "Hello", code=1)
    refused = ("-o", "kv_policy", "full", "-o", "kv_budget", "300")
    assert "drops nothing" in run_llm("-m", "tiny", *refused, "Hello", code=1)
    assert "there is no 'small'; there is tiny" in run_llm("pyinertia", "remove", "small", code=1)
    run_llm("pyinertia", "remove", "tiny")
    assert run_llm("pyinertia", "list") == ""
    (user / "pyinertia.json").write_text("{")
    assert "is damaged" in run_llm("pyinertia", "list", code=1)
    assert "gpt" in run_llm("models")
