"""Random valid sequences of C calls, held against a model of the cache: the same cells, no abort.

A sequence is told by its number: `--sequences N` plays N of them, and one that fails names its
number and the calls it made.
"""

from __future__ import annotations

import random
from dataclasses import replace

import llama_cpp as lc
import pytest
import tiny_models
from cache_play import N_CELLS, Play
from first_layer import FirstLayer
from llama_cpp._logger import set_verbose
from low_level import Context

from pyinertia import KVPolicy

N_UBATCH = 64
SMALL = KVPolicy(n_budget=40, n_sink=2, n_recent=6, n_window=4, n_pool=3)
# policy, sequences, kv_unified
CONFIGS = [
    (SMALL, 1, False),
    (replace(SMALL, prefill="bounded", n_budget=150), 1, True),
    (replace(SMALL, n_refresh=4, aggregation="sum"), 3, False),
    (replace(SMALL, prefill="bounded", scorer="recency", n_budget=120), 3, False),
    (replace(SMALL, frozen=True, n_recent=0), 2, False),
    (replace(SMALL, scorer="keydiff", aggregation="last"), 2, False),
    (SMALL, 3, True),  # several sequences share cells: the engine is refused, the cache works
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(scope="module")
def contexts(path, request):
    """One context for each configuration."""
    set_verbose(False)
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    n_threads = request.config.getoption("--threads")
    sizes = {"n_ubatch": N_UBATCH, "n_threads": n_threads}
    made = []
    for policy, n_seq, unified in CONFIGS:
        n_ctx = 2048 if unified and n_seq > 1 else N_CELLS
        made.append(Context(model, policy, n_seq, unified, n_ctx=n_ctx, **sizes))
    yield made
    for context in made:
        lc.llama_free(context.ctx)
    lc.llama_model_free(model)


@pytest.fixture(scope="module")
def first_layer(path):
    return FirstLayer(path)


def test_random_sequences_keep_the_cells_that_the_model_keeps(contexts, first_layer, request):
    for number in range(request.config.getoption("--sequences")):
        play = Play(contexts[number % len(contexts)], random.Random(number), first_layer)
        try:
            play.run()
        except AssertionError as error:
            calls = "\n  ".join(play.calls)
            raise AssertionError(f"sequence {number}: {error}\n  {calls}") from error
