"""Sanitizers: the libraries built with one, and the tests of the engine run under it.

    python scripts/test.py --sanitize address    memory errors and undefined behaviour
    python scripts/test.py --sanitize thread     data races, on two threads

More arguments go to pytest, in place of the tests that TESTS names. Models are tiny ones with
random weights. The first finding ends the process, and the tests with it; what llama.cpp itself
does is let off by scripts/sanitizers/KIND.txt, a reason each. Needs gcc and its runtime libraries.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bootstrap

KINDS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}

# those that call the engine on tiny models, and the ops alone
TESTS = {
    "address": (
        *("backend_ops", "cuda_ops", "attn_op", "score_op", "ops", "fused", "families"),
        *("scores", "eviction", "bounded", "invariants", "lifecycle", "streams", "positions"),
        *("c_abi", "c_abi_misuse", "interrupted", "malformed_gguf", "bad_input"),
        *("state", "state_refused", "state_caches", "reuse"),
    ),
    "thread": ("backend_ops", "cuda_ops", "c_abi"),
}


def build(kind: str) -> Path:
    """Build what changed; returns the folder of the build."""
    name = f"sanitize-{kind}"
    # with assertions, those of the C++ library included
    flags = f"-O1 -g -fno-omit-frame-pointer -D_GLIBCXX_ASSERTIONS {KINDS[kind]}"
    options = [f"-DCMAKE_{language}_FLAGS_RELEASE={flags}" for language in ("C", "CXX")]
    options += ["-DGGML_OPENMP=OFF"]  # gcc's is not instrumented: threads are ggml's own
    what = f"patched llama.cpp with {KINDS[kind]}"
    bootstrap.configure_and_build(name, what, options, "test-backend-ops", "kv-cuda-host")
    bootstrap.install(name, bootstrap.BUILD / name / "install")
    return bootstrap.BUILD / name


def run(kind: str, args: list[str]) -> int:
    """Run the tests with what was built; returns pytest's exit code."""
    folder = build(kind)
    command = [sys.executable, "-m", "pytest", "--tiny", "-p", "no:cacheprovider"]
    command += ["--build", folder.name, "--capture=sys"]  # a finding is written as it ends all
    if kind == "thread":
        command += ["--threads", "2", "--sequences", "60"]
    command += args or ["--require-op-cases", *(f"tests/test_{t}.py" for t in TESTS[kind])]
    return subprocess.call(command, cwd=bootstrap.ROOT, env=environment(kind, folder))


def environment(kind: str, folder: Path) -> dict[str, str]:
    """The runtime is loaded before Python, and libstdc++ with it, so that it sees exceptions."""
    listed = Path(__file__).parent / "sanitizers" / f"{kind}.txt"
    common = f"halt_on_error=1:exitcode=99:suppressions={listed}"
    return os.environ | {
        "LLAMA_CPP_LIB_PATH": str(folder / "install" / "pyinertia" / "lib"),
        "LD_PRELOAD": " ".join(map(runtime, (RUNTIMES[kind], "libstdc++.so"))),
        # leaks: Python keeps much until its end, all of it would be reported; a failed allocation
        # is to be NULL, as it is without a sanitizer
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:exitcode=99",
        "UBSAN_OPTIONS": f"print_stacktrace=1:{common}",
        "TSAN_OPTIONS": common,
        "OPENBLAS_NUM_THREADS": "1",  # numpy's threads are not instrumented
    }


def runtime(name: str) -> str:
    """Path of a runtime library of the compiler."""
    compiler = os.environ.get("CXX", "g++")
    path = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True)
    found = Path(path.stdout.strip())
    if not found.is_absolute():
        raise bootstrap.BootstrapError(f"{compiler} has no {name}: sanitizers need gcc and that")
    return str(found.resolve())


def main(args: list[str]) -> int:
    """Run `--sanitize KIND ...`."""
    if not args or args[0] not in KINDS:
        given = args[0] if args else "nothing"
        raise bootstrap.BootstrapError(f"--sanitize takes {' or '.join(KINDS)}, not {given}")
    code = run(args[0], args[1:])
    what = "nothing found" if code == 0 else f"FAILED (pytest exit code {code})"
    bootstrap.say(f"{KINDS[args[0]]}: {what}")
    return code
