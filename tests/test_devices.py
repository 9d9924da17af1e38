"""What a policy does with each way to spread a model over devices, as far as CPUs can show it."""

from __future__ import annotations

from itertools import islice

import llama_cpp
import numpy as np
import pytest
import tiny_models

from pyinertia import KVPolicy, Llama, PolicyError

PROMPT = list(range(40, 140))
POLICY = KVPolicy(n_budget=50, n_sink=2, n_recent=8)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("devices") / "llama.gguf")


def load(path, policy=POLICY, **kwargs):
    threads = {"n_threads": 1, "n_threads_batch": 1}
    return Llama(str(path), n_ctx=256, kv_policy=policy, verbose=False, **threads, **kwargs)


def play(llm) -> tuple[list[int], np.ndarray]:
    return list(islice(llm.generate(PROMPT, temp=0.0), 12)), llm.kv_cells()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"n_gpu_layers": 1},
        {"n_gpu_layers": -1, "offload_kqv": False},
        {"n_gpu_layers": -1, "split_mode": llama_cpp.LLAMA_SPLIT_MODE_LAYER},
        {"n_gpu_layers": -1, "split_mode": llama_cpp.LLAMA_SPLIT_MODE_NONE},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:n_gpu_layers")
def test_whole_layers_anywhere_are_served(path, kwargs):
    """Partial offload, layer split and a cache on the CPU: the same tokens and cells."""
    tokens, cells = play(load(path, flash_attn=True, **kwargs))
    expected_tokens, expected_cells = play(load(path, flash_attn=True))
    assert tokens == expected_tokens
    assert np.array_equal(cells["pos"], expected_cells["pos"])
    np.testing.assert_allclose(cells["score"], expected_cells["score"], rtol=1e-3)


@pytest.mark.skipif(llama_cpp.llama_supports_gpu_offload(), reason="there is a GPU")
def test_layers_for_a_gpu_that_is_not_there_are_warned_of(path):
    with pytest.warns(UserWarning, match="n_gpu_layers=-1: no GPU is found, the CPU computes"):
        load(path, n_gpu_layers=-1)
    load(path, n_gpu_layers=0)  # any other warning is an error here


@pytest.mark.parametrize("name", ["row", "tensor"])
def test_layers_in_parts_are_refused(path, name):
    split_mode = getattr(llama_cpp, f"LLAMA_SPLIT_MODE_{name.upper()}")
    with pytest.raises(PolicyError, match=f"split_mode {name} .*LLAMA_SPLIT_MODE_LAYER"):
        load(path, split_mode=split_mode)


def test_layers_in_rows_without_a_policy_are_llama_cpps_own(path):
    load(path, policy=None, split_mode=llama_cpp.LLAMA_SPLIT_MODE_ROW)
