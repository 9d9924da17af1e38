"""What is asked of a cache that was cut gets the answer that the same cells give upstream.

Logits, log probabilities, grammars, penalties, logits processors and stopping criteria, beside
`llama_cpp.Llama` with the same positions removed, bit for bit.
"""

from __future__ import annotations

import json
from itertools import islice

import llama_cpp
import numpy as np
import pytest
import tiny_models
from llama_cpp.llama_grammar import LlamaGrammar
from replay import Recording, replay

from pyinertia import KVPolicy

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
CONTEXT = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "logits_all": True}
PROMPT = np.random.default_rng(4).integers(0, 256, 120).tolist()
SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "n": {"type": "boolean"}},
    "required": ["answer", "n"],
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture
def llm(tiny):
    return Recording(tiny, verbose=False, kv_policy=POLICY, **CONTEXT)


def upstream(path, llm: Recording, seed: int = 0, **settings) -> list[int]:
    """The tokens that upstream's sampler draws from the same cells."""
    sampled, sampler = [], None
    for same in replay(path, llm.steps, **CONTEXT):
        if sampler is None:
            same.set_seed(seed)
            same._sampler = sampler = same._init_sampler(**settings)
        sampled.append(same.sample())
    return sampled


def log_softmax(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    top = rows.max(-1, keepdims=True)
    return rows - top - np.log(np.exp(rows - top).sum(-1, keepdims=True))


def test_logits_and_log_probabilities(tiny, llm):
    grammar = LlamaGrammar.from_string("root ::= [a-z]{40}", verbose=False)
    settings = {"temperature": 0.0, "grammar": grammar, "logprobs": 3}
    choice = llm.create_completion(PROMPT, max_tokens=40, **settings)["choices"][0]
    assert llm.kv_stats().n_evicted == len(PROMPT) + 39 - BUDGET
    *_, same = replay(tiny, llm.steps, **CONTEXT)  # closed, but its arrays are still there
    assert np.array_equal(llm._scores, same.scores[: llm.n_tokens])
    rows = log_softmax(same.scores[len(PROMPT) - 1 : llm.n_tokens])
    given = choice["logprobs"]
    expected = rows[np.arange(40), list(choice["text"].encode())]
    assert np.allclose(given["token_logprobs"], expected, atol=1e-4)
    for row, own, top in zip(rows, expected, given["top_logprobs"], strict=True):
        # tokens that are no text of their own share a key
        best = [*np.sort(row)[-3:], own]
        assert all(np.isclose(value, best, atol=1e-4).any() for value in top.values())


SETTINGS = {
    "greedy": {"temp": 0.0},
    "seeded": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "penalties": {"temp": 0.0, "repeat_penalty": 1.5, "presence_penalty": 1.0},
    "mirostat": {"temp": 1.0, "mirostat_mode": 2},
    "grammar": {"temp": 0.0, "grammar": 'root ::= ("ab" | [k-p]{3} | "xyz")+'},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_samplers(tiny, llm, name):
    settings = dict(SETTINGS[name])
    if grammar := settings.pop("grammar", None):
        settings["grammar"] = LlamaGrammar.from_string(grammar, verbose=False)
    llm.set_seed(7)
    given = list(islice(llm.generate(PROMPT, **settings), 60))
    assert llm.kv_stats().n_evicted > 0
    assert upstream(tiny, llm, seed=7, **settings) == given
    if name != "greedy":
        assert len(set(given)) > 3


def test_a_json_schema(tiny, llm):
    messages = [{"role": "user", "content": "Answer in JSON. " * 10}]
    form = {"type": "json_object", "schema": SCHEMA}
    answer = llm.create_chat_completion(messages, response_format=form, temperature=0.0)
    text = answer["choices"][0]["message"]["content"]
    said = json.loads(text)
    assert said["answer"] in ("yes", "no")
    assert isinstance(said["n"], bool)
    assert llm.kv_stats().n_evicted > 100
    grammar = LlamaGrammar.from_json_schema(json.dumps(SCHEMA), verbose=False)
    given = upstream(tiny, llm, temp=0.0, grammar=grammar)
    assert bytes(given[: len(text)]).decode() == text


def test_a_logits_processor_sees_the_tokens_and_decides(tiny, llm):
    seen = []

    def parity(input_ids, scores):
        seen.append(len(input_ids))
        return np.where(np.arange(scores.size) % 2 == len(input_ids) % 2, scores, -np.inf)

    processors = llama_cpp.LogitsProcessorList([parity])
    settings = {"temp": 0.0, "logits_processor": processors}
    given = list(islice(llm.generate(PROMPT, **settings), 50))
    assert seen == list(range(120, 170)), "evicted tokens are told, too"
    assert [token % 2 for token in given] == [n % 2 for n in seen]
    assert upstream(tiny, llm, **settings) == given


def test_a_stopping_criterion_sees_all_tokens(tiny, llm):
    asked = []

    def is_enough(input_ids, logits):
        asked.append(input_ids.tolist())
        return len(input_ids) == len(PROMPT) + 30

    stops = llama_cpp.StoppingCriteriaList([is_enough])
    grammar = LlamaGrammar.from_string("root ::= [a-z]{99}", verbose=False)
    settings = {"temperature": 0.0, "grammar": grammar, "stopping_criteria": stops}
    answer = llm.create_completion(PROMPT, max_tokens=99, **settings)
    assert answer["choices"][0]["finish_reason"] == "stop"
    given = upstream(tiny, llm, temp=0.0, grammar=grammar)[:30]
    assert asked[:31] == [PROMPT + given[:n] for n in range(31)]
    assert answer["usage"]["completion_tokens"] == 30
