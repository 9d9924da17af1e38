"""`Llama` behaves as its parent does, and tells the engine the truth about prompts and prefixes."""

from __future__ import annotations

import pickle
import sys
import types
from functools import partial
from itertools import islice
from pathlib import Path

import llama_cpp
import numpy as np
import pages
import pytest
import tiny_models
from helpers import HolesLlama, logits, positions
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from pyinertia import POLICIES, KVPolicy, Llama, ModelError, PolicyError

BUDGET = 40
POLICY = KVPolicy(n_budget=BUDGET, n_sink=2, n_recent=8, n_window=4, n_pool=1)
TOKENS = np.random.default_rng(1).integers(0, 256, 400).tolist()

DEFAULTS = {"n_ctx": 512, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def load(path, cls=Llama, **kwargs):
    return cls(str(path), **(DEFAULTS | kwargs))


def take(llm, tokens, n, **kwargs) -> list[int]:
    return list(islice(llm.generate(tokens, temp=0.0, **kwargs), n))


# what is prompt, what is a decode step


def test_a_prompt_whose_last_batch_is_one_token_is_all_prompt(tiny):
    llm = load(tiny, kv_policy=POLICY)
    llm.eval(TOKENS[:129])  # batches of 64, 64 and 1
    assert len(positions(llm)) == 129
    llm.eval(TOKENS[129:130])
    assert len(positions(llm)) == 130, "the first decode step still sees every cell"
    assert llm.kv_stats().n_evicted == 0
    llm.eval(TOKENS[130:131])
    assert len(positions(llm)) == BUDGET
    assert llm.kv_stats().n_evicted == 131 - BUDGET
    assert {0, 1} | set(range(123, 131)) <= set(positions(llm))


def test_drafted_tokens_are_decode_steps(tiny):
    draft = LlamaPromptLookupDecoding(num_pred_tokens=5)
    llm = load(tiny, kv_policy=POLICY, draft_model=draft, logits_all=True)
    counts = []
    for _ in islice(llm.generate(TOKENS[:20] * 6, temp=0.0), 80):
        counts.append(len(positions(llm)))
    assert max(counts[20:]) <= BUDGET
    assert min(counts[20:]) >= BUDGET - 12  # room for a step of six, five of them taken back
    assert llm.kv_stats().n_tokens > 120 + 80, "nothing was drafted and rejected"


def test_a_second_prompt_is_prompt_again(tiny):
    llm = load(tiny, kv_policy=POLICY)
    take(llm, TOKENS[:100], 10)
    assert len(positions(llm)) == BUDGET
    history = llm._input_ids.tolist()
    next(llm.generate(history + TOKENS[200:230], temp=0.0))
    assert len(positions(llm)) == BUDGET + 30, "a prompt enters whole"


# which prefix is reused


def test_the_same_prompt_twice_gives_the_same_tokens(tiny):
    llm = load(tiny, kv_policy=POLICY)
    assert take(llm, TOKENS[:120], 20) == take(llm, TOKENS[:120], 20)


def test_a_continuation_of_all_tokens_is_appended(tiny):
    llm = load(tiny, kv_policy=POLICY)
    take(llm, TOKENS[:120], 20)
    before, n_tokens = positions(llm), llm.kv_stats().n_tokens
    next(llm.generate(llm._input_ids.tolist() + TOKENS[300:305], temp=0.0))
    assert llm.kv_stats().n_tokens == n_tokens + 5
    assert set(before) <= set(positions(llm))


def test_a_whole_prefix_is_reused(tiny):
    llm = load(tiny, kv_policy=POLICY, kv_budget=400)
    take(llm, TOKENS[:120], 5)
    n_tokens = llm.kv_stats().n_tokens
    next(llm.generate(TOKENS[:90] + TOKENS[300:310], temp=0.0))
    assert llm.kv_stats().n_tokens == n_tokens + 10
    assert positions(llm) == list(range(100))


def test_holes_made_by_hand_count_too(tiny):
    used, fresh = load(tiny), load(tiny)
    used.eval(TOKENS[:60])
    used.kv_evict([0, 1, 2])
    assert take(used, TOKENS[:50], 5) == take(fresh, TOKENS[:50], 5)
    assert positions(used) == list(range(54))


def test_the_policy_in_python_of_the_docs(tmp_path, monkeypatch):
    blocks = pages.python("docs/how-to/own-policy.md")
    example = next(block for block in blocks if "kv_evict" in block)
    many, three = "islice(llm.generate(prompt), 128)", "islice(llm.generate(prompt), 3)"
    assert many in example
    monkeypatch.chdir(tmp_path)
    tiny_models.write_llama(tmp_path / "model.gguf")
    Path("report.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 1100, "u1").tobytes())
    names = {"Llama": partial(load, n_batch=512)}
    exec(example.replace(many, three).replace("from pyinertia import Llama\n", ""), names)
    kept, n = positions(names["llm"]), len(names["prompt"])
    assert n >= 1100
    assert len(kept) == 512 + 2  # cut at the first token, then two more were evaluated
    assert kept[:4] == [0, 1, 2, 3]
    assert kept[-66:] == list(range(n - 64, n + 2))


def test_a_purged_sliding_window_is_not_reused(tmp_path):
    path = tiny_models.write_gemma3(tmp_path / "gemma3.gguf", n_window=32)
    used, fresh = load(path, swa_full=False), load(path, swa_full=False)
    used.eval(TOKENS)  # the window's own cache has 256 cells, so positions before 144 are gone
    assert positions(used) == list(range(400)), "the cache that is evicted from is whole"
    prompt = TOKENS[:150] + TOKENS[300:310]
    assert take(used, prompt, 5) == take(fresh, prompt, 5)
    assert np.array_equal(logits(used), logits(fresh))


def test_reset_empties_the_cache_at_once(tiny):
    llm = load(tiny, kv_policy=POLICY)
    take(llm, TOKENS[:100], 5)
    llm.reset()
    assert positions(llm) == []


# kv_evict, kv_cells, kv_stats


def test_kv_evict_keeps_exactly_these_and_the_newest(tiny):
    llm = load(tiny)
    llm.eval(TOKENS[:60])
    assert llm.kv_evict(keep=[12, 10, 11, 10]) == 56
    assert positions(llm) == [10, 11, 12, 59]
    assert llm.kv_stats().n_evicted == 56
    llm.eval(TOKENS[60:61])
    assert positions(llm) == [10, 11, 12, 59, 60]
    assert llm.kv_evict([]) == 4
    assert positions(llm) == [60]


def test_kv_evict_is_seq_rm_bit_for_bit_without_compaction(tiny):
    ours, theirs = load(tiny, HolesLlama), load(tiny)
    for llm in (ours, theirs):
        llm.eval(TOKENS[:100])
    ours.kv_evict([p for p in range(100) if p % 3])
    for p in range(0, 99, 3):
        llama_cpp.llama_memory_seq_rm(theirs._ctx.memory, 0, p, p + 1)
    assert positions(ours) == positions(theirs)
    for token in TOKENS[100:120]:
        for llm in (ours, theirs):
            llm.eval([token])
        assert np.array_equal(logits(ours), logits(theirs))


def test_a_policy_can_be_written_in_python(tiny):
    llm = load(tiny)
    for i, _ in enumerate(islice(llm.generate(TOKENS[:50], temp=0.0), 40)):
        if i % 8 == 0:
            resident = positions(llm)
            llm.kv_evict(resident[:4] + resident[-12:])
    assert len(positions(llm)) <= 16 + 8


def test_without_a_policy_everything_is_seen_and_nothing_leaves(tiny):
    llm = load(tiny)
    take(llm, TOKENS[:100], 20)
    stats = llm.kv_stats()
    assert positions(llm) == list(range(119))
    assert (stats.n_used, stats.n_tokens, stats.n_evicted, stats.n_moved) == (119, 119, 0, 0)
    # f16 K and V: 2 layers of 2 heads of 32 values, 512 cells
    assert (stats.n_cells, stats.kv_bytes) == (512, 2 * 2 * 512 * 2 * 32 * 2)


@pytest.mark.parametrize("policy", [None, "full"])
def test_without_a_policy_logits_are_the_parents(tiny, policy):
    ours, parent = load(tiny, kv_policy=policy), load(tiny, llama_cpp.Llama)
    for llm in (ours, parent):
        llm.eval(TOKENS[:100])
    for token in TOKENS[100:110]:
        assert np.array_equal(logits(ours), logits(parent))
        for llm in (ours, parent):
            llm.eval([token])


def test_a_share_of_the_prompt_is_a_budget(tiny):
    llm = load(tiny, kv_policy=POLICY, kv_budget=0.5)
    take(llm, TOKENS[:200], 5)
    assert abs(len(positions(llm)) - 100) <= 1
    assert llm.kv_stats().n_evicted > 0


def test_protected_positions_stay(tiny):
    policy = KVPolicy(scorer="recency", n_budget=60, n_sink=2, n_recent=8, protect=((20, 40),))
    llm = load(tiny, kv_policy=policy)
    take(llm, TOKENS[:150], 30)
    assert {0, 1, *range(20, 40)} <= set(positions(llm))
    assert len(positions(llm)) == 60
    # the oldest leave first, so what is left is a run that ends at the newest
    assert positions(llm)[22:] == list(range(179 - 38, 179))


# state, pickling, construction


def test_a_state_with_holes_survives_the_round_trip(tiny):
    saved, restored = load(tiny, kv_policy=POLICY), load(tiny, kv_policy=POLICY)
    take(saved, TOKENS[:120], 20)
    restored.load_state(saved.save_state())
    assert positions(restored) == positions(saved)
    history = saved._input_ids.tolist()
    for llm in (saved, restored):
        next(llm.generate([*history, 7], temp=0.0))
    # packing the cells changes the order of sums, nothing else
    assert np.allclose(logits(restored), logits(saved), atol=1e-3)
    fresh = load(tiny, kv_policy=POLICY)
    prompt = TOKENS[:100] + TOKENS[300:330]
    assert take(restored, prompt, 12) == take(fresh, prompt, 12)


def test_a_restored_prompt_whose_last_but_one_is_gone_is_evaluated_again(tiny):
    saved, restored = load(tiny), load(tiny)
    saved.eval(TOKENS[:60])
    saved.kv_evict([0, 1])
    restored.load_state(saved.save_state())
    assert positions(restored) == [0, 1, 59]
    # logits are not part of a state: the last token is due again, and does not follow position 1
    assert take(restored, TOKENS[:60], 5) == take(load(tiny), TOKENS[:60], 5)


def test_a_pickle_carries_the_policy(tiny):
    llm = load(tiny, kv_policy="h2o", kv_budget=64, kv_refresh=2)
    copy = pickle.loads(pickle.dumps(llm))
    assert copy.kv_policy == llm.kv_policy
    assert copy.kv_policy.n_budget == 64
    assert take(copy, TOKENS[:100], 20) == take(llm, TOKENS[:100], 20)
    assert copy.kv_stats().n_evicted == llm.kv_stats().n_evicted > 0


def test_from_pretrained_makes_ours(tiny, monkeypatch):
    # the hub itself is out of reach for a test; the folder stands in for it
    hub = types.ModuleType("huggingface_hub")
    hub.HfFileSystem = lambda: types.SimpleNamespace(
        ls=lambda repo, recursive: [f"{repo}/{tiny.name}"]
    )
    hub.hf_hub_download = lambda **kwargs: str(tiny)
    utils = types.ModuleType("huggingface_hub.utils")
    utils.validate_repo_id = lambda repo: None
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.utils", utils)
    llm = Llama.from_pretrained("us/tiny", "*.gguf", verbose=False, kv_policy="tova", kv_budget=64)
    assert isinstance(llm, Llama)
    assert llm.kv_policy.n_budget == 64


def test_a_path_object_is_a_path(tiny):
    assert Llama(tiny, verbose=False).model_path == str(tiny)


def test_generation_runs_to_an_unpadded_n_ctx(tiny):
    llm = load(tiny, n_ctx=300, logits_all=True, n_batch=300)
    result = llm.create_completion(TOKENS[:280], max_tokens=None, logit_bias={ord("A"): 1000})
    assert result["usage"]["total_tokens"] == 300


def test_a_sliding_window_is_bounded_under_a_policy(tiny):
    assert load(tiny).context_params.swa_full
    assert not load(tiny, kv_policy=POLICY).context_params.swa_full
    assert load(tiny, kv_policy=POLICY, swa_full=True).context_params.swa_full


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "full"])
def test_every_policy_evicts_down_to_its_budget(tiny, policy):
    llm = load(tiny, kv_policy=policy, kv_budget=64)
    counts = []
    for _ in islice(llm.generate(TOKENS[:200], temp=0.0), 40):
        counts.append(len(positions(llm)))
    assert max(counts[2:]) <= 64 <= max(counts[2:]) + llm.kv_policy.n_refresh
    assert llm.kv_stats().n_evicted >= 200 - 64


# the rest of the API, on a real model


@pytest.fixture(scope="module")
def real(smollm2):
    return load(smollm2, kv_policy="inertiakv", kv_budget=96, n_threads=2, n_threads_batch=2)


MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant."},
    {"role": "user", "content": "The sky is blue and the sea is deep. " * 8 + "Say something."},
]


def test_chat_streams_what_it_returns(real):
    whole = real.create_chat_completion(MESSAGES, max_tokens=16, temperature=0.0)
    assert real.kv_stats().n_evicted > 0
    parts = real.create_chat_completion(MESSAGES, max_tokens=16, temperature=0.0, stream=True)
    text = "".join(part["choices"][0]["delta"].get("content", "") for part in parts)
    assert text == whole["choices"][0]["message"]["content"] != ""


def test_a_grammar_binds(real):
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "7" [0-9]+', verbose=False)
    result = real.create_completion("count " * 100, max_tokens=12, grammar=grammar)
    text = result["choices"][0]["text"]
    assert text.isdigit()
    assert text.startswith("7")
    assert real.kv_stats().n_evicted > 0


def test_a_logits_processor_decides(real):
    wanted = real.tokenize(b" blue", add_bos=False)[0]

    def only(input_ids, scores):
        result = np.full_like(scores, -np.inf)
        result[wanted] = 0
        return result

    processors = llama_cpp.LogitsProcessorList([only])
    prompt = real.tokenize(b"red green " * 60)
    assert take(real, prompt, 8, logits_processor=processors) == [wanted] * 8


# the edges


def test_models_without_cells_work_without_a_policy(tmp_path):
    bert = load(tiny_models.write_bert(tmp_path / "bert.gguf"), embedding=True)
    vector = bert.create_embedding("some text")["data"][0]["embedding"]
    assert np.isfinite(vector).all()
    mamba = load(tiny_models.write_mamba(tmp_path / "mamba.gguf"))
    assert len(take(mamba, TOKENS[:20], 5)) == 5
    for llm in (bert, mamba):
        for call in (llm.kv_cells, llm.kv_stats, lambda llm=llm: llm.kv_evict([])):
            with pytest.raises(PolicyError, match="no eviction engine"):
                call()


# what goes wrong


def test_a_closed_llama_says_so(tiny):
    llm = load(tiny, kv_policy=POLICY)
    llm.eval(TOKENS[:20])
    state, stream = llm.save_state(), llm.generate(TOKENS[:30])
    next(stream)
    llm.close()
    llm.close()
    llm.reset()
    for call in (
        lambda: llm.eval([1]),
        lambda: next(llm.generate([1])),
        lambda: next(stream),
        llm.save_state,
        lambda: llm.load_state(state),
        llm.kv_cells,
    ):
        with pytest.raises(ValueError, match="closed"):
            call()


@pytest.mark.parametrize("policy", [None, POLICY])
def test_a_wrong_adapter_is_refused(tiny, policy):
    with pytest.raises(ModelError, match="lora_path"):
        load(tiny, kv_policy=policy, lora_path=str(tiny))


def test_a_state_of_another_context_size(tiny):
    small, large = load(tiny, n_ctx=256), load(tiny, n_ctx=1024, kv_policy=POLICY)
    small.eval(TOKENS[:200])
    large.load_state(small.save_state())
    assert positions(large) == list(range(200))
    large.reset()
    large.eval(TOKENS * 2)  # 800 tokens: the context is as large as before
    with pytest.raises(ValueError, match="800 tokens exceed the context window of 256"):
        small.load_state(large.save_state())
    small.eval(TOKENS[200:210])
    assert positions(small) == list(range(210))


def test_a_share_stays_a_share_over_turns(tiny):
    llm = load(tiny, n_ctx=1024, kv_policy=POLICY, kv_budget=0.25)
    prompt = TOKENS[:300]
    for _ in range(3):
        take(llm, prompt, 12)
        assert abs(len(positions(llm)) - len(prompt) // 4) <= 1
        prompt = llm._input_ids.tolist() + TOKENS[300:340]


def test_a_budget_that_is_never_reached_is_said(tiny):
    with pytest.warns(UserWarning, match="a KV budget of 512 cells is never reached in n_ctx=512"):
        load(tiny, kv_policy="inertiakv", kv_budget=512)


@pytest.mark.parametrize("seq_id", [1, -1, 2**32, "0", None, 0.5])
def test_cells_of_no_sequence(tiny, seq_id):
    with pytest.raises(ValueError, match="no such sequence"):
        load(tiny).kv_cells(seq_id)


def test_a_long_token_has_a_text(tmp_path):
    """llama-cpp-python gives tokens of more than 32 bytes none."""
    end = f"<{'-' * 60}>"
    path = tiny_models.write_llama(tmp_path / "tiny.gguf", eos=end)
    llm = Llama(path, n_threads=1, verbose=False)
    plain = [llm.tokenize(text, add_bos=False)[0] for text in (b"a", b"b")]
    assert (
        llm.detokenize([plain[0], tiny_models.EOS, plain[1]], special=True).decode() == f"a{end}b"
    )
    assert llm.detokenize([plain[0], tiny_models.EOS, plain[1]]) == b"ab"
    for token in (-1, llm.n_vocab()):
        with pytest.raises(ValueError, match=f"from 0 to {llm.n_vocab() - 1}"):
            llm.detokenize([token])


def test_a_grammar_that_cannot_be_read(tiny):
    llm = Llama(tiny, n_threads=1, verbose=False)
    with pytest.raises(ValueError, match="cannot be parsed"):
        llm("a", grammar=llama_cpp.LlamaGrammar.from_string("root ::= nowhere"), max_tokens=1)
    assert llm("a", max_tokens=1)["choices"]
