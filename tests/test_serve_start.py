"""How the server starts: flags, configuration files, what cannot be, what it warns of."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import bootstrap
import pytest
import tiny_models
from command_line import start
from serving import N_CTX, THREAD, ask, client_of, refused, served
from typer.testing import CliRunner

import pyinertia.server
from pyinertia.cli import app
from pyinertia.errors import CommandError
from pyinertia.server import flags, run, settings  # noqa: F401
from pyinertia.server.settings import ModelSettings, ServerSettings, upstream


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


def test_two_models_of_a_file_with_positions_that_end(tiny, tmp_path):
    other = tiny_models.write_chat(tmp_path / "other.gguf")
    common = {"n_batch": 64, "n_threads": 1, "n_threads_batch": 1}
    models = [
        {
            "model": str(tiny),
            "model_alias": "keeps",
            "kv_positions": "keep",
            **common,
            "n_ctx": 512,
        },
        {"model": str(other), "model_alias": "full", "kv_policy": "full", **common},
    ]
    file = tmp_path / "models.json"
    file.write_text(json.dumps({"models": models, "interrupt_requests": True}))
    with served("--config-file", file) as (address, process):
        client = client_of(address)
        assert [model.id for model in client.models.list()] == ["keeps", "full"]
        for name, n_ctx in (("keeps", 512), ("full", N_CTX), ("unknown", 512)):
            for stream in (False, True):
                code = "context_length_exceeded"
                told = refused(400, code, ask, client, "x" * 1200, model=name, stream=stream)
                assert str(n_ctx) in told
            usage = ask(client, "Hi.", model=name).usage
            assert usage.kv_tokens_evicted == 0
        # a stream gives way to the next request, because the file says so
        stream = ask(client, "Go on.", model="full", max_tokens=900, stream=True)
        next(iter(stream))
        assert ask(client, "Hi.", model="full").choices[0].finish_reason
        assert len(list(stream)) < 800
        # an answer that is on its way does not hold up the end
        stream = ask(client, "Go on.", model="full", max_tokens=400, stream=True)
        next(iter(stream))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0


def test_a_port_in_use_is_found_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = CliRunner().invoke(app, ["serve", __file__, "--port", port])
    assert done.exit_code == 2
    assert done.output.startswith(f"error: cannot listen on localhost:{port}: ")
    assert done.output.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["missing.gguf"], "does not exist"),
        ([], "no model"),
        (["a.gguf", "-m", "b.gguf"], "2 models"),
        (["a.gguf", "--kv-budgt", "9"], "--kv-budgt"),
        (["a.gguf", "--n-ctx", "many"], "n_ctx: "),
        (["a.gguf", "--port", "99999"], "port: "),
        (["a.gguf", "--kv-policy", "best"], "kv_policy='best' is not known"),
        (["a.gguf", "--kv-policy", "full", "--kv-budget", "9"], "leave --kv-budget out"),
        (["a.gguf", "--ssl-keyfile", "key.pem"], "--ssl-certfile"),
        ([__file__, "--port", "0"], "not a complete GGUF model"),
        ([__file__, "--host", "nobody.invalid"], "cannot listen on nobody.invalid:8000"),
        (["--config-file", __file__], "neither JSON nor YAML"),
        (["--config-file", "models.json"], "models.json: No such file"),
        (["a.gguf", "--config-file", "models.json"], "leave --model out"),
    ],
)
def test_a_start_that_fails_says_why_in_one_line(args, reason, monkeypatch):
    for name in ("MODEL", "HOST", "PORT"):
        monkeypatch.delenv(name, raising=False)
    done = CliRunner().invoke(app, ["serve", *args])
    assert done.exit_code, done.output
    assert reason in done.output
    assert done.output.count("\n") == 1


def test_flags_have_the_names_of_llama_cpp_server_and_of_llama_cpp():
    given, _ = flags.parse(["a.gguf", "--n_ctx", "9", "-b", "8", "--flash_attn=off"], "")
    assert given == {"model": "a.gguf", "n_ctx": "9", "n_batch": "8", "flash_attn": "off"}
    with pytest.raises(CommandError, match=r"a.gguf is not on or off"):
        flags.parse(["--verbose", "a.gguf"], "")
    given, file = flags.parse(["--n-threads=-1", "--verbose", "--config_file", "a_b.json"], "")
    assert (given, file) == ({"n_threads": "-1", "verbose": "on"}, "a_b.json")
    known = {*ModelSettings.model_fields, *ServerSettings.model_fields}
    assert known >= {*upstream.Settings.model_fields}
    given = {"model": "a", "kv_budget": "0.25", "type_k": "q8_0", "n_threads": "-1"}
    _, (model,) = settings.read(given, None)
    assert (model.kv_budget, model.type_k, model.policy().prefill) == (0.25, 8, "full")
    assert model.n_threads >= 1


def test_a_configuration_file_is_checked(tmp_path):
    file = tmp_path / "models.yaml"
    for text, reason in [
        ("models: []", "models: List should have at least 1 item"),
        ("models: [{model: a}, {model: a}]", "two models called a; give them a model_alias each"),
        ("models: [{model: a, kv_budgt: 9}]", "models.0.kv_budgt: Extra inputs"),
        ("- a", "must hold an object"),
        ("models: [", "neither JSON nor YAML"),
    ]:
        file.write_text(text)
        with pytest.raises(CommandError, match=re.escape(reason)):
            settings.read({}, str(file))
    file.write_text("port: 9\nhost: '::1'\nmodels: [{model: a, kv_policy: h2o, kv_budget: 99}]")
    server, (model,) = settings.read({"port": "7"}, str(file))
    assert (server.port, server.host, model.policy().n_budget) == (7, "::1", 99)


def test_help_lists_all_flags():
    text = CliRunner().invoke(app, ["serve", "--help"]).output
    for name in ("--kv-policy", "--kv-budget", "--kv-positions", "--api-key", "--n-ctx", "-ngl"):
        assert name in text


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "pyinertia.server.run")
    monkeypatch.delattr(pyinertia.server, "run")
    done = CliRunner().invoke(app, ["serve", "model.gguf"])
    assert done.exit_code == 2
    assert done.output == "error: serve needs uvicorn; pip install 'pyinertia[server]'\n"


def test_the_extra_has_what_llama_cpp_server_asks_for():
    def names(requirements: list[str]) -> set[str]:
        return {re.match(r"[\w-]+", one)[0].lower() for one in requirements}

    wanted = [r for r in metadata.requires("llama_cpp_python") if r.endswith('"server"')]
    assert len(wanted) >= 6
    server = names(bootstrap.requirements("server"))
    assert names(wanted) < server <= names(bootstrap.requirements("test"))


def test_an_open_server_warns(tiny):
    process = start(
        "serve", tiny, "--host", "0.0.0.0", "--port", "0", *THREAD, stdin=subprocess.DEVNULL
    )
    line = process.stderr.readline().decode()
    process.terminate()
    process.communicate(timeout=15)
    assert "warning" in line
    assert "--api-key" in line
