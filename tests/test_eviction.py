"""Eviction equals removing the same positions from an unpatched build; compaction moves bytes."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import cache_state
import llama_cpp
import numpy as np
import pytest
import stock
import tiny_models
from helpers import HolesLlama, kl, logits, play, positions, tokens

from pyinertia import POLICIES, KVPolicy, Llama

F16, BF16, F32, Q8_0, Q5_1, Q4_0 = 1, 30, 0, 8, 7, 2
N_PROMPT, N_DECODE, BUDGET = 700, 64, 256


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def evict(cls, path, policy, n_prompt=N_PROMPT, **context):
    """Teacher-forced run: logits [1 + N_DECODE, n_vocab], and the steps for a stock build."""
    context = {"n_threads": 2, "n_threads_batch": 2, **context}
    llm = cls(path, verbose=False, kv_policy=policy, **context)
    ids = tokens(llm, n_prompt + N_DECODE)
    llm.eval(ids[:n_prompt])
    out, steps, before = [logits(llm)], [["eval", ids[:n_prompt]]], set(positions(llm))
    for token in ids[n_prompt:]:
        llm.eval([token])
        out.append(logits(llm))
        now = set(positions(llm))
        steps += [["rm", sorted(before - now)], ["eval", [token]]]
        before = now
    stats = llm.kv_stats()
    assert stats.n_used == policy.n_budget
    assert stats.n_evicted == n_prompt + N_DECODE - policy.n_budget
    assert stats.n_evictions == N_DECODE - 1
    return np.array(out), steps, stats


def assert_close(expected: np.ndarray, given: np.ndarray) -> None:
    """Summation order alone moves logits of a quantised model by 0.5 to 1, so not bit for bit."""
    pairs = list(zip(expected, given, strict=True))
    assert np.mean([kl(p, q) for p, q in pairs]) < 0.02
    differ = [p for p, q in pairs if p.argmax() != q.argmax()]
    assert len(differ) <= 0.05 * len(pairs)
    assert all(np.diff(np.sort(p)[-2:])[0] < 1.5 for p in differ)


CONTEXTS = {
    "no-fa-f16": {"flash_attn": False},
    "fa-f16": {"flash_attn": True},
    "no-fa-q8_0": {"flash_attn": False, "type_k": Q8_0},
    "fa-q8_0": {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0},
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_eviction_equals_removal_from_a_stock_cache(smollm2, stock_lib_dir, context):
    policy = KVPolicy(n_budget=BUDGET)
    holes, steps, stats = evict(HolesLlama, smollm2, policy, n_ctx=1024, **context)
    assert stats.n_moved == 0
    job = {"n_ctx": 1024, "n_threads": 2, **context}
    expected = stock.run(stock_lib_dir, model=smollm2, context=job, steps=steps)["logits"]
    assert np.array_equal(holes, expected)

    compacted, steps, stats = evict(Llama, smollm2, policy, n_ctx=1024, **context)
    assert 0 < stats.n_moved <= BUDGET
    expected = stock.run(stock_lib_dir, model=smollm2, context=job, steps=steps)["logits"]
    assert_close(expected, compacted)


@pytest.mark.parametrize("context", ["no-fa-f16", "fa-q8_0"])  # V by channel, and by cell
@pytest.mark.parametrize("name", [n for n, p in POLICIES.items() if p.evicts and p.n_refresh == 1])
def test_every_policy_is_removal(tiny, stock_lib_dir, name, context):
    policy = replace(POLICIES[name], n_budget=BUDGET)
    job = {"n_ctx": 1024, "n_threads": 1, **CONTEXTS[context]}
    holes, steps, _ = evict(HolesLlama, tiny, policy, **job)
    expected = stock.run(stock_lib_dir, model=tiny, context=job, steps=steps)["logits"]
    assert np.array_equal(holes, expected)


def test_eviction_equals_removal_in_a_sliding_window_model(gemma3, stock_lib_dir):
    """Stock removes from both caches, we from the base: the same where the window is recent.

    The other cache fills in another order then, so this compares as compaction does.
    """
    policy = KVPolicy(n_budget=768, n_recent=600, n_sink=4)  # the window is 512
    compacted, steps, stats = evict(Llama, gemma3, policy, n_prompt=1200, n_ctx=1536)
    assert stats.n_moved > 0
    job = {"n_ctx": 1536, "n_threads": 2}
    expected = stock.run(stock_lib_dir, model=gemma3, context=job, steps=steps)["logits"]
    assert_close(expected, compacted)


def rows(llm: Llama) -> dict[int, tuple[bytes, ...]]:
    """K and V of every position in every layer."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    buffer = (ctypes.c_uint8 * size)()
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, buffer, size, 0) == size
    out, n_read = cache_state.parse(bytes(buffer))
    assert n_read == size
    return out


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize(
    "context",
    [
        {"flash_attn": False, "type_k": F16, "type_v": F16},  # V is transposed
        {"flash_attn": False, "type_k": Q8_0, "type_v": BF16},
        {"flash_attn": True, "type_k": F16, "type_v": F16},
        {"flash_attn": True, "type_k": F32, "type_v": F32},
        {"flash_attn": True, "type_k": Q8_0, "type_v": Q5_1},
        {"flash_attn": True, "type_k": Q4_0, "type_v": Q4_0},
    ],
    ids=lambda c: "-".join(str(int(v)) for v in c.values()) if isinstance(c, dict) else None,
)
def test_compaction_changes_no_byte(smollm2, context, n_threads):
    llm = Llama(smollm2, n_ctx=1024, n_threads=n_threads, verbose=False, **context)
    ids = tokens(llm, 601)
    llm.eval(ids[:600])
    kept = np.random.default_rng(0).permutation(600)[:200]
    llm.kv_evict(kept)
    before = rows(llm)
    assert set(before) == {*kept.tolist(), 599}

    llm.eval(ids[600:])  # compaction happens when a batch enters
    n_above = sum(pos >= len(before) for pos in before)
    assert llm.kv_stats().n_moved == n_above > 0
    after = rows(llm)
    assert {pos: after[pos] for pos in before} == before


def test_scores_follow_their_cells_through_moves(smollm2):
    """The same run with and without compaction keeps the same cells and their first ranking."""
    runs = []
    for cls in (HolesLlama, Llama):
        policy = KVPolicy(n_budget=BUDGET, frozen=True)  # the first ranking stays
        llm = cls(smollm2, n_ctx=1024, n_threads=2, verbose=False, kv_policy=policy)
        play(llm, N_PROMPT, 3)
        runs.append((llm.kv_cells(), llm.kv_stats().n_moved))
    (holes, unmoved), (compacted, moved) = runs
    assert unmoved == 0 < moved
    assert len(np.unique(holes["score"])) > 200
    assert np.array_equal(holes, compacted)


def test_new_tokens_are_not_the_first_to_leave(smollm2):
    """The kept set does not freeze at the prompt: of 200 new tokens many stay beyond n_recent."""
    for policy in ("inertiakv", "inertiakv-lazy", "coupled", "score-free", "h2o", "tova"):
        llm = Llama(
            smollm2,
            n_ctx=1024,
            n_threads=2,
            verbose=False,
            flash_attn=True,
            kv_policy=policy,
            kv_budget=BUDGET,
        )
        play(llm, N_PROMPT, 200)
        pos = np.array(positions(llm))
        new = (pos >= N_PROMPT) & (pos < N_PROMPT + 200 - 32)
        assert new.sum() > 40, policy  # of 168; random keeps its share of the budget, 47


@pytest.mark.parametrize("type_kv", [F16, BF16, F32, Q8_0, Q5_1, Q4_0])
def test_every_cache_type_is_scored(smollm2, type_kv):
    """The kept set of any type is close to that of f32."""
    kept = {}
    for kind in (F32, type_kv):
        llm = Llama(
            smollm2,
            n_ctx=1024,
            n_threads=2,
            verbose=False,
            flash_attn=True,
            type_k=kind,
            type_v=kind,
            kv_policy="score-free",
            kv_budget=BUDGET,
        )
        play(llm, N_PROMPT, 2)
        kept[kind] = set(positions(llm))
    common = len(kept[F32] & kept[type_kv]) / BUDGET
    assert common > (0.8 if type_kv == Q4_0 else 0.9)


def test_quantised_v_without_flash_attention_is_upstreams_error(smollm2):
    with pytest.raises(ValueError, match="llama_context"):
        Llama(smollm2, verbose=False, kv_policy="inertiakv", type_v=Q8_0, flash_attn=False)
