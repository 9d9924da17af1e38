"""The command line: run, chat, info, and what holds for all commands."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
from dataclasses import fields
from pathlib import Path

import llama_cpp
import pages
import pytest
import tiny_models
import typer
from command_line import ESCAPE, call, environment, start
from typer.testing import CliRunner

import pyinertia
from pyinertia import Llama
from pyinertia.cli import app, hub
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.documents import suffixes
from pyinertia.errors import CommandError

GROUPS = (ModelOptions, ContextOptions, SamplingOptions, KVOptions)
LLAMA_CPP = {
    *("-m", "-hf", "-c", "-n", "-t", "-ngl", "-b", "-ub", "-fa", "-ctk", "-ctv", "-f", "-p"),
    *("-sys", "--temp", "--top-k", "--top-p", "--min-p", "--seed", "--repeat-penalty"),
}
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ONE = ["-t", "1", "--temp", "0"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("tiny")


@pytest.fixture(scope="module")
def tiny(folder) -> Path:
    return tiny_models.write_llama(folder / "llama.gguf")


@pytest.fixture(scope="module")
def tiny_chat(folder) -> Path:
    return tiny_models.write_chat(folder / "chat.gguf")


def invoke(*args: str | Path, stdin: str = "", code: int = 0):
    done = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


# options and help


def options(name: str) -> set[str]:
    return {flag for option in COMMANDS[name].params for flag in getattr(option, "opts", ())}


def test_the_version_is_one_line():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    assert done.stdout == f"pyinertia {pyinertia.__version__}\n"


def test_llama_cpp_s_names_are_there():
    assert not LLAMA_CPP - options("run")
    ours = {"--kv-policy", "--kv-budget", "--kv-refresh", "--kv-prefill"}
    assert ours <= options("run") & options("chat") & options("info") & options("summarise")


def test_the_page_of_the_command_line_names_all():
    text = pages.read("docs/command-line.md")
    assert all(f"- `{name}`" in text for name in COMMANDS)
    assert suffixes() in text
    readme = pages.section(pages.README, "Command line")
    assert all(re.search(rf"\b{name}\b", readme) for name in COMMANDS)


def test_commands_have_the_same_shared_options():
    names = {field.name for group in GROUPS for field in fields(group)}
    shared = [
        {p.name: (p.opts, p.help) for p in COMMANDS[name].params if p.name in names}
        for name in ("run", "chat", "summarise", "inspect")
    ]
    assert shared[0].keys() == names
    assert all(others == shared[0] for others in shared)


@pytest.mark.parametrize("name", ["run", "chat", "info", "summarise", "inspect"])
def test_help_is_complete_and_in_panels(name):
    text = " ".join(invoke(name, "--help").output.split())
    assert ESCAPE not in text
    assert all(flag in text for flag in options(name) if flag.startswith("--"))
    assert all(f"─ {panel} " in text for panel in ("Model", "Context", "KV cache"))
    assert all(option.help for option in COMMANDS[name].params if option.name != "help")


def test_the_shell_completes_commands():
    words = {"COMP_WORDS": "pyinertia su", "COMP_CWORD": "1"}
    done = call(env={"_PYINERTIA_COMPLETE": "complete_bash", **words}, code=None)
    assert done.stdout.split() == ["summarise"]


# run


def test_run_says_what_the_model_says(tiny):
    llm = Llama(tiny, n_ctx=1024, flash_attn=True, n_threads=1, n_threads_batch=1, verbose=False)
    tokens = llm.tokenize(b"Once upon a time")
    generated = [t for t, _ in zip(llm.generate(tokens, temp=0), range(40), strict=False)]
    expected = llm.detokenize(generated).decode("utf-8", "replace")
    done = call("run", "-m", tiny, *ONE, "-n", 40, "Once upon a time")
    assert done.stdout == expected + "\n"
    assert done.stderr == ""


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="there is a GPU")
def test_run_tells_that_there_is_no_gpu_for_its_layers(tiny):
    done = call("run", "-m", tiny, *ONE, "-ngl", -1, "-n", 1, "some words")
    assert "note: n_gpu_layers=-1: no GPU is found" in done.stderr
    assert "note:" not in call("run", "-m", tiny, *ONE, "-n", 1, "some words").stderr


def test_run_uses_the_chat_template_and_no_chat_does_not(tiny_chat):
    def answer(*args: str) -> str:
        return invoke("run", "-m", tiny_chat, *ONE, "-n", 30, *args).stdout

    plain = answer("--no-chat", "<s>user\nhi</s>\n<s>assistant\n")
    assert answer("hi") == plain
    assert answer("--no-chat", "hi") != plain
    with_system = answer("--no-chat", "<s>system\nS</s>\n<s>user\nhi</s>\n<s>assistant\n")
    assert answer("--system", "S", "hi") == with_system


def test_the_prompt_comes_from_anywhere(tiny, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon a time\n")

    def said(*args: str | Path, stdin: str = "") -> str:
        return invoke("run", "-m", tiny, *ONE, "-n", "20", *args, stdin=stdin).stdout

    first = said("Once upon a time")
    assert said("-p", "Once upon a time") == first
    assert said("-f", file) == first
    assert said("-f", "-", stdin="Once upon a time") == first
    assert said(stdin="Once upon a time") == first
    file.write_text("Once upon a time\n", encoding="utf-16")
    assert said("-f", file) == first
    page = tmp_path / "page.html"
    page.write_text("<p>Once <b>upon</b> a time</p>")
    assert said("-f", page) == first
    assert said("-f", file, "who?") == said("Once upon a time\n\nwho?") != first


def test_run_tells_what_was_dropped(tiny, tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("abcdefgh " * 200)
    options = ["--kv-budget", "256", "-b", "128", "-n", "16", "-c", "4096"]
    done = call("run", "-m", tiny, *ONE, *options, "-f", file, "what?")
    n_tokens = 1 + len("abcdefgh " * 200 + "\n\nwhat?") + 15  # <s>; the last one is not evaluated
    n_dropped = n_tokens - 256
    assert f"256 of 256 cells, {n_dropped:,} of {n_tokens:,} tokens dropped" in done.stderr
    full = invoke("run", "-m", tiny, *ONE, "-n", "16", "--kv-policy", "full", "a b c")
    assert full.stderr == ""


def test_run_samples_as_it_is_told(tiny):
    sampling = ["--top-k", "5", "--top-p", "0.9", "--min-p", "0.1", "--repeat-penalty", "1.3"]
    llm = Llama(tiny, n_ctx=1024, seed=7, flash_attn=True, n_threads=1, verbose=False)
    stream = llm.generate(
        llm.tokenize(b"Once"), temp=0.7, top_k=5, top_p=0.9, min_p=0.1, repeat_penalty=1.3
    )
    expected = llm.detokenize([t for t, _ in zip(stream, range(30), strict=False)])
    told = ["-t", "1", "--temp", "0.7", "-s", "7", "-n", "30", *sampling]
    assert (
        invoke("run", "-m", tiny, *told, "Once").stdout
        == expected.decode("utf-8", "replace") + "\n"
    )


# what goes wrong


def bad_inputs(tiny: Path, tmp_path: Path) -> dict[str, tuple[list[str | Path], str]]:
    (tmp_path / "latin1.txt").write_bytes("Café".encode("latin-1"))
    (tmp_path / "nul.txt").write_bytes(b"abc\0def")
    (tmp_path / "latin1.html").write_bytes(b"<p>\xe9\xe9\xe9\xe9")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    run: list[str | Path] = ["run", "-m", tiny, *ONE, "-n", "4"]
    return {
        "no model": (["run", "hi"], "name one model: -m FILE, or -hf"),
        "two models": ([*run, "-hf", "a/b", "hi"], "name one model"),
        "missing model": (["run", "-m", "no.gguf", "hi"], "no.gguf does not exist"),
        "folder": (["run", "-m", tmp_path, "hi"], "is a folder"),
        "broken model": (["run", "-m", tmp_path / "broken.gguf", "hi"], "not a complete GGUF"),
        "two prompts": ([*run, "hi", "-p", "ho"], "the prompt is there twice"),
        "empty prompt": ([*run, " "], "the prompt is empty"),
        "empty stdin": (run, "the prompt is empty"),
        "missing file": ([*run, "-f", "no.txt"], "no.txt: No such file"),
        "latin-1": (
            [*run, "-f", tmp_path / "latin1.txt"],
            "latin1.txt: not utf-8 text (byte 3); convert it",
        ),
        "binary": ([*run, "-f", tmp_path / "nul.txt"], "nul.txt: binary, not text (a NUL"),
        "latin-1 page": ([*run, "-f", tmp_path / "latin1.html"], "not utf-8 text; convert it"),
        "too long": ([*run, "-c", "64", "x" * 100], "the prompt has 101 tokens"),
        "policy": ([*run, "--kv-policy", "inertia", "hi"], "Did you mean 'inertiakv'"),
        "budget": ([*run, "--kv-budget", "many", "hi"], "must be a number of cells (1024)"),
        "small budget": ([*run, "--kv-budget", "3", "hi"], "must be at least 37"),
        "budget of full": (
            [*run, "--kv-policy", "full", "--kv-budget", "9", "hi"],
            "drops nothing, so leave --kv-budget out",
        ),
        "prefill": ([*run, "--kv-prefill", "half", "hi"], "'full', 'bounded'"),
        "share": ([*run, "--kv-prefill", "bounded", "--kv-budget", "0.5", "hi"], "as a count"),
        "cache type": ([*run, "-ctk", "q9", "hi"], "-ctk q9: the cache types are f32"),
        "quantised V": ([*run, "-fa", "off", "-ctv", "q8_0", "hi"], "need flash attention"),
        "flash": ([*run, "-fa", "maybe", "hi"], "must be on or off"),
        "system": ([*run, "--system", "S", "hi"], "the model has no chat template"),
        "no chat": ([*run, "--no-chat", "--system", "S", "hi"], "leave --no-chat out"),
        "unknown flag": ([*run, "--kv-polcy", "full", "hi"], "No such option"),
        "threads": ([*run, "-t", "0", "hi"], "Invalid value"),
    }


@pytest.mark.parametrize(
    "what",
    [
        "no model",
        "two models",
        "missing model",
        "folder",
        "broken model",
        "two prompts",
        "empty prompt",
        "empty stdin",
        "missing file",
        "latin-1",
        "binary",
        "latin-1 page",
        "too long",
        "policy",
        "budget",
        "small budget",
        "budget of full",
        "prefill",
        "share",
        "cache type",
        "quantised V",
        "flash",
        "system",
        "no chat",
        "unknown flag",
        "threads",
    ],
)
def test_what_cannot_be_is_one_readable_line(what, tiny, tmp_path):
    args, says = bad_inputs(tiny, tmp_path)[what]
    done = invoke(*args, code=2)
    assert says in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    if not done.stderr.startswith("Usage"):  # typer draws its own
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_a_refused_architecture_is_told_in_the_engine_s_words(folder):
    mamba = tiny_models.write_mamba(folder / "mamba.gguf")
    error = invoke("run", "-m", mamba, *ONE, "hi", code=2).stderr
    assert error.startswith("error: --kv-policy inertiakv cannot run on architecture 'mamba': ")
    assert "architecture 'mamba' uses a cache that cannot be evicted from" in error
    assert error.endswith("Use --kv-policy full\n")
    assert invoke("run", "-m", mamba, *ONE, "-n", "4", "--kv-policy", "full", "hi").stderr == ""


def test_debug_shows_the_traceback(tiny):
    for args in (["--debug", "run"], ["run", "--debug"]):
        done = call(*args, "-m", tiny, "-ctk", "q9", "hi", code=1)
        assert "Traceback" in done.stderr
        assert "CommandError: -ctk q9" in done.stderr
    done = call("--debug", "eval", "agree", "-m", "no.gguf", code=1)
    assert "ModelError: no.gguf does not exist" in done.stderr


def test_llama_cpp_is_silent_unless_asked(tiny):
    assert call("run", "-m", tiny, *ONE, "-n", "2", "hi").stderr == ""
    assert "llama_" in call("run", "-m", tiny, *ONE, "-n", "2", "--verbose", "hi").stderr


def test_a_pipe_gets_no_colour():
    assert ESCAPE not in call("run", "--help").stdout


def test_no_color_is_respected_on_a_terminal():
    def colours(**env: str) -> int:
        ours, theirs = pty.openpty()
        with start(
            "run", "--no-such", env=environment(TERM="xterm-256color", **env), stderr=theirs
        ):
            os.close(theirs)
            shown = b""
            with contextlib.suppress(OSError):  # the terminal is gone with the process
                while part := os.read(ours, 4096):
                    shown += part
        os.close(ours)
        assert b"No such option" in shown
        return len(re.findall(rb"\x1b\[[\d;]*3[0-7]m", shown))

    assert colours()
    assert not colours(NO_COLOR="1")


# it never says </s> by itself: the greedy answer goes round in circles
ENDLESS = ["--temp", "0", "-t", "1", "-c", "10000000", "Once upon a time"]


def test_a_broken_pipe_is_quiet(tiny):
    with start("run", "-m", tiny, *ENDLESS) as process:
        process.stdout.read(100)
        process.stdout.close()
        assert process.stderr.read().count(b"\n") == 1  # the note about -c
        assert process.wait(20) == 141


def test_ctrl_c_stops_cleanly(tiny):
    with start("run", "-m", tiny, *ENDLESS) as process:
        assert process.stdout.read(100)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
        assert process.returncode == 130
        assert err.count(b"\n") == 1  # the note about -c


# info


def test_info_counts_what_a_token_takes(tiny):
    found = json.loads(call("info", tiny, "--json", "-c", "8192", "--kv-budget", "512").stdout)
    t = tiny_models
    per_token = t.N_LAYER * 2 * t.N_HEAD_KV * (t.N_EMBD // t.N_HEAD) * 2  # K and V of f16
    assert found["bytes_per_token"] == per_token
    assert found["bytes_full"] == 8192 * per_token
    assert found["n_cells"] == 1024  # budget and a batch of 512
    assert found["bytes_policy"] == 1024 * per_token
    assert found["refusal"] == ""
    assert (found["n_layer"], found["n_head"], found["n_head_kv"]) == (2, 4, 2)
    assert (found["architecture"], found["n_ctx_train"]) == ("llama", t.N_CTX)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_info_foretells_what_a_model_allocates(name, kind, folder):
    from pyinertia.kv_types import KV_TYPES

    path = getattr(tiny_models, f"write_{name}")(folder / f"{name}-info.gguf")
    args = ["info", path, "--json", "-c", "4096", "-ctk", kind, "-b", "256", "-ub", "256"]
    found = json.loads(invoke(*args, "--kv-budget", "300").stdout)
    same = {"n_ctx": 4096, "n_batch": 256, "n_ubatch": 256, "flash_attn": True, "verbose": False}
    for key, policy in (
        ("bytes_full", {"swa_full": False}),
        ("bytes_policy", {"kv_policy": "inertiakv", "kv_budget": 300, "kv_prefill": "bounded"}),
    ):
        llm = Llama(path, type_k=KV_TYPES[kind], **same, **policy)
        assert found[key] == llm.kv_stats().kv_bytes, key
        llm.close()


def test_info_shows_the_engine_s_refusal(folder):
    mamba = tiny_models.write_mamba(folder / "mamba-info.gguf")
    text = invoke("info", mamba).output
    assert "cannot run on this model: architecture 'mamba' uses a cache that cannot" in text
    assert json.loads(invoke("info", mamba, "--json").stdout)["bytes_per_token"] is None


def test_info_is_a_plain_table(tiny):
    text = call("info", "-m", tiny, "-c", "8192", "--kv-budget", "512").stdout
    assert "full cache           4 MiB for 8,192 positions\n" in text
    assert "with the policy      512 KiB for 1,024 cells: saves 88%\n" in text


# the hub


FILES = ["README.md", "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m-f16.gguf", "mmproj-f16.gguf"]
SHARDS = [f"big/m-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("", "m-Q4_K_M.gguf"),
        ("Q8_0", "m-Q8_0.gguf"),
        ("q8_0", "m-Q8_0.gguf"),
        ("*f16*", "m-f16.gguf"),
        ("m-f16.gguf", "m-f16.gguf"),
    ],
)
def test_a_repository_s_file_is_chosen(wanted, file):
    assert hub.choose(FILES, wanted, "a/b") == file


def test_a_choice_that_is_not_clear_lists_the_files():
    with pytest.raises(CommandError, match=r"'m-' names 3 files; .* m-Q4_K_M.gguf, m-Q8_0.gguf"):
        hub.choose(FILES, "m-", "a/b")
    with pytest.raises(CommandError, match="no GGUF file"):
        hub.choose(["README.md"], "", "a/b")


def test_a_model_in_several_files_is_its_first(tmp_path):
    first = hub.choose(SHARDS, "Q8_0", "a/b")
    assert first == SHARDS[0]
    assert hub.shards(first) == SHARDS


def test_a_model_of_the_hub_s_cache_needs_no_network(tiny, tmp_path):
    repo = tmp_path / "models--owner--tiny"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("0" * 40)
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "tiny-Q8_0.gguf").write_bytes(tiny.read_bytes())
    env = {"HF_HUB_CACHE": str(tmp_path)}
    cached = call("run", "-hf", "owner/tiny:Q8_0", *ONE, "-n", "8", "hi", env=env)
    assert cached.stdout == invoke("run", "-m", tiny, *ONE, "-n", "8", "hi").stdout
    missing = call("run", "-hf", "owner/other", "hi", env=env, code=2)
    assert "the Hugging Face hub cannot be reached" in missing.stderr
    assert missing.stderr.count("\n") == 1


def test_a_hub_that_does_not_answer_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # it tries for half a minute
    with pytest.raises(CommandError, match=r"hub cannot be reached .* pass a local file with -m"):
        hub.fetch("owner/other:Q8_0")
    with pytest.raises(CommandError, match="is no repository's name"):
        hub.fetch("a/b/c:Q8_0")
