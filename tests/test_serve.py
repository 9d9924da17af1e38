"""What the server answers, asked by OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
import tiny_models
from serving import (
    BUDGET,
    KEY,
    LETTERS,
    N_CTX,
    SYSTEM,
    THREAD,
    ask,
    client_of,
    metrics,
    refused,
    served,
)

from pyinertia import Llama
from pyinertia.binding import llama_cpp


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
