"""Model files that are cut short, damaged, or say what cannot be: one error, and never an abort.

`--files N` tries N copies of a sound file, each with a damage of its own; a copy is told by its
number, see malformed.py. They are loaded in a process of their own, which llama.cpp may end.
"""

from __future__ import annotations

import math

import malformed
import pytest
import tiny_models
from command_line import call
from llama_cpp._logger import set_verbose

from pyinertia.loading import n_ctx_train


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


def test_damaged_copies(tiny, tmp_path, request):
    n = request.config.getoption("--files")
    outcomes = list(malformed.outcomes(tiny, tmp_path, n))
    assert [number for number, _ in outcomes] == list(range(n))
    wrong = [
        (number, outcome)
        for number, outcome in outcomes
        if outcome != "loaded" and not outcome.startswith("ModelError: ")
    ]
    assert not wrong, f"{len(wrong)} of {n}: {wrong[:10]}"
    n_refused = sum(outcome != "loaded" for _, outcome in outcomes)
    assert n / 2 < n_refused < n  # the damages are neither all noticed, nor all harmless


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", 0),
        ("llama.block_count", 513),
        ("llama.attention.layer_norm_rms_epsilon", -1.0),
        ("llama.attention.layer_norm_rms_epsilon", math.nan),
        ("llama.attention.head_count", 0),
        ("llama.attention.key_length", 7),
        ("tokenizer.ggml.tokens", "twice"),
    ],
)
def test_what_cannot_be(tiny, tmp_path, key, value):
    """`pyinertia info` says so in a line; some of these ended the process in llama.cpp."""
    sound, path = malformed.Model(tiny), tmp_path / "wrong.gguf"
    path.write_bytes(sound.twice() if value == "twice" else sound.changed(key, value))
    done = call("info", path, code=None, env={"GGML_NO_BACKTRACE": "1"})
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith("error: ")
    assert "is not a complete GGUF model that this llama.cpp can read" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_metadata_that_is_no_text(tiny, tmp_path):
    sound, path = malformed.Model(tiny), tmp_path / "wrong.gguf"
    part = sound.fields["tokenizer.ggml.pre"].parts[-1]
    path.write_bytes(sound.replaced(part, [0xFF, *part[1:]]))
    set_verbose(False)  # llama-cpp-python's log takes nothing but text
    assert n_ctx_train(str(tiny)) == tiny_models.N_CTX
    assert n_ctx_train(str(path)) == 0
