"""What README and docs/ show is run: Python on a tiny model, command lines up to their options."""

from __future__ import annotations

import functools
import inspect
import pydoc
from contextlib import ExitStack
from pathlib import Path

import pages
import pytest
import serving
import tiny_models
import typer
from make_documents import STORY

from pyinertia.cli import app
from pyinertia.llama import Llama
from pyinertia.server import flags

WITH_PYTHON = {page for page in pages.PAGES if pages.python(page)}
ELSEWHERE = {"docs/how-to/other-libraries.md"}  # test_integrations.py runs its examples
SERVER = "http://localhost:8000/v1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the examples read."""
    monkeypatch.setattr(tiny_models, "N_CTX", 4096)
    tiny_models.write_chat(tmp_path / "model.gguf")
    (tmp_path / "report.txt").write_text(STORY[:1200])
    (tmp_path / "reports").mkdir()
    for name in ("a", "b"):
        (tmp_path / "reports" / f"{name}.txt").write_text(STORY[:300])
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and short answers: random weights seldom end theirs."""
    init, complete = Llama.__init__, Llama.create_completion

    @functools.wraps(init)
    def one_thread(self, *args, **kwargs):
        init(self, *args, **{"verbose": False, "n_threads": 1, "n_threads_batch": 1, **kwargs})

    @functools.wraps(complete)
    def short(self, *args, **kwargs):
        kwargs["max_tokens"] = min(kwargs.get("max_tokens") or 24, 24)
        return complete(self, *args, **kwargs)

    monkeypatch.setattr(Llama, "__init__", one_thread)
    monkeypatch.setattr(Llama, "create_completion", short)


@pytest.mark.parametrize("page", sorted(WITH_PYTHON - ELSEWHERE))
def test_the_python_of_a_page_runs(page, folder, quick, capsys):
    names = {"__name__": "example"}
    with ExitStack() as stack:
        for block in pages.python(page):
            if SERVER in block:
                model = folder / "model.gguf"
                server = serving.served(model, "--kv-budget", "256", "-c", "1024", *serving.THREAD)
                address, _ = stack.enter_context(server)
                block = block.replace(SERVER, f"{address}/v1")
            exec(compile(block, page, "exec"), names)


def test_what_the_reference_names_has_a_docstring():
    names = {name for page in pages.PAGES for name in pages.objects(pages.read(page))}
    assert {"pyinertia.Llama", "pyinertia.KVPolicy"} <= names
    for name in names:
        thing = pydoc.locate(name)
        assert thing is not None, name
        assert name.rpartition(".")[2].isupper() or inspect.getdoc(thing), name


def check(words: list[str]) -> None:
    """Parse a command line of pyinertia; raises what typer would show."""
    if words[:1] == ["serve"]:
        flags.parse(words[1:], "")
        return
    command, words = typer.main.get_command(app), list(words)
    while commands := getattr(command, "commands", None):
        command = commands[words.pop(0)]
    command.make_context("pyinertia", words)


@pytest.mark.parametrize("page", [page for page in pages.PAGES if pages.commands(page)])
def test_the_command_lines_of_a_page_are_understood(page):
    for words in pages.commands(page):
        if Path(words[0]).name == "pyinertia":
            check(words[1:])
        elif words[0] == "python":
            assert (pages.ROOT / words[1]).is_file(), words


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("run --kv-policy", "requires an argument"),
        ("run -m m --kv-polcy h2o", "No such option"),
        ("eval rule -m m", "rule"),
        ("serve m --kv-polcy h2o", "unrecognized"),
    ],
)
def test_a_wrong_command_line_is_noticed(wrong, message):
    with pytest.raises(Exception, match=message):
        check(wrong.split())
