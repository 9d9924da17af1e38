"""A bounded prefill: a prompt longer than its cache, cut while it enters."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import stock
import tiny_models
from helpers import HolesLlama, logits, positions, tokens

from pyinertia import KVPolicy, Llama, PolicyError, _native
from pyinertia.policy import KEY_SCORERS, QUERY_SCORERS, SCORERS

N_BATCH, BUDGET, N_CELLS = 256, 256, 512
POLICY = KVPolicy(n_budget=BUDGET, prefill="bounded")
TINY = KVPolicy(n_budget=64, n_sink=2, n_recent=8, n_window=8, n_pool=3, prefill="bounded")
TOKENS = np.random.default_rng(7).integers(0, 256, 6000).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def small(path, **kwargs) -> Llama:
    kwargs = {"n_ctx": 8192, "n_batch": 64, "n_threads": 1, "kv_policy": TINY, **kwargs}
    return Llama(path, verbose=False, **kwargs)


@pytest.mark.parametrize("flash_attn", [False, True])
def test_it_equals_removal_from_a_stock_cache_of_that_size(smollm2, stock_lib_dir, flash_attn):
    llm = HolesLlama(
        smollm2, n_ctx=2048, n_batch=N_BATCH, n_threads=2, verbose=False, flash_attn=flash_attn,
        kv_policy=POLICY,
    )  # fmt: skip
    ids = tokens(llm, 1310)
    parts = [ids[i : i + N_BATCH] for i in range(0, 1300, N_BATCH)]
    parts[-1] = parts[-1][: 1300 % N_BATCH]
    parts += [[token] for token in ids[1300:]]
    out, steps, before = [], [], set()
    for part in parts:
        llm.eval(part)
        out.append(logits(llm))
        now = set(positions(llm))
        steps += [["rm", sorted(before - now)], ["eval", part]]
        before = now
    assert llm.kv_stats().n_cells == N_CELLS
    assert sum(len(values) > 0 for step, values in steps if step == "rm") > 6
    context = {"n_ctx": N_CELLS, "n_batch": N_BATCH, "n_threads": 2, "flash_attn": flash_attn}
    expected = stock.run(stock_lib_dir, model=smollm2, context=context, steps=steps)["logits"]
    assert np.array_equal(np.array(out), expected)


def test_a_cut_within_the_prompt_is_ranked_by_the_queries_so_far(smollm2, stock_lib_dir):
    """max over the last n_window queries of both batches, each averaged over n_pool."""
    policy = replace(POLICY, lambda_=0.9)
    llm = Llama(
        smollm2, n_ctx=1024, n_batch=N_BATCH, n_threads=2, verbose=False, kv_policy=policy
    )  # fmt: skip
    n_new = 188
    ids = tokens(llm, N_CELLS + n_new)
    llm.eval(ids)
    gone = set(range(len(ids))) - set(positions(llm))
    assert len(gone) == n_new

    steps = [["eval", ids[:N_BATCH]], ["eval", ids[N_BATCH:N_CELLS]]]
    context = {"n_ctx": N_CELLS, "n_batch": N_BATCH}
    run = {"model": smollm2, "context": context, "steps": steps, "n_capture": policy.n_window}
    mass = stock.run(stock_lib_dir, **run)["attention"].mean(axis=2, dtype=np.float64)
    weights = 0.9 ** np.arange(mass.shape[1] - 1, -1, -1.0)
    rows = np.einsum("l,tlc->tc", weights / weights.sum(), mass)
    score, side = np.zeros(N_CELLS), policy.n_pool // 2
    for i, n in enumerate((N_BATCH, N_CELLS)):
        row = rows[i * policy.n_window : (i + 1) * policy.n_window].max(axis=0)
        pooled = [row[max(0, c - side) : min(n, c + side + 1)].mean() for c in range(n)]
        score[:n] = np.maximum(score[:n], pooled)
    movable = np.arange(policy.n_sink, N_CELLS - policy.n_recent)
    order = movable[np.argsort(score[movable], kind="stable")]
    expected, threshold = set(order[:n_new].tolist()), score[order[n_new]]
    near = {c for c in gone ^ expected if not math.isclose(score[c], threshold, rel_tol=1e-3)}
    assert not near
    assert len(gone & expected) > 0.97 * n_new


def test_a_prompt_that_fits_is_the_same_as_with_full_prefill(tiny):
    out = []
    for prefill in ("full", "bounded"):
        llm = small(tiny, n_ctx=512, kv_policy=replace(TINY, prefill=prefill))
        llm.eval(TOKENS[:200])
        for token in TOKENS[200:260]:
            llm.eval([token])
        out.append((llm.kv_cells(), logits(llm)))
    (cells, given), (expected, wanted) = out
    assert np.array_equal(cells, expected)
    assert np.array_equal(given, wanted)


def test_rope_factors_follow_the_positions_not_the_cells(tmp_path):
    """512 positions or fewer take the short factors; 256 cells for 1,024 positions must not."""
    path = tiny_models.write_longrope(tmp_path / "longrope.gguf", n_short=512)
    out = {}
    for n_ctx, prefill in ((512, "full"), (1024, "full"), (1024, "bounded")):
        llm = small(path, n_ctx=n_ctx, kv_policy=replace(TINY, prefill=prefill))
        llm.eval(TOKENS[:200])
        out[n_ctx, prefill] = logits(llm)
    assert np.array_equal(out[1024, "bounded"], out[1024, "full"])
    assert not np.array_equal(out[1024, "bounded"], out[512, "full"])


@pytest.mark.parametrize("scorer", [scorer for scorer in SCORERS if scorer != "none"])
def test_a_long_prompt_stays_within_its_cells(tiny, scorer):
    llm = small(tiny, kv_policy=replace(TINY, scorer=scorer, protect=((100, 110),)))
    assert llm.kv_stats().n_cells == 256  # 64 + 64, rounded up
    assert llm.n_ctx() == 8192
    kv_bytes = llm.kv_stats().kv_bytes
    llm.eval(TOKENS)
    stats = llm.kv_stats()
    assert stats.n_tokens == len(TOKENS)
    assert stats.n_used == 256
    assert stats.n_evicted == len(TOKENS) - 256
    assert stats.kv_bytes == stats.kv_bytes_used == kv_bytes
    kept = set(positions(llm))
    assert {0, 1, *range(100, 110), *range(len(TOKENS) - 8, len(TOKENS))} <= kept
    if scorer == "recency":
        assert kept == {0, 1, *range(100, 110), *range(len(TOKENS) - 244, len(TOKENS))}
    for token in TOKENS[:3]:
        llm.eval([token])
    assert len(positions(llm)) == 64


def test_a_second_prompt_makes_room_too(tiny):
    llm = small(tiny)
    at = 0
    for n in (300, 20, 700):
        llm.eval(TOKENS[at : at + n])
        at += n
        assert len(positions(llm)) <= 256
        for token in TOKENS[at : at + 5]:
            llm.eval([token])
        at += 5
        assert len(positions(llm)) == 64
        assert positions(llm)[-1] == at - 1


def test_generate_answers_a_prompt_longer_than_the_cache(smollm2):
    llm = Llama(
        smollm2, n_ctx=0, n_batch=N_BATCH, n_threads=2, verbose=False, flash_attn=True,
        kv_policy="inertiakv", kv_budget=BUDGET, kv_prefill="bounded",
    )  # fmt: skip
    assert llm.n_ctx() == 8192  # what the model was trained for
    assert llm.kv_stats().n_cells == N_CELLS
    ids = tokens(llm, 900)
    text = llm.detokenize(ids).decode(errors="replace")
    usage = llm.create_completion(text, max_tokens=8, temperature=0.0)["usage"]
    assert usage["prompt_tokens"] > 850
    assert llm.kv_stats().n_used == BUDGET
    again = pickle.loads(pickle.dumps(llm))
    assert (again.n_ctx(), again.kv_policy) == (8192, llm.kv_policy)
    assert again.kv_stats().n_cells == N_CELLS


def test_a_sliding_window_keeps_the_cells_it_needs(gemma3):
    """The window is 512, so its cache needs 512 + 64 however small the budget is."""
    policy = replace(POLICY, n_budget=100)
    llm = Llama(gemma3, n_ctx=4096, n_batch=64, n_threads=2, verbose=False, kv_policy=policy)
    assert llm.kv_stats().n_cells == 768
    ids = tokens(llm, 1000)
    llm.eval(ids)
    full = Llama(gemma3, n_ctx=1024, n_batch=64, n_threads=2, verbose=False, swa_full=False)
    full.eval(ids)
    assert len(positions(llm)) == 768
    assert np.argmax(logits(llm)) == np.argmax(logits(full))


@pytest.mark.parametrize("scorer", QUERY_SCORERS)
def test_a_query_ranks_the_cuts_and_leaves_again(tiny, scorer):
    """Its tokens take no position; what it attends to stays, what the prompt attends to may not."""
    text = "which one"
    kept = {}
    for query in (None, text):
        llm = small(tiny, kv_policy=replace(TINY, scorer=scorer))
        llm.kv_query(query)
        llm.eval(TOKENS[:1000])
        assert llm.n_tokens == 1000
        kept[query] = positions(llm)
        assert kept[query][-1] == 999
        assert len(kept[query]) <= 256
        llm.eval([5])
        assert positions(llm)[-1] == 1000
    assert set(kept[None]) != set(kept[text])


def test_a_prompt_of_several_batches_names_its_own_end(tiny, monkeypatch):
    """As if that had been named; `eval`, which cannot know the end, and "" name nothing."""
    probe, probes = _native.probe, []

    def count(ctx, seq_id, n_tokens):
        probes.append(n_tokens)
        return probe(ctx, seq_id, n_tokens)

    monkeypatch.setattr(_native, "probe", count)
    kept = {}
    for query in (None, "", "named"):
        llm = small(tiny)
        text = "which one was it"
        end = llm.tokenize(text.encode(), add_bos=False)
        assert len(end) == 16  # a quarter of a batch of 64, which is less than 64 tokens
        prompt = [*TOKENS[:984], *end]
        llm.kv_query(text if query == "named" else query)
        next(llm.generate(prompt, temp=0.0))
        kept[query] = positions(llm)
        assert bool(probes) == (query != "")
        probes.clear()
        llm.eval(TOKENS[1000:1100])  # two batches, of which nobody says that they are all
        assert bool(probes) == (query == "named")
        probes.clear()
    assert kept[None] == kept["named"]
    assert kept[""] != kept[None]
    blind = small(tiny)
    blind.eval(prompt)
    assert positions(blind) == kept[""]
    next(small(tiny).generate(TOKENS[:64], temp=0.0))
    assert not probes


def test_a_query_does_not_change_the_logits_of_a_prompt_that_fits(tiny):
    out = []
    for query in (None, "which one"):
        llm = small(tiny, type_k=0, type_v=0)
        llm.kv_query(query)
        llm.eval(TOKENS[:200])
        out.append(logits(llm))
    np.testing.assert_allclose(*out, rtol=1e-4, atol=1e-4)  # other batches, other rounding


def test_a_probe_pushes_out_nothing(tiny, monkeypatch):
    """The batches before it leave room for it: it must not evict what it is to rank."""
    evicted = []
    probe = _native.probe

    def watch(ctx, seq_id, n_tokens):
        evicted.append(_native.stats(ctx)["n_evicted"])
        return probe(ctx, seq_id, n_tokens)

    monkeypatch.setattr(_native, "probe", watch)
    # 192 + 64 cells, no padding to spare
    llm = small(tiny, kv_policy=replace(TINY, n_budget=192))
    llm.kv_query("a question of 30 tokens, or so")
    llm.eval(TOKENS[:1000])
    assert len(evicted) == 2 * 30
    assert evicted[-1] > 700
    assert evicted[::2] == evicted[1::2]


@pytest.mark.parametrize("window", [8, 0])
def test_a_blind_prompt_after_a_probed_one_is_ranked_by_its_own_queries(tiny, window):
    """Also if no decode step ended the probed one, and with a policy without a window."""
    policy = replace(TINY, n_window=window)
    fresh = small(tiny, kv_policy=policy)
    fresh.eval(TOKENS[:1000])
    llm = small(tiny, kv_policy=policy)
    llm.kv_query("which one")
    llm.eval(TOKENS[1000:2000])
    llm.reset()
    llm.kv_query(None)
    llm.eval(TOKENS[:1000])
    assert positions(llm) == positions(fresh)
    assert positions(llm) != [0, 1, *range(1000 - 254, 1000)]  # the newest alone


def test_a_failed_probe_leaves_a_working_context(tiny, monkeypatch):
    llm = small(tiny)
    llm.kv_query("which one")
    decode, calls = llm._ctx.decode, []

    def fail(batch):
        calls.append(batch)
        if len(calls) == 2:  # the first probe
            raise RuntimeError("llama_decode returned 2")
        decode(batch)

    monkeypatch.setattr(llm._ctx, "decode", fail)
    with pytest.raises(RuntimeError):
        llm.eval(TOKENS[:1000])
    llm.kv_query(None)
    llm.reset()
    llm.eval(TOKENS[:1000])
    for token in TOKENS[1000:1005]:
        llm.eval([token])
    assert len(positions(llm)) == TINY.n_budget


def test_query_errors(tiny):
    llm = small(tiny)
    with pytest.raises(ValueError, match="40 tokens are more than half of n_batch, 32"):
        llm.kv_query("x" * 40)
    for scorer in ("recency", *KEY_SCORERS):
        with pytest.raises(
            PolicyError, match=r"\(attention, value-norm, entropy, learned\), kv_policy="
        ):
            small(tiny, kv_policy=replace(TINY, scorer=scorer)).kv_query("x")
    with pytest.raises(PolicyError, match="needs kv_prefill='bounded'"):
        small(tiny, kv_policy=replace(TINY, prefill="full")).kv_query("x")


def test_steady_state_moves_and_rebuilds_nothing(tiny):
    """Per token: one cell leaves, its hole is filled, the graph is the last one."""
    for prefill in ("full", "bounded"):
        llm = small(tiny, n_ctx=2048, kv_policy=replace(TINY, prefill=prefill))
        llm.eval(TOKENS[:1000])
        for token in TOKENS[1000:1010]:
            llm.eval([token])
        before = llm.kv_stats()
        for token in TOKENS[1010:1510]:
            llm.eval([token])
        after = llm.kv_stats()
        assert after.n_reused - before.n_reused == 500
        assert after.n_moved == before.n_moved
        assert after.n_evicted - before.n_evicted == 500
        assert after.kv_bytes_resident == before.kv_bytes_resident
