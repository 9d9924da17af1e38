"""The machine: what it is called, and how fast it reads memory."""

from __future__ import annotations

import os
import platform
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import numpy as np

import pyinertia
from pyinertia import _native

BUFFER = 2**29  # bytes; far beyond the last cache of most machines
PASSES = 8


def n_cpus() -> int:
    """Return the CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def name() -> str:
    """Return the CPU's name."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def describe() -> dict[str, object]:
    """Return what the machine is."""
    return {"cpu": name(), "n_cpus": n_cpus(), "system": platform.platform()}


def versions() -> dict[str, str]:
    """Return what the numbers depend on beside the machine."""
    return {
        "pyinertia": pyinertia.__version__,
        "llama_cpp_python": metadata.version("llama_cpp_python"),
        "llama.cpp": _native.LLAMA_CPP_COMMIT,
        "python": platform.python_version(),
    }


def read_bandwidth(n_threads: int) -> float:
    """Return bytes per second that n_threads read together: the best pass of numpy's integer sum.

    The sum adds eight bytes per load and releases the GIL, so memory is what it waits for.
    """
    buffer = np.ones(BUFFER // 8, np.int64)
    parts = np.array_split(buffer, n_threads)
    with ThreadPoolExecutor(n_threads) as pool:
        seconds = []
        for _ in range(PASSES):
            start = time.perf_counter()
            list(pool.map(np.sum, parts))
            seconds.append(time.perf_counter() - start)
    return buffer.nbytes / min(seconds)
