"""Every mistake is a clear Python exception, and what was loaded before it still works."""

from __future__ import annotations

import math
from itertools import islice

import llama_cpp
import pytest
import tiny_models

from pyinertia import POLICIES, KVPolicy, Llama, ModelError, PolicyError

pytestmark = pytest.mark.filterwarnings(
    "ignore:a KV budget", "error::pytest.PytestUnraisableExceptionWarning"
)

EVICTING = [name for name, policy in POLICIES.items() if policy.evicts]
PROMPT = list(range(40, 140))
POLICY = KVPolicy(n_budget=50, n_sink=2, n_recent=8)

DEFAULTS = {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "llama": tiny_models.write_llama(folder / "llama.gguf"),
        "bert": tiny_models.write_bert(folder / "bert.gguf"),
        "mamba": tiny_models.write_mamba(folder / "mamba.gguf"),
    }


def load(path, **kwargs):
    return Llama(str(path), **(DEFAULTS | kwargs))


def answer(llm) -> list[int]:
    return list(islice(llm.generate(PROMPT, temp=0.0), 12))


@pytest.fixture(scope="module")
def llm(models):
    return load(models["llama"], kv_policy=POLICY)


@pytest.fixture(scope="module")
def right_answer(models):
    return answer(load(models["llama"], kv_policy=POLICY))


# construction


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"kv_policy": "inertia"}, PolicyError, "Did you mean 'inertiakv'"),
        ({"kv_policy": 1}, TypeError, "pass a name, a KVPolicy, or None"),
        ({"kv_policy": "inertiakv", "kv_budget": 36}, PolicyError, "at least 37"),
        ({"kv_policy": "inertiakv-lazy", "kv_budget": 43}, PolicyError, "at least 44"),
        ({"kv_policy": "inertiakv", "kv_budget": -5}, PolicyError, "n_budget=-5"),
        ({"kv_policy": "inertiakv", "kv_budget": math.nan}, PolicyError, "n_budget=nan"),
        ({"kv_policy": "inertiakv", "kv_budget": 1.5}, PolicyError, r"share in \(0, 1\)"),
        ({"kv_policy": "inertiakv", "kv_budget": 0.0}, PolicyError, r"share in \(0, 1\)"),
        ({"kv_policy": "inertiakv", "kv_refresh": 0}, PolicyError, "n_refresh=0"),
        ({"kv_policy": "inertiakv", "kv_refresh": math.nan}, PolicyError, "n_refresh=nan"),
        (
            {"kv_policy": KVPolicy(layer_weights=(1, 2, 3))},
            PolicyError,
            "3 weights, this model has 2",
        ),
        ({"kv_policy": "inertiakv", "embedding": True}, PolicyError, "use kv_policy=None"),
        ({"kv_policy": "inertiakv", "type_v": 8}, ValueError, "Failed to create llama_context"),
        ({"kv_budget": 512}, TypeError, "need a policy that evicts"),
        ({"kv_polcy": "inertiakv"}, TypeError, "'kv_polcy'.*'kv_policy'"),
        ({"n_ctxx": 512}, TypeError, "'n_ctxx'.*'n_ctx'"),
        ({"flash_attention": True}, TypeError, "'flash_attention'.*'flash_attn'"),
    ],
)
def test_a_bad_argument(models, kwargs, error, message):
    with pytest.raises(error, match=message):
        load(models["llama"], **kwargs)


def test_legacy_keywords_warn_once_and_change_nothing(models):
    legacy = {"f16_kv": True, "n_parts": -1, "mul_mat_q": True, "rpc_servers": None}
    with pytest.warns(DeprecationWarning, match="f16_kv") as caught:
        llm = load(models["llama"], **legacy)
    ours = [w for w in caught if w.category is DeprecationWarning]
    assert len(ours) == 1
    assert all(name in str(ours[0].message) for name in legacy)
    assert len(answer(llm)) == 12


@pytest.mark.filterwarnings("default:a KV budget")
def test_a_small_budget_warns_once(models):
    with pytest.warns(UserWarning, match="a KV budget of 255 cells is below 256") as caught:
        load(models["llama"], kv_policy="inertiakv", kv_budget=255)
    assert len(caught) == 1
    assert caught[0].filename == __file__


@pytest.mark.filterwarnings("error:a KV budget")
@pytest.mark.parametrize("kwargs", [{"kv_budget": 256}, {"kv_budget": 0.25}])
def test_a_useful_budget_does_not_warn(models, kwargs):
    load(models["llama"], kv_policy="inertiakv", **kwargs)


@pytest.mark.parametrize("policy", EVICTING)
@pytest.mark.parametrize("architecture", ["bert", "mamba"])
def test_an_unservable_model_is_named(models, architecture, policy):
    with pytest.raises(PolicyError, match=f"architecture '{architecture}'.*kv_policy=None"):
        load(models[architecture], kv_policy=policy)


def test_images_are_refused(models):
    handler = object.__new__(llama_cpp.llama_chat_format.MTMDChatHandler)
    handler._exit_stack = None
    with pytest.raises(PolicyError, match="does not serve images"):
        load(models["llama"], kv_policy="inertiakv", chat_handler=handler)


# model files


@pytest.mark.parametrize("policy", [None, "inertiakv"])
def test_a_missing_model(tmp_path, policy):
    path = tmp_path / "absent.gguf"
    with pytest.raises(ModelError, match=r"absent\.gguf does not exist"):
        load(path, kv_policy=policy)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.02, 0.5, 0.999])
def test_a_truncated_model(models, tmp_path, part):
    content = models["llama"].read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(ModelError, match=r"cut\.gguf is not a complete GGUF"):
        load(path, kv_policy="inertiakv")


def test_something_else_than_a_model(tmp_path):
    path = tmp_path / "text.gguf"
    path.write_text("not a model " * 1000)
    with pytest.raises(ModelError, match=r"text\.gguf is not a complete GGUF"):
        load(path)
    with pytest.raises(ModelError):
        load(tmp_path)


# requests; the context is the same all along


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        (lambda llm: llm.create_completion(PROMPT * 3), ValueError, "exceed context window"),
        (lambda llm: next(llm.generate(PROMPT * 3)), ValueError, "300 tokens exceed.* 256"),
        (lambda llm: llm.eval(PROMPT * 3), ValueError, "tokens exceed.* 256"),
        (lambda llm: next(llm.generate([])), ValueError, "at least one token"),
        (lambda llm: llm.create_completion([]), ValueError, "at least one token"),
        (lambda llm: llm.eval([1, 2, 10**6]), RuntimeError, "llama_decode returned"),
        (lambda llm: next(llm.generate([1, 2, -7])), RuntimeError, "llama_decode returned"),
        (lambda llm: llm.kv_evict([5000]), ValueError, r"\[5000\] are not resident"),
        (lambda llm: llm.kv_evict([-1]), ValueError, r"\[-1\] are not resident"),
        (lambda llm: llm.kv_evict([2**40]), ValueError, "are not resident"),
        (lambda llm: llm.kv_evict([0.5]), ValueError, "whole numbers"),
        (lambda llm: llm.kv_evict([math.nan]), ValueError, "whole numbers"),
        (lambda llm: llm.kv_evict([True]), ValueError, "whole numbers"),
        (lambda llm: llm.kv_evict(["a"]), ValueError, "whole numbers"),
        (lambda llm: llm.kv_evict([[0, 1]]), ValueError, "whole numbers"),
        (lambda llm: llm.kv_cells(1), ValueError, "no such sequence"),
        (lambda llm: llm.kv_cells(-1), ValueError, "no such sequence"),
        (lambda llm: llm.generate(PROMPT, tempp=1).send(None), TypeError, "tempp"),
    ],
)
def test_a_bad_request_leaves_the_context_usable(llm, right_answer, request_, error, message):
    with pytest.raises(error, match=message):
        request_(llm)
    assert answer(llm) == right_answer
    assert llm.kv_stats().n_evicted > 0


@pytest.mark.parametrize("n_before", [0, 150])
def test_what_does_not_fit_loses_nothing(llm, n_before):
    llm.reset()
    llm.eval((PROMPT * 2)[:n_before])
    before = llm.kv_cells()["pos"].tolist()
    with pytest.raises(ValueError, match="exceed the context window of 256"):
        llm.eval([1] * (257 - n_before))
    with pytest.raises(ValueError, match="exceed the context window of 256"):
        next(llm.generate([1] * (257 - n_before), reset=False))
    assert llm.n_tokens == n_before
    assert llm.kv_cells()["pos"].tolist() == before
    llm.eval([1] * (256 - n_before))
    assert llm.n_tokens == 256


def test_a_position_that_is_not_resident_evicts_nothing(llm):
    answer(llm)
    before = llm.kv_cells()
    gone = sorted(set(range(llm.n_tokens)) - set(before["pos"].tolist()))
    with pytest.raises(ValueError, match=rf"\[{gone[0]}\] are not resident"):
        llm.kv_evict([0, gone[0]])
    assert (llm.kv_cells() == before).all()


def test_a_corrupt_state_leaves_the_context_usable(llm, right_answer):
    answer(llm)
    state = llm.save_state()
    state.llama_state = state.llama_state[: len(state.llama_state) // 2]
    state.llama_state_size = len(state.llama_state)
    with pytest.raises(ValueError, match="this state is damaged"):
        llm.load_state(state)
    assert len(llm.kv_cells()) == POLICY.n_budget
    assert answer(llm) == right_answer


def test_an_abandoned_generator_leaves_the_context_usable(llm, right_answer):
    abandoned = llm.generate(PROMPT, temp=0.0)
    next(abandoned)
    assert answer(llm) == right_answer
    with pytest.raises(KeyError):
        abandoned.throw(KeyError("from outside"))
    assert answer(llm) == right_answer
