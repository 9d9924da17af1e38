"""The server: the real process, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import bootstrap
import httpx
import openai
import pytest
import tiny_models
from command_line import start
from typer.testing import CliRunner

import pyinertia.server
from pyinertia import Llama
from pyinertia.binding import llama_cpp
from pyinertia.cli import app
from pyinertia.errors import CommandError
from pyinertia.server import flags, run, settings  # noqa: F401
from pyinertia.server.settings import ModelSettings, ServerSettings, upstream

KEY = "sesame"
BUDGET, N_CTX = 256, 1024
THREAD = ["--threads", "1", "--threads-batch", "1"]
# random weights say any bytes; those that are no text come late, and all at once
LETTERS = "root ::= [a-z ]*"
SYSTEM = {"role": "system", "content": "Answer in one word."}


@contextmanager
def served(*args: str | Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A server, by its address; it must end cleanly."""
    process = start("serve", *args, "--port", "0", stdin=subprocess.DEVNULL)
    told, reader = b"", None
    try:
        for line in process.stderr:
            told += line
            if found := re.search(rb"listening on (http://\S+),", line):
                break
        else:
            pytest.fail(told.decode())
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        yield found[1].decode(), process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            code = process.wait(15)
        finally:
            process.kill()
            if reader is not None:
                reader.join()
            process.stdout.close()
            process.stderr.close()
    assert code == 0


def client_of(address: str, key: str = KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=address + "/v1", api_key=key, max_retries=0, timeout=60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture(scope="module")
def address(tiny) -> Iterator[str]:
    policy = ["--kv-policy", "inertiakv", "--kv-budget", str(BUDGET), "--n_batch", "64"]
    with served(tiny, *THREAD, *policy, "--api-key", KEY) as (address, _):
        yield address


@pytest.fixture(scope="module")
def client(address) -> openai.OpenAI:
    return client_of(address)


def ask(client: openai.OpenAI, text: str, **more):
    settings = {"model": "tiny", "max_tokens": 24, "temperature": 0, **more}
    settings.setdefault("extra_body", {"grammar": LETTERS})
    return client.chat.completions.create(
        messages=[SYSTEM, {"role": "user", "content": text}], **settings
    )


def metrics(address: str) -> dict[str, float]:
    text = httpx.get(address + "/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


# answers


def test_an_answer_is_the_model_s(client, tiny):
    text = "What is the capital of France?"
    llm = Llama(
        tiny,
        n_ctx=N_CTX,
        n_batch=64,
        n_ubatch=64,
        kv_policy="inertiakv",
        kv_budget=BUDGET,
        kv_prefill="bounded",
        flash_attn=True,
        n_threads=1,
        n_threads_batch=1,
        verbose=False,
    )
    expected = llm.create_chat_completion(
        [SYSTEM, {"role": "user", "content": text}],
        max_tokens=24,
        temperature=0,
        grammar=llama_cpp.LlamaGrammar.from_string(LETTERS),
        repeat_penalty=1.1,  # llama_cpp.server's default
    )
    llm.close()
    answer = ask(client, text)
    assert answer.choices[0].message.content == expected["choices"][0]["message"]["content"]
    assert answer.choices[0].finish_reason == expected["choices"][0]["finish_reason"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(answer.usage, name) == expected["usage"][name]


def test_a_stream_says_what_a_whole_answer_says(client):
    whole = ask(client, "Tell me a story.")
    chunks = list(
        ask(client, "Tell me a story.", stream=True, stream_options={"include_usage": True})
    )
    *pieces, last = chunks
    assert all(chunk.usage is None for chunk in pieces)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.choices == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name)
    assert all(chunk.usage is None for chunk in ask(client, "Hm.", stream=True))


def test_completions_of_text_and_of_tokens(client, tiny):
    text = client.completions.create(model="tiny", prompt="ab", max_tokens=8, temperature=0)
    tokens = [tiny_models.BOS, *b"ab"]
    assert text.usage.prompt_tokens == len(tokens)
    for prompt in (tokens, [tokens], ["ab"]):
        same = client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
        assert same.choices[0].text == text.choices[0].text
    stream = client.completions.create(
        model="tiny", prompt="ab", max_tokens=8, temperature=0, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == text.choices[0].text


def test_usage_tells_what_was_kept_evicted_and_cached(client):
    long = "word " * 120  # 600 tokens and some
    first = ask(client, long).usage
    n_tokens = first.prompt_tokens + first.completion_tokens
    assert first.kv_tokens_kept <= BUDGET
    assert first.kv_tokens_evicted > n_tokens - BUDGET - 2
    # the last token was not evaluated
    assert first.kv_tokens_kept + first.kv_tokens_evicted in (n_tokens - 1, n_tokens)

    answer = client.chat.completions.create(
        model="tiny", messages=[SYSTEM, {"role": "user", "content": "Hi."}], max_tokens=8
    )
    assert answer.usage.kv_tokens_evicted == 0
    said = [
        SYSTEM,
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": answer.choices[0].message.content},
        {"role": "user", "content": "And now?"},
    ]
    second = client.chat.completions.create(model="tiny", messages=said, max_tokens=8).usage
    assert second.prompt_tokens_details.cached_tokens >= answer.usage.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens < second.prompt_tokens


def test_a_chat_goes_on_beyond_the_positions(client):
    stream = ask(client, "x " * N_CTX, stream=True, stream_options={"include_usage": True})
    usage = list(stream)[-1].usage
    assert usage.prompt_tokens > N_CTX  # a token for each byte
    assert usage.kv_tokens_kept <= BUDGET


def test_an_answer_without_max_tokens_ends(client):
    answer = ask(client, "Go on.", max_tokens=None)
    assert answer.usage.completion_tokens <= N_CTX
    newer = ask(client, "Go on.", max_tokens=None, max_completion_tokens=3)
    assert newer.usage.completion_tokens == 3


def test_min_tokens_and_logit_bias_go_together(client):
    # without min_tokens </s> is the first token, without the bias others come
    bias = {str(tiny_models.EOS): 1000, str(ord("b")): 500}
    body = {"min_tokens": 5, "grammar": LETTERS}
    answer = ask(client, "Hi.", logit_bias=bias, extra_body=body)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens == 5
    assert answer.choices[0].message.content == "bbbbb"


# many clients


def test_parallel_clients_take_turns(client):
    texts = ["one", "two", "three", "four"]
    alone = [ask(client, text).choices[0].message.content for text in texts]

    def streamed(text: str) -> str:
        chunks = list(ask(client, text, stream=True))
        assert chunks[-1].choices[0].finish_reason
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(streamed, texts)) == alone
        whole = pool.map(lambda text: ask(client, text).choices[0].message.content, texts)
        assert list(whole) == alone


def test_health_models_and_metrics_do_not_wait(address, client):
    with ask(client, "Go on.", max_tokens=900, stream=True) as stream:
        next(iter(stream))
        began = time.monotonic()
        assert httpx.get(address + "/health").json() == {"status": "ok"}
        assert client.models.list().data
        assert metrics(address)
        assert time.monotonic() - began < 1


def test_a_client_that_leaves_a_stream_ends_the_generation(address, client):
    before = metrics(address)["pyinertia_completion_tokens_total"]
    stream = ask(client, "Go on.", max_tokens=900, stream=True)
    for _, _ in zip(range(5), stream, strict=False):
        pass
    stream.close()
    answer = ask(client, "Hello.", max_tokens=2)
    assert answer.usage.completion_tokens == 2
    generated = metrics(address)["pyinertia_completion_tokens_total"] - before
    assert 5 <= generated < 900


@pytest.mark.parametrize("text", ["Go on.", "word " * 20_000], ids=["decode", "prefill"])
def test_a_client_that_leaves_before_its_answer_ends_the_work(address, client, text):
    before = metrics(address)["pyinertia_completion_tokens_total"]
    raw = http.client.HTTPConnection(address.removeprefix("http://"))
    messages = [{"role": "user", "content": text}]
    body = {"messages": messages, "max_tokens": 900, "grammar": LETTERS}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    raw.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    time.sleep(0.3)
    raw.close()
    began = time.monotonic()
    assert ask(client, "Hello.", max_tokens=2).usage.completion_tokens == 2
    assert time.monotonic() - began < 5  # all of that prompt takes longer
    assert metrics(address)["pyinertia_completion_tokens_total"] - before < 900


# refusals


def refused(status: int, code: str | None, call, *args, **kwargs) -> str:
    with pytest.raises(openai.APIStatusError) as info:
        call(*args, **kwargs)
    assert info.value.status_code == status, info.value
    assert info.value.code == code
    return info.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_a_system_message_beyond_the_budget_is_refused(client, stream):
    system = {"role": "system", "content": "word " * 100}
    messages = [system, {"role": "user", "content": "Hi."}]
    create = client.chat.completions.create
    told = refused(400, None, create, model="tiny", messages=messages, stream=stream)
    assert "system message takes" in told
    assert ask(client, "Hello.").choices


def test_bad_fields_are_refused_and_the_next_request_works(client, address):
    chat, text = client.chat.completions.create, client.completions.create
    hi = [{"role": "user", "content": "Hi."}]
    assert "n:" in refused(400, None, chat, model="tiny", messages=hi, n=2)
    assert "messages" in refused(400, None, chat, model="tiny", messages=[])
    assert "role" in refused(400, None, chat, model="tiny", messages=[{"content": "Hi."}])
    assert "top_p" in refused(400, None, chat, model="tiny", messages=hi, top_p=7)
    assert "request for each" in refused(400, None, text, model="tiny", prompt=["a", "b"])
    assert "from 0 to 257" in refused(400, None, text, model="tiny", prompt=[5, 999999])
    assert "from 0 to 257" in refused(400, None, text, model="tiny", prompt=[-1])
    bias = {"999999": 1}
    assert "from 0 to 257" in refused(400, None, chat, model="tiny", messages=hi, logit_bias=bias)
    assert "logits_all" in refused(400, None, text, model="tiny", prompt="a", logprobs=1)
    grammar = {"grammar": "root ::= nowhere"}
    refused(400, None, text, model="tiny", prompt="a", extra_body=grammar)
    embed = client.embeddings.create
    assert "embedding=True" in refused(400, None, embed, model="tiny", input="a")
    headers = {"Authorization": f"Bearer {KEY}"}
    for body in (b"{", b"", b"5", b"[]", b"\xff", b'{"prompt": "\\ud800"}'):
        for path in ("/v1/completions", "/v1/chat/completions", "/extras/tokenize"):
            answer = httpx.post(address + path, content=body, headers=headers)
            assert answer.status_code == 400, (path, body, answer.text)
            assert answer.json()["error"]["message"]
    assert ask(client, "Hello.").choices


def test_tokens_go_there_and_back(address, client):
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=address, headers=headers) as http:
        tokens = http.post("/extras/tokenize", json={"input": "Hello"}).json()["tokens"]
        assert len(tokens) == 5 + 1
        count = http.post("/extras/tokenize/count", json={"input": "Hello"}).json()["count"]
        assert count == len(tokens)
        back = http.post("/extras/detokenize", json={"tokens": tokens}).json()["text"]
        assert back == "Hello"
        beyond = http.post("/extras/detokenize", json={"tokens": [999999]})
        assert beyond.status_code == 400
        assert http.get("/health").status_code == 200
        assert http.get("/nothing").status_code == 404


def test_the_key_is_asked_for_except_for_the_health(address):
    stranger = client_of(address, "guess")
    assert "key" in refused(401, "invalid_api_key", ask, stranger, "Hi.")
    refused(401, "invalid_api_key", stranger.models.list)
    assert httpx.get(address + "/metrics").status_code == 401
    assert httpx.get(address + "/health").status_code == 200


def test_metrics_count(address, client):
    before = metrics(address)
    answer = ask(client, "count " * 100)
    after = metrics(address)

    def gained(name: str) -> float:
        return after[f"pyinertia_{name}"] - before.get(f"pyinertia_{name}", 0)

    usage = answer.usage
    assert gained("prompt_tokens_total") == usage.prompt_tokens
    assert gained("prompt_cached_tokens_total") == usage.prompt_tokens_details.cached_tokens
    assert gained("completion_tokens_total") == usage.completion_tokens
    assert gained("kv_evicted_tokens_total") == usage.kv_tokens_evicted > 0
    assert after["pyinertia_kv_cells_used"] == usage.kv_tokens_kept
    assert after["pyinertia_kv_cells"] >= BUDGET
    assert gained("prompt_seconds_total") > 0
    assert gained("decode_seconds_total") > 0
    ok = 'requests_total{path="/v1/chat/completions",status="200"}'
    assert gained(ok) == 1
    assert gained('request_seconds_count{path="/v1/chat/completions"}') == 1


# other servers


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
