"""The learned scorer: its numbers, its file, and what it remembers of a cell.

That its scores are the method's, on captured tensors, is in test_scores.py.
"""

from __future__ import annotations

import ctypes
import pickle
from dataclasses import replace

import cache_state
import llama_cpp as lc
import numpy as np
import pytest
import tiny_models
import train_scorer
from helpers import positions
from low_level import Context
from reference import learned_row
from states import DEFAULTS, POLICY, TOKENS

from pyinertia import KVPolicy, Llama, PolicyError, _native, learned, resolve_policy
from pyinertia.learned import ARRAYS, FEATURES, LearnedScorer
from pyinertia.policy_text import parse_policy

N = len(FEATURES)
LEARNED = replace(POLICY, scorer="learned", aggregation="last", lambda_=1.0)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def random_scorer(n_hidden: int = 5, seed: int = 0) -> LearnedScorer:
    rng = np.random.default_rng(seed)
    shapes = (n_hidden, N), (n_hidden,), (n_hidden or N,), ()
    net = [rng.normal(0, 0.5, shape).astype(np.float32) for shape in shapes]
    mean = rng.normal(0, 1, N).astype(np.float32)
    scale = rng.uniform(0.5, 2, N).astype(np.float32)
    return LearnedScorer(np.float32(0.8), mean, scale, *net)


def write(scorer: LearnedScorer, path) -> str:
    scorer.write(path)
    return str(path)


def load(path, policy: KVPolicy = LEARNED, **kwargs) -> Llama:
    return Llama(str(path), **DEFAULTS, kv_policy=policy, **kwargs)


def play(llm: Llama, n_prompt: int, n_decode: int, at: int = 0) -> None:
    if n_prompt:
        llm.eval(TOKENS[at : at + n_prompt])
    for token in TOKENS[at + n_prompt : at + n_prompt + n_decode]:
        llm.eval([token])


# what it remembers


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_refresh": 4},
        {"frozen": True},
        {"prefill": "bounded"},
        {"aggregation": "ema", "beta": 0.0},
        {"heads": "max"},
    ],
    ids=str,
)
def test_it_keeps_what_attention_keeps_if_it_ranks_by_the_ema(tiny, tmp_path, changes):
    """Across the first cut, its moves, holes that are filled and, lazily, steps without a score."""
    ema = replace(POLICY, lambda_=1.0, **{"aggregation": "ema", **changes, "beta": 0.95})
    neutral = write(train_scorer.NEUTRAL, tmp_path / "neutral.npz")
    kept = []
    for policy in (ema, replace(LEARNED, **changes, scorer_file=neutral)):
        llm = load(tiny, policy)
        play(llm, 400, 1)
        first = positions(llm)
        play(llm, 0, 60, at=401)
        kept.append((first, positions(llm), llm.kv_stats().n_evicted))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("flash_attn", [False, True])
def test_norms_and_positions_are_those_of_the_cells(tiny, flash_attn):
    """After moves and in reused holes; K and V are read from llama.cpp's own state."""
    llm = load(tiny, flash_attn=flash_attn)
    play(llm, 300, 40)
    play(llm, 20, 20, at=340)
    size = lc.llama_state_seq_get_size(llm.ctx, 0)
    data = (ctypes.c_uint8 * size)()
    lc.llama_state_seq_get_data(llm.ctx, data, size, 0)
    rows, _ = cache_state.parse(bytes(data))
    pos = np.array(sorted(rows))
    assert pos.tolist() == positions(llm)
    assert pos[-1] > len(pos), "nothing was evicted"
    shape = len(pos), 2, tiny_models.N_LAYER, tiny_models.N_HEAD_KV, -1
    cells = np.array([np.frombuffer(b"".join(rows[p]), np.float16) for p in pos], np.float64)
    norms = np.linalg.norm(cells.reshape(shape), axis=4)  # [n, K or V, layer, head]
    key, value = (1 / (1 + norms[:, 0])).mean(axis=(1, 2)), norms[:, 1].mean(axis=(1, 2))

    x = _native.features(llm.ctx, 0)
    assert x.shape == (len(pos), N)
    np.testing.assert_allclose(x[:, 3], np.log(1 + pos[-1] - pos), rtol=1e-5)
    np.testing.assert_allclose(x[:, 4], np.log(1e-4 + key / key.mean()), rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(x[:, 5], np.log(1e-4 + value / value.mean()), rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(x[:, 6], pos / (pos[-1] + 1), rtol=1e-5)


def test_scores_are_what_the_numbers_say_of_the_features(tiny, tmp_path):
    for n_hidden in (0, 1, 5):
        scorer = random_scorer(n_hidden, seed=n_hidden)
        file = write(scorer, tmp_path / f"{n_hidden}.npz")
        llm = load(tiny, replace(LEARNED, scorer_file=file))
        play(llm, 100, 30)
        x = _native.features(llm.ctx, 0).astype(np.float64)
        expected = learned_row(scorer, x)
        np.testing.assert_allclose(llm.kv_cells()["score"], expected, rtol=1e-4)
        np.testing.assert_allclose(np.exp(scorer.predict(x)) / len(x), expected, rtol=1e-6)


def test_a_copied_sequence_takes_its_history_along(model):
    context = Context(model, LEARNED, n_seq=2)
    context.decode({0: TOKENS[:100]})
    for token in TOKENS[100:110]:
        context.decode({0: [token]})
    lc.llama_memory_seq_cp(lc.llama_get_memory(context.ctx), 0, 1, -1, -1)
    context.n_past[1] = context.n_past[0]
    for token in TOKENS[110:130]:
        context.decode({0: [token], 1: [token]})
    ours, copy = (_native.features(context.ctx, s) for s in (0, 1))
    np.testing.assert_allclose(copy, ours, rtol=1e-4, atol=1e-5)
    assert context.positions(1) == context.positions(0)
    lc.llama_free(context.ctx)


def test_sequences_have_histories_of_their_own(model):
    alone = []
    for seed in (0, 1):
        context = Context(model, LEARNED)
        context.decode({0: TOKENS[100 * seed :][: 90 + 9 * seed]})
        for token in TOKENS[300:320]:
            context.decode({0: [token]})
        alone.append((context.positions(), _native.features(context.ctx, 0)))
        lc.llama_free(context.ctx)
    both = Context(model, LEARNED, n_seq=2)
    both.decode({0: TOKENS[:90], 1: TOKENS[100:199]})  # one batch
    for token in TOKENS[300:320]:
        both.decode({0: [token], 1: [token]})
    for seq_id, (pos, x) in enumerate(alone):
        assert both.positions(seq_id) == pos
        ours = _native.features(both.ctx, seq_id)
        np.testing.assert_allclose(
            ours, x, rtol=0, atol=1e-2
        )  # batched, attention rounds otherwise
    lc.llama_free(both.ctx)


def test_a_state_has_it_and_names_its_numbers(tiny, tmp_path):
    llm = load(tiny)
    play(llm, 200, 30)
    state = pickle.loads(pickle.dumps(llm.save_state()))
    same, other = load(tiny), random_scorer()
    same.load_state(state)
    assert np.array_equal(_native.features(same.ctx, 0), _native.features(llm.ctx, 0))
    file = write(other, tmp_path / "other.npz")
    changed = load(tiny, replace(LEARNED, scorer_file=file))
    with pytest.raises(ValueError, match="ranked by another scorer, aggregation, beta or other we"):
        changed.load_state(state)
    # another file with the same numbers is the same scorer
    file = write(learned.read(), tmp_path / "copy.npz")
    load(tiny, replace(LEARNED, scorer_file=file)).load_state(state)


def test_closed_gaps_keep_it(tiny):
    llm = load(tiny, kv_positions="compact")
    play(llm, 300, 100)
    before, n_pos = _native.features(llm.ctx, 0), llm.n_tokens
    old = _native.close_gaps(llm.ctx, 0, 0)
    after = _native.features(llm.ctx, 0)
    assert len(old) < n_pos
    norms = [FEATURES.index(name) for name in ("mass", "ema", "max", "key_norm", "value_norm")]
    assert np.array_equal(after[:, norms], before[:, norms])
    age = FEATURES.index("age")
    np.testing.assert_allclose(after[:, age], np.log(len(old) - np.arange(len(old))), rtol=1e-5)


def test_a_bounded_prompt_is_ranked_by_it(tiny, tmp_path):
    """Each batch makes room by what it predicts: here, that the oldest matter most."""
    scorer = train_scorer.NEUTRAL
    weight = np.array([name == "age" for name in FEATURES], np.float32)
    file = write(replace(scorer, weight=weight), tmp_path / "age.npz")
    policy = replace(LEARNED, scorer_file=file, n_budget=64, prefill="bounded")
    llm = load(tiny, policy)
    llm.eval(TOKENS[:500])
    n_oldest = llm.kv_stats().n_cells - 64 - LEARNED.n_recent  # beside a batch
    assert positions(llm)[:n_oldest] == list(range(n_oldest))


# its numbers


def test_numbers_that_do_not_fit_are_refused(model):
    context = Context(model, LEARNED)
    good = random_scorer(3).flat()
    assert good.size == 15 + 3 * 9 + 1
    assert _native.set_weights(context.ctx, 3, good) == ""

    def changed(at: int, value: float) -> np.ndarray:
        out = good.copy()
        out[at] = value
        return out

    for n_hidden, numbers, message in (
        (3, good[:-1], "42 numbers, a scorer with n_hidden = 3 has 43"),
        (0, good, "43 numbers, a scorer with n_hidden = 0 has 23"),
        (-1, good, "n_hidden = -1, it has to be in [0, 256]"),
        (2**31 - 1, good, "n_hidden = 2147483647, it has to be in [0, 256]"),
        (3, changed(20, np.nan), "a number is not finite"),
        (3, changed(-1, np.inf), "a number is not finite"),
        (3, changed(0, 1.0), "beta = 1.000000, it has to be in [0, 1)"),
        (3, changed(8, 0.0), "a scale is not above 0"),
        (3, good[:0], "0 numbers, a scorer with n_hidden = 3 has 43"),
    ):
        assert _native.set_weights(context.ctx, n_hidden, numbers) == message
    lib = _native.load()
    assert not lib.llama_kv_evict_set_weights(context.ctx, 3, None, 43, None, 0)
    assert not lib.llama_kv_evict_set_weights(None, 3, good.ctypes.data, 43, None, 0)
    assert lib.llama_kv_evict_features(None, 0, None, 0) == -1
    assert lib.llama_kv_evict_features(context.ctx, 7, None, 0) == -1
    lc.llama_free(context.ctx)

    context = Context(model, POLICY)
    assert "is not the learned one" in _native.set_weights(context.ctx, 3, good)
    assert _native.features(context.ctx, 0).shape == (0, N)
    lc.llama_free(context.ctx)


def test_huge_numbers_give_finite_scores(tiny, tmp_path):
    scorer = random_scorer()
    huge = {name: getattr(scorer, name) * np.float32(1e37) for name in ("hidden_weight", "weight")}
    small = replace(scorer, scale=np.full(N, 1e-38, np.float32), **huge)
    llm = load(tiny, replace(LEARNED, scorer_file=write(small, tmp_path / "huge.npz")))
    play(llm, 100, 30)
    score = llm.kv_cells()["score"]
    assert np.isfinite(score).all()
    assert (score > 0).all()


# its file


def test_a_file_comes_back_as_it_was_written(tmp_path):
    for n_hidden in (0, 4):
        scorer = replace(random_scorer(n_hidden), about="of a test")
        paths = [tmp_path / name for name in ("one.npz", "two.npz")]
        for path in paths:
            scorer.write(path)
        assert paths[0].read_bytes() == paths[1].read_bytes()
        again = learned.read(paths[0])
        assert np.array_equal(again.flat(), scorer.flat())
        assert (again.n_hidden, again.about) == (n_hidden, "of a test")


def test_one_ships_and_is_small():
    scorer = learned.read()
    assert "SmolLM2" in scorer.about
    assert learned.shipped().stat().st_size < 8192


def arrays(**changes) -> dict:
    scorer = random_scorer(2)
    found = {"features": np.array(FEATURES)} | {name: getattr(scorer, name) for name in ARRAYS}
    return {name: a for name, a in (found | changes).items() if a is not None}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": None}, "its features are"),
        ({"features": np.array(FEATURES[::-1])}, "its features are"),
        ({"weight": None}, "it has no array weight"),
        ({"mean": np.zeros(6, np.float32)}, r"mean is float32 \(6,\), it has to be float32 \(7,\)"),
        ({"bias": np.array(1)}, r"bias is int64 \(\)"),
        ({"weight": np.float32([1, np.nan])}, "weight has numbers that are not finite"),
        ({"weight": np.float64([1, 1e300])}, "weight has numbers that are not finite"),
        ({"beta": np.float32(1)}, r"beta is 1.0, it has to be in \[0, 1\)"),
        ({"scale": np.zeros(7, np.float32)}, "a scale is not above 0"),
        ({"weight": np.array(["a", "b"])}, "weight is <U1"),
        ({"weight": np.array([None, None])}, "it cannot be read as an .npz"),
    ],
)
def test_a_file_with_other_arrays_is_refused(tmp_path, changes, message):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays(**changes))
    with pytest.raises(PolicyError, match=message) as caught:
        resolve_policy(KVPolicy(scorer="learned", scorer_file=path))
    assert str(path) in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path):
    whole = write(random_scorer(), tmp_path / "whole.npz")
    bad = tmp_path / "bad.npz"
    data = (tmp_path / "whole.npz").read_bytes()
    for content in (b"", b"text", data[:-20], data[:100] + bytes(100) + data[200:]):
        bad.write_bytes(content)
        with pytest.raises(PolicyError, match=r"cannot be read as an \.npz"):
            learned.read(bad)
    np.save(tmp_path / "one.npy", np.zeros(3))
    for path in (tmp_path / "one.npy", tmp_path):
        with pytest.raises(PolicyError, match=r"cannot be read as an \.npz"):
            learned.read(path)
    with pytest.raises(PolicyError, match="it does not exist; give a file that scripts/train"):
        resolve_policy(KVPolicy(scorer="learned", scorer_file=tmp_path / "missing.npz"))
    with pytest.raises(PolicyError, match=r"scorer_file=7\): scorer_file must be a path, or None"):
        KVPolicy(scorer="learned", scorer_file=7)
    with pytest.raises(PolicyError, match="only the learned scorer has a file"):
        KVPolicy(scorer_file=whole)


def test_a_file_is_read_when_a_model_is_loaded(tiny, tmp_path):
    path = tmp_path / "gone.npz"
    policy = replace(LEARNED, scorer_file=write(random_scorer(), path))
    llm = load(tiny, policy)
    path.unlink()
    play(llm, 100, 10)
    llm.load_state(llm.save_state())
    with pytest.raises(PolicyError, match="it does not exist"):
        load(tiny, policy)


def test_a_command_can_name_a_file(tmp_path):
    path = write(random_scorer(), tmp_path / "own.npz")
    policy = parse_policy(f"learned/ema/scorer_file={path}", 512)
    assert (policy.scorer_file, policy.aggregation, policy.n_budget) == (path, "ema", 512)


# its training


def test_it_is_trained_end_to_end(tiny, tmp_path, capsys):
    """On a random-weight model, whose attention follows its keys all the same."""
    rng = np.random.default_rng(0)
    texts = []
    for name in ("train", "held-out"):
        texts.append(tmp_path / f"{name}.txt")
        texts[-1].write_text("".join(map(chr, rng.integers(32, 127, 4000))))
    common = [str(tiny), "--train", str(texts[0]), "--held-out", str(texts[1]), "--windows", "3"]
    common += ["--held-out-windows", "1", "--length", "160", "--tokens", "48", "--horizon", "15"]
    common += ["--budget", "80", "--threads", "1", "--traces", str(tmp_path / "traces")]
    out = [tmp_path / name for name in ("a.npz", "b.npz", "net.npz")]
    train_scorer.main([*common, "-o", str(out[0])])
    report = capsys.readouterr().out
    _, table = report.split("by the others")
    rows = {line[:36].strip(): line.split()[-5:] for line in table.splitlines()[-5:]}
    learned_rho, recency_rho = (float(rows[r][0]) for r in ("learned, linear", "newest (recency)"))
    assert learned_rho > recency_rho + 0.1
    assert learned_rho > float(rows["EMA (attention)"][0]) - 0.05

    for path in (tmp_path / "traces").glob("*-*.npz"):
        path.unlink()  # record anew
    train_scorer.main([*common, "-o", str(out[1])])
    assert out[0].read_bytes() == out[1].read_bytes()
    train_scorer.main([*common, "-o", str(out[2]), "--hidden", "4"])  # from the recordings
    assert [learned.read(path).n_hidden for path in out] == [0, 0, 4]
    llm = load(tiny, replace(LEARNED, scorer_file=str(out[2])))
    play(llm, 100, 10)
    assert len(positions(llm)) == LEARNED.n_budget
