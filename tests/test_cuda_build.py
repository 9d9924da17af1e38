"""Our CUDA sources and the patched file of upstream's compile; no GPU is needed, only nvcc."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import bootstrap
import pytest

ARCHITECTURES = (80, 89, 90)
GGML = bootstrap.ROOT / "vendor" / "llama.cpp" / "ggml"


@pytest.fixture(scope="module")
def compiler() -> list[str]:
    """nvcc, with upstream's flags and every warning an error."""
    if not (found := bootstrap.nvcc()):
        pytest.skip("nvcc is not found")
    flags = [found, "-std=c++17", "-O3", "-use_fast_math", "-extended-lambda"]
    flags += ["-Werror=all-warnings", "-DGGML_CUDA_USE_GRAPHS", "-DGGML_CUDA_NO_VMM"]
    flags += ["-DGGML_SCHED_MAX_COPIES=4", f"-I{GGML / 'include'}", f"-I{GGML / 'src'}"]
    return flags + [f"-I{folder}" for folder in bootstrap.cuda_includes()]


def compile_for(compiler: list[str], source: str, architecture: int, out: Path, *extra: str) -> str:
    command = [*compiler, f"-arch=sm_{architecture}", *extra, "-c", f"src/ggml-cuda/{source}"]
    done = subprocess.run([*command, "-o", str(out)], cwd=GGML, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


# one of them stands for the others where minutes count
SOME = [a if a == 90 else pytest.param(a, marks=pytest.mark.slow) for a in ARCHITECTURES]


@pytest.mark.parametrize("architecture", SOME)
@pytest.mark.parametrize("source", ["kv-mass.cu", "kv-move.cu"])
def test_our_kernels_spill_nothing(compiler, tmp_path, source, architecture):
    # unused are functions of ggml's headers, and parameters in the toolkit's
    warnings = "-Wall,-Wextra,-Wno-unused-function,-Wno-unused-parameter,-Werror"
    ours = [f"-Xcompiler={warnings}", "-Xptxas=-v"]
    report = compile_for(compiler, source, architecture, tmp_path / "kernels.o", *ours)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert len(spills) == {"kv-mass.cu": 46, "kv-move.cu": 7}[source]
    assert set(spills) == {("0", "0")}, report


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_patched_dispatch_compiles(compiler, tmp_path, architecture):
    compile_for(compiler, "ggml-cuda.cu", architecture, tmp_path / "dispatch.o")
