"""Once a sequence is cut, attention and its mass are one op: when, and with what results.

`HolesLlama` keeps llama.cpp's attention, which test_eviction.py compares bit for bit with an
unpatched build. On a random-weight model in float32 the two may differ by rounding only. How far
a quantised model moves is measured in test_eviction.py, too.
"""

from __future__ import annotations

import ctypes

import llama_cpp as lc
import numpy as np
import pytest
import tiny_models
from helpers import HolesLlama, logits, positions
from low_level import Context

from pyinertia import KVPolicy, Llama, _native
from pyinertia.policy import KEY_SCORERS, QUERY_SCORERS

F32, F16, Q8_0 = 0, 1, 8
SMALL = {"n_budget": 48, "n_sink": 2, "n_recent": 8, "n_window": 8, "n_pool": 3, "beta": 0.95}
FUSED = ("attention", "learned")
TOKENS = np.random.default_rng(0).integers(0, 256, 400).tolist()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


class Watch:
    """Which of our nodes each decode call computed: "attn", "mass" or both, of layer 0."""

    def __init__(self, lib_dir) -> None:
        self.name = ctypes.CDLL(str(next(lib_dir.glob("*ggml-base.*")))).ggml_get_name
        self.name.restype, self.name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.seen: set[str] = set()

    def __call__(self, tensor: int) -> None:
        name = self.name(tensor).decode()
        if name in ("kv_attn-0", "kv_mass-0"):
            self.seen.add(name[3:7])

    def take(self) -> set[str]:
        seen, self.seen = self.seen, set()
        return seen


@pytest.mark.parametrize("scorer", ["attention", "learned", "recency", "random"])
def test_the_op_is_used_from_the_cut_to_the_next_empty_cache(model, lib_dir, scorer):
    watch = Watch(lib_dir)
    context = Context(model, KVPolicy(scorer=scorer, **SMALL), watch=watch)
    before = {"mass"} if scorer in {"attention", "learned"} else set()
    watch.take()
    for _ in range(2):
        context.decode({0: TOKENS[:100]})
        assert watch.take() == before
        context.decode({0: TOKENS[100:101]})  # sees every cell
        assert watch.take() == before
        for token in TOKENS[101:103]:
            context.decode({0: [token]})
            assert watch.take() == {"attn"}
        context.decode({0: TOKENS[103:150]})  # a further prompt
        assert watch.take() == {"attn"}
        lc.llama_memory_clear(lc.llama_get_memory(context.ctx), True)
        context.n_past = [0]
    lc.llama_free(context.ctx)


@pytest.mark.parametrize(
    "policy",
    [{"heads": "max"}, *({"scorer": s} for s in QUERY_SCORERS + KEY_SCORERS if s not in FUSED)],
)
def test_what_it_does_not_know_is_scored_beside_llama_cpps_attention(model, lib_dir, policy):
    watch = Watch(lib_dir)
    context = Context(model, KVPolicy(**policy, **SMALL), watch=watch)
    watch.take()
    context.decode({0: TOKENS[:100]})
    for token in TOKENS[100:110]:
        context.decode({0: [token]})
    assert len(context.positions()) == SMALL["n_budget"]
    assert watch.take() == {"mass"}
    lc.llama_free(context.ctx)


def test_the_layers_of_a_window_follow(tmp_path, lib_dir):
    """They have no scores; layer 0 is one of them."""
    watch = Watch(lib_dir)
    path = tiny_models.write_gemma3(tmp_path / "gemma3.gguf")
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    context = Context(model, KVPolicy(**SMALL), watch=watch)
    watch.take()
    context.decode({0: TOKENS[:100]})
    context.decode({0: TOKENS[100:101]})
    assert watch.take() == set()
    for token in TOKENS[101:103]:
        context.decode({0: [token]})
        assert watch.take() == {"attn"}
    context.decode({0: TOKENS[103:150]})
    assert watch.take() == {"attn"}
    lc.llama_free(context.ctx)
    lc.llama_model_free(model)


def test_it_follows_the_cells_into_and_out_of_a_state(tiny):
    """Without gaps or with them, it goes on bit for bit as where it was saved."""
    runs = []
    for start in ("fresh", "after a cut"):
        llm = Llama(tiny, n_ctx=512, n_threads=1, verbose=False, kv_policy=KVPolicy(**SMALL))
        if start == "fresh":
            llm.eval(TOKENS[:100])
            whole = llm.save_state()
            for token in TOKENS[100:105]:
                llm.eval([token])
            cut = llm.save_state()
        else:
            llm.eval(TOKENS[200:400])
            for token in TOKENS[:5]:
                llm.eval([token])
        for state in (whole, cut):
            llm.load_state(state)
            llm.eval([7])
            runs.append(logits(llm))
    assert np.array_equal(runs[0], runs[2])
    assert np.array_equal(runs[1], runs[3])


def test_another_engine_takes_over_a_cut_cache(tiny):
    llm = Llama(tiny, n_ctx=512, n_threads=1, verbose=False, kv_policy=KVPolicy(**SMALL))
    llm.eval(TOKENS[:100])
    llm.eval(TOKENS[100:101])
    before = positions(llm)
    assert not _native.attach(llm.ctx, KVPolicy(**{**SMALL, "n_budget": 40}), True)
    assert positions(llm) == before
    for token in TOKENS[101:103]:  # the first one ranks the cells
        llm.eval([token])
    assert len(positions(llm)) == 40


@pytest.mark.parametrize("scorer", ["none", "attention"])
def test_without_a_cut_of_its_own_attention_stays_llama_cpps(model, lib_dir, scorer):
    watch = Watch(lib_dir)
    policy = KVPolicy(scorer=scorer, **SMALL)
    context = Context(model, policy, compact=scorer == "none", watch=watch)
    context.decode({0: TOKENS[:100]})
    if scorer == "none":
        assert _native.keep(context.ctx, 0, np.arange(50)) == 49
    for token in TOKENS[100:105]:
        context.decode({0: [token]})
    assert "attn" not in watch.take()
    lc.llama_free(context.ctx)


@pytest.mark.parametrize("write", [tiny_models.write_llama, tiny_models.write_gemma3])
@pytest.mark.parametrize("flash_attn", [False, True])
@pytest.mark.parametrize(
    ("type_kv", "rtol"),
    [(F32, 1e-4), (F16, 2e-2), (Q8_0, 5e-2)],  # llama.cpp rounds q and the softmax to these types
    ids=["f32", "f16", "q8_0"],
)
def test_results_and_scores_are_those_of_separate_ops(tmp_path, write, type_kv, rtol, flash_attn):
    """Decode steps, a further prompt in tiles, and decode steps again."""
    tiny = write(tmp_path / "tiny.gguf")
    if type_kv == Q8_0 and not flash_attn:
        pytest.skip("llama.cpp: quantised V needs flash attention")
    if type_kv == F32 and flash_attn:
        rtol = 2e-2  # it rounds K and V to f16 there
    runs = []
    for cls in (HolesLlama, Llama):
        llm = cls(
            tiny, n_ctx=512, n_threads=2, verbose=False, flash_attn=flash_attn,
            type_k=type_kv, type_v=type_kv, kv_policy=KVPolicy(**SMALL),
        )  # fmt: skip
        out = []
        for start, stop, step in ((0, 150, 150), (150, 180, 1), (180, 280, 100), (280, 310, 1)):
            for at in range(start, stop, step):
                llm.eval(TOKENS[at : at + step])
                out.append(logits(llm))
        runs.append((np.array(out), llm.kv_cells()))
    (expected, cells), (given, ours) = runs
    assert np.abs(given - expected).max() < rtol * np.abs(expected).max()
    assert cells["pos"].tolist() == ours["pos"].tolist()
    np.testing.assert_allclose(ours["score"], cells["score"], rtol=10 * rtol, atol=1e-7)


def test_the_kept_positions_do_not_depend_on_threads(tiny):
    kept = set()
    for n_threads in (1, 2, 3):
        llm = Llama(
            tiny, n_ctx=512, n_threads=n_threads, verbose=False, kv_policy=KVPolicy(**SMALL)
        )
        llm.eval(TOKENS[:150])
        for token in TOKENS[150:200]:
            llm.eval([token])
        kept.add(tuple(positions(llm)))
    assert len(kept) == 1
