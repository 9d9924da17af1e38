"""What holds for every policy, prompt and batch size, on a random-weight model."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest
import tiny_models
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyinertia import KVPolicy, Llama, _native
from pyinertia.policy import AGGREGATIONS, HEADS, KEY_SCORERS, SCORERS

TOKENS = np.random.default_rng(0).integers(0, 256, 2000).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@st.composite
def policies(draw) -> KVPolicy:
    n_sink, n_recent = draw(st.integers(0, 6)), draw(st.integers(0, 16))
    n_refresh = draw(st.integers(1, 8))
    p0 = draw(st.integers(0, 40))
    protect = draw(st.sampled_from([(), ((p0, p0 + 5),), ((p0, p0 + 3), (p0 + 10, p0 + 12))]))
    return KVPolicy(
        scorer=draw(st.sampled_from(["attention", *(s for s in SCORERS if s != "none")])),
        heads=draw(st.sampled_from(list(HEADS))),
        aggregation=draw(st.sampled_from(list(AGGREGATIONS))),
        n_budget=n_sink + n_recent + n_refresh + 6 + draw(st.integers(0, 40)),
        n_sink=n_sink,
        n_recent=n_recent,
        n_window=draw(st.integers(0, 20)),
        n_pool=draw(st.sampled_from([1, 3, 7])),
        n_refresh=n_refresh,
        frozen=draw(st.booleans()),
        prefill=draw(st.sampled_from(["full", "bounded"])),
        protect=protect,
        seed=draw(st.integers(0, 3)),
    )


def prompt(llm: Llama, ids: list[int]) -> None:
    llm.eval(ids)


def decode(llm: Llama, ids: list[int]) -> None:
    """Several tokens in one decode step, as a draft model sends them."""
    _native.prompt(llm.ctx, 0, 0)
    llama_cpp.Llama.eval(llm, ids)


def run(path, policy: KVPolicy, turns: list[tuple[int, list[int]]], n_batch: int):
    """Play turns of (prompt length, decode step sizes); yield phase and cells after every step."""
    llm = Llama(path, n_ctx=2048, n_batch=n_batch, n_threads=1, verbose=False, kv_policy=policy)
    at = 0
    for n_prompt, sizes in turns:
        prompt(llm, TOKENS[at : at + n_prompt])
        at += n_prompt
        yield llm, at, "prompt", n_prompt
        for i, n in enumerate(sizes):
            decode(llm, TOKENS[at : at + n])
            at += n
            yield llm, at, "decode" if i else "first", n
    llm.close()


@settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    policy=policies(),
    turns=st.lists(
        st.tuples(
            st.integers(2, 400),
            st.lists(st.integers(1, 3), min_size=1, max_size=50),
        ),
        min_size=1,
        max_size=3,
    ),
    n_batch=st.sampled_from([16, 64]),
)
def test_invariants(tiny, policy, turns, n_batch):
    last, evicted = None, 0
    for llm, at, phase, n in run(tiny, policy, turns, n_batch):
        cells = llm.kv_cells()
        pos = cells["pos"].tolist()

        assert sorted(set(pos)) == pos, "a position stands twice, or out of order"
        assert pos[-1] == at - 1, "the newest token is not resident"
        # a bounded prefill cuts before each batch, as a decode step does
        n_last = n if policy.prefill == "full" else (n - 1) % n_batch + 1
        never = {p for p in range(at) if p < policy.n_sink or p >= at - n_last - policy.n_recent}
        for p0, p1 in policy.protect:
            never |= set(range(p0, min(p1, at)))
        assert never <= set(pos), "a sink, recent or protected cell left"
        assert np.isfinite(cells["score"]).all()
        if phase == "decode":
            room = policy.n_sink + policy.n_recent + sum(b - a for a, b in policy.protect)
            assert len(pos) <= max(policy.n_budget, room + n)
        elif policy.prefill == "full":  # and the first decode query sees all of the prompt
            assert llm.kv_stats().n_evicted == evicted
        stats = llm.kv_stats()
        assert len(pos) <= stats.n_cells
        assert stats.n_used == len(pos) == stats.n_tokens - stats.n_evicted
        evicted = stats.n_evicted
        last = cells

    for llm, *_ in run(tiny, policy, turns, n_batch):
        again = llm.kv_cells()
    assert np.array_equal(last, again), "the same run kept other cells"


def ranked(tiny, **policy):
    """Cells before the first cut, with the scores that decide it, and positions after it."""
    policy = KVPolicy(n_budget=64, n_sink=2, n_recent=8, n_window=8, n_pool=1, **policy)
    llm = Llama(tiny, n_ctx=512, n_threads=1, verbose=False, kv_policy=policy)
    llm.eval(TOKENS[:200])
    llm.eval(TOKENS[200:201])
    before = llm.kv_cells()
    llm.eval(TOKENS[201:202])
    return llm, before, llm.kv_cells()["pos"]


@pytest.mark.parametrize(
    ("policy", "n_keep"),
    [
        *(({"scorer": scorer}, 63) for scorer in SCORERS if scorer != "none"),
        ({"n_refresh": 8}, 56),
    ],
)
def test_the_lowest_scores_leave(tiny, policy, n_keep):
    _, before, after = ranked(tiny, **policy)
    assert before["pos"].tolist() == list(range(201))
    movable = before[2:193]  # neither sink (2) nor among the 8 newest
    order = np.lexsort((movable["pos"], movable["score"]))  # ties: the lower position leaves
    gone = movable["pos"][order[: 201 - n_keep]]
    assert sorted(set(range(202)) - set(after.tolist())) == sorted(gone.tolist())


def test_frozen_generated_tokens_outrank_the_prompt(tiny):
    """Score-Free: prompt cells leave first, lowest first; then the oldest generated."""
    llm, before, _ = ranked(tiny, frozen=True)
    for token in TOKENS[202:230]:
        llm.eval([token])
    pos = llm.kv_cells()["pos"]
    assert set(range(200, 230)) <= set(pos.tolist())
    prompt_left = before[np.isin(before["pos"], pos) & (before["pos"] < 200)]
    order = before[2:200][np.argsort(-before[2:200]["score"], kind="stable")]
    assert set(prompt_left["pos"][2:]) == set(order["pos"][: len(prompt_left) - 2])
    for token in TOKENS[230:330]:
        llm.eval([token])
    assert llm.kv_cells()["pos"].tolist() == [0, 1, *range(330 - 62, 330)]


def test_a_reused_cell_starts_from_nothing(tiny):
    """A new token in an evicted hole does not inherit the score of its victim."""
    llm, _, _ = ranked(tiny, n_refresh=50)
    llm.eval(TOKENS[202:203])
    cells = llm.kv_cells()
    assert cells["score"][cells["pos"] >= 201].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("scorer", KEY_SCORERS)
def test_a_new_key_is_ranked_at_once(tiny, scorer):
    """Its row says what later ones will say: it need not grow from 0 under the EMA."""
    llm, _, _ = ranked(tiny, scorer=scorer)
    for token in TOKENS[202:230]:
        llm.eval([token])
    cells = llm.kv_cells()
    new = cells["score"][cells["pos"] >= 202]
    assert new.min() > 0.5 * np.median(cells["score"])


def test_a_budget_share_is_a_share_of_the_prompt(tiny):
    policy = KVPolicy(n_budget=0.25, n_sink=2, n_recent=8, n_window=8)
    llm = Llama(tiny, n_ctx=512, n_threads=1, verbose=False, kv_policy=policy)
    llm.eval(TOKENS[:200])
    for token in TOKENS[200:260]:
        llm.eval([token])
    assert llm.kv_stats().n_used == 50
