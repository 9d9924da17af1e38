"""LoRA adapters beside a policy: cells hold what the adapted model computes."""

from __future__ import annotations

import shutil
from itertools import islice

import llama_cpp
import numpy as np
import pytest
import tiny_models
from gguf import GGUFReader
from helpers import logits
from replay import Recording, replay

from pyinertia import KVPolicy, Llama, ModelError
from pyinertia.batch import generate_many

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
CONTEXT = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1}
TOKENS = np.random.default_rng(2).integers(0, 256, 200).tolist()
SCALE = 0.5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    return tiny_models.write_lora(tmp_path_factory.mktemp("lora") / "adapter.gguf")


@pytest.fixture(scope="module")
def merged(tiny, lora, tmp_path_factory):
    """The same model with the adapter in its weights: W + scale alpha/rank B A."""
    path = shutil.copy(tiny, tmp_path_factory.mktemp("merged") / "llama.gguf")
    parts = {tensor.name: tensor.data for tensor in GGUFReader(lora).tensors}
    factor = SCALE * tiny_models.LORA_ALPHA / tiny_models.LORA_RANK
    for tensor in GGUFReader(path, "r+").tensors:
        if f"{tensor.name}.lora_a" in parts:
            a, b = (parts[f"{tensor.name}.lora_{part}"] for part in "ab")
            tensor.data[...] += np.float32(factor) * (b @ a)
    return path


def load(path, cls=Llama, **kwargs):
    return cls(path, verbose=False, **(CONTEXT | kwargs))


def play(llm: Llama) -> np.ndarray:
    """Logits after a prompt and 60 decode steps, [61, n_vocab]."""
    llm.eval(TOKENS[:120])
    out = [logits(llm)]
    for token in TOKENS[120:180]:
        llm.eval([token])
        out.append(logits(llm))
    return np.array(out)


def test_after_a_cut_logits_are_those_of_the_same_cells_and_adapter(tiny, lora):
    adapter = {"lora_path": str(lora), "lora_scale": SCALE}
    llm = load(tiny, cls=Recording, kv_policy=POLICY, **adapter)
    given = play(llm)
    assert llm.kv_stats().n_used == BUDGET
    same = [logits(plain) for plain in replay(tiny, llm.steps, **CONTEXT, **adapter)]
    assert np.array_equal(given, same)
    without = [logits(plain) for plain in replay(tiny, llm.steps, **CONTEXT)]
    assert np.abs(given - without).max(axis=1).min() > 0.5


def test_an_adapter_is_its_product_added_to_the_weights(tiny, lora, merged):
    """Its attention ranks the cells, too: the same ones stay."""
    adapted = load(tiny, kv_policy=POLICY, lora_path=lora, lora_scale=SCALE)
    single, plain = load(merged, kv_policy=POLICY), load(tiny, kv_policy=POLICY)
    given, expected, _ = (play(llm) for llm in (adapted, single, plain))
    assert np.allclose(given, expected, atol=1e-3)
    cells, same, others = (llm.kv_cells() for llm in (adapted, single, plain))
    assert np.array_equal(cells["pos"], same["pos"])
    assert np.allclose(cells["score"], same["score"], atol=1e-5)
    assert not np.array_equal(cells["pos"], others["pos"])


def test_without_a_policy_it_is_llama_cpp_pythons(tiny, lora):
    adapter = {"lora_path": str(lora), "lora_scale": SCALE}
    ours, parent = load(tiny, **adapter), load(str(tiny), cls=llama_cpp.Llama, **adapter)
    assert np.array_equal(play(ours), play(parent))


def test_many_documents_share_an_adapter(tiny, lora):
    grammar = llama_cpp.LlamaGrammar.from_string("root ::= [a-z]{20}", verbose=False)
    settings = {"max_tokens": 20, "temperature": 0.0, "grammar": grammar}
    adapter = {"lora_path": str(lora), "n_ctx": 512, "n_threads": 1}
    texts = ["one two three", "four five six"]
    results = generate_many(texts, model=tiny, n_parallel=2, **settings, **adapter)
    together = {result.index: result.text for result in results}
    alone = Llama(tiny, verbose=False, **adapter)
    plain = Llama(tiny, verbose=False, n_ctx=512, n_threads=1)
    for i, text in enumerate(texts):
        assert together[i] == alone(text, **settings)["choices"][0]["text"]
        assert together[i] != plain(text, **settings)["choices"][0]["text"]


def test_a_state_of_another_adapter_is_refused(tiny, lora, tmp_path):
    """Files of one name and shape are told apart by what is in them."""
    other = tiny_models.write_lora(tmp_path / lora.name, seed=1)
    saved = load(tiny, kv_policy=POLICY, lora_path=str(lora))
    play(saved)
    state = saved.save_state()
    for adapter in ({}, {"lora_path": str(other)}, {"lora_path": str(lora), "lora_scale": 2.0}):
        with pytest.raises(ValueError, match=r"of another model.*adapter\.gguf"):
            load(tiny, kv_policy=POLICY, **adapter).load_state(state)
    again = load(tiny, kv_policy=POLICY, lora_path=str(lora))
    again.load_state(state)
    next_tokens = [
        list(islice(llm.generate([*saved._input_ids.tolist(), 65], temp=0.0), 10))
        for llm in (again, saved)
    ]
    assert next_tokens[0] == next_tokens[1]


def test_a_missing_adapter(tiny):
    with pytest.raises(ModelError, match=r"lora_path='absent\.gguf' does not exist"):
        load(tiny, lora_path="absent.gguf")
