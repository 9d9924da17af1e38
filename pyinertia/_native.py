"""The native library: found, checked, declared. The only file that knows ctypes.

It mirrors patches/overlay/include/llama-kv-evict.h; each C declaration stands above its signature.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata, resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pyinertia import learned
from pyinertia.errors import NativeLibraryError, PolicyError
from pyinertia.policy import AGGREGATIONS, HEADS, SCORERS, KVPolicy

# copies of vendor/llama.cpp.toml, which a wheel does not carry; tests/test_docs.py compares them
LLAMA_CPP_PYTHON = "0.3.36"
LLAMA_CPP_COMMIT = "0c1e57098bba43ac29e6e3b677cdceebdd22334f"

ABI_VERSION = 5
CELL = np.dtype([("pos", np.int32), ("score", np.float32)])  # struct llama_kv_evict_cell
PATH_VARIABLE = "LLAMA_CPP_LIB_PATH"  # where llama_cpp looks for its library, once, at import
REBUILD = (
    "rebuild it in a checkout of pyinertia: "
    "CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install --no-cache-dir ."
)


class EvictParams(ctypes.Structure):
    """struct llama_kv_evict_params."""

    _fields_ = (
        ("scorer", ctypes.c_int),
        ("aggregation", ctypes.c_int),
        ("heads", ctypes.c_int),
        ("beta", ctypes.c_float),
        ("lambda_", ctypes.c_float),
        ("n_budget", ctypes.c_uint32),
        ("budget_share", ctypes.c_float),
        ("n_sink", ctypes.c_uint32),
        ("n_recent", ctypes.c_uint32),
        ("n_window", ctypes.c_uint32),
        ("n_pool", ctypes.c_uint32),
        ("n_refresh", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("n_ctx", ctypes.c_uint32),
        ("frozen", ctypes.c_bool),
        ("bounded", ctypes.c_bool),
        ("compact", ctypes.c_bool),
    )


class EvictStats(ctypes.Structure):
    """struct llama_kv_evict_stats."""

    _fields_ = (
        ("n_cells", ctypes.c_uint64),
        ("n_used", ctypes.c_uint64),
        ("n_tokens", ctypes.c_uint64),
        ("n_evicted", ctypes.c_uint64),
        ("n_evictions", ctypes.c_uint64),
        ("n_refreshes", ctypes.c_uint64),
        ("n_moved", ctypes.c_uint64),
        ("n_reused", ctypes.c_uint64),
        ("kv_bytes", ctypes.c_uint64),
        ("kv_bytes_used", ctypes.c_uint64),
        ("kv_bytes_resident", ctypes.c_uint64),
        ("t_score_ms", ctypes.c_double),
        ("t_evict_ms", ctypes.c_double),
        ("t_move_ms", ctypes.c_double),
    )


_CTX = ctypes.c_void_p  # struct llama_context *
_DEV = ctypes.c_void_p  # ggml_backend_dev_t

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # LLAMA_API uint32_t llama_kv_evict_abi_version(void);
    "llama_kv_evict_abi_version": (ctypes.c_uint32, []),
    # LLAMA_API size_t llama_kv_evict_params_size(void);
    "llama_kv_evict_params_size": (ctypes.c_size_t, []),
    # LLAMA_API size_t llama_kv_evict_cell_size(void);
    "llama_kv_evict_cell_size": (ctypes.c_size_t, []),
    # LLAMA_API size_t llama_kv_evict_stats_size(void);
    "llama_kv_evict_stats_size": (ctypes.c_size_t, []),
    # LLAMA_API struct llama_kv_evict_params llama_kv_evict_default_params(void);
    "llama_kv_evict_default_params": (EvictParams, []),
    # LLAMA_API bool llama_kv_evict_attach(
    #         struct llama_context * ctx, struct llama_kv_evict_params params,
    #         char * err, size_t n_err);
    "llama_kv_evict_attach": (
        ctypes.c_bool,
        [_CTX, EvictParams, ctypes.c_char_p, ctypes.c_size_t],
    ),
    # LLAMA_API int32_t llama_kv_evict_n_layer(struct llama_context * ctx);
    "llama_kv_evict_n_layer": (ctypes.c_int32, [_CTX]),
    # LLAMA_API bool llama_kv_evict_set_layer_weights(
    #         struct llama_context * ctx, const float * w, int32_t n);
    "llama_kv_evict_set_layer_weights": (ctypes.c_bool, [_CTX, ctypes.c_void_p, ctypes.c_int32]),
    # LLAMA_API bool llama_kv_evict_set_weights(
    #         struct llama_context * ctx, int32_t n_hidden, const float * w, int32_t n,
    #         char * err, size_t n_err);
    "llama_kv_evict_set_weights": (
        ctypes.c_bool,
        [_CTX, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t],
    ),
    # LLAMA_API int32_t llama_kv_evict_features(
    #         struct llama_context * ctx, llama_seq_id seq_id, float * x, int32_t n_max);
    "llama_kv_evict_features": (
        ctypes.c_int32,
        [_CTX, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32],
    ),
    # LLAMA_API bool llama_kv_evict_protect(
    #         struct llama_context * ctx, llama_pos p0, llama_pos p1);
    "llama_kv_evict_protect": (ctypes.c_bool, [_CTX, ctypes.c_int32, ctypes.c_int32]),
    # LLAMA_API bool llama_kv_evict_unprotect(struct llama_context * ctx);
    "llama_kv_evict_unprotect": (ctypes.c_bool, [_CTX]),
    # LLAMA_API bool llama_kv_evict_prompt(
    #         struct llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens);
    "llama_kv_evict_prompt": (ctypes.c_bool, [_CTX, ctypes.c_int32, ctypes.c_int32]),
    # LLAMA_API bool llama_kv_evict_probe(
    #         struct llama_context * ctx, llama_seq_id seq_id, int32_t n_tokens);
    "llama_kv_evict_probe": (ctypes.c_bool, [_CTX, ctypes.c_int32, ctypes.c_int32]),
    # LLAMA_API int32_t llama_kv_evict_cells(
    #         struct llama_context * ctx, llama_seq_id seq_id,
    #         struct llama_kv_evict_cell * cells, int32_t n_max);
    "llama_kv_evict_cells": (
        ctypes.c_int32,
        [_CTX, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32],
    ),
    # LLAMA_API int32_t llama_kv_evict_keep(
    #         struct llama_context * ctx, llama_seq_id seq_id,
    #         const llama_pos * pos, int32_t n_pos);
    "llama_kv_evict_keep": (
        ctypes.c_int32,
        [_CTX, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32],
    ),
    # LLAMA_API int32_t llama_kv_evict_close_gaps(
    #         struct llama_context * ctx, llama_seq_id seq_id,
    #         int32_t n_new, llama_pos * old, int32_t n_max);
    "llama_kv_evict_close_gaps": (
        ctypes.c_int32,
        [_CTX, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32],
    ),
    # LLAMA_API size_t llama_kv_evict_state_get(
    #         struct llama_context * ctx, llama_seq_id seq_id, void * dst, size_t n_max);
    "llama_kv_evict_state_get": (
        ctypes.c_size_t,
        [_CTX, ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t],
    ),
    # LLAMA_API bool llama_kv_evict_state_set(
    #         struct llama_context * ctx, llama_seq_id seq_id, const void * src, size_t n,
    #         char * err, size_t n_err);
    "llama_kv_evict_state_set": (
        ctypes.c_bool,
        [_CTX, ctypes.c_int32, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_size_t],
    ),
    # LLAMA_API bool llama_kv_evict_get_stats(
    #         struct llama_context * ctx, struct llama_kv_evict_stats * stats);
    "llama_kv_evict_get_stats": (ctypes.c_bool, [_CTX, ctypes.POINTER(EvictStats)]),
}

# from ggml-backend.h; the first two are in libggml, the others in libggml-base
_DEVICE_SIGNATURES: dict[str, tuple[str, Any, list[Any]]] = {
    # GGML_API size_t ggml_backend_dev_count(void);
    "ggml_backend_dev_count": ("ggml", ctypes.c_size_t, []),
    # GGML_API ggml_backend_dev_t ggml_backend_dev_get(size_t index);
    "ggml_backend_dev_get": ("ggml", _DEV, [ctypes.c_size_t]),
    # GGML_API const char * ggml_backend_dev_name(ggml_backend_dev_t device);
    "ggml_backend_dev_name": ("ggml-base", ctypes.c_char_p, [_DEV]),
    # GGML_API const char * ggml_backend_dev_description(ggml_backend_dev_t device);
    "ggml_backend_dev_description": ("ggml-base", ctypes.c_char_p, [_DEV]),
    # GGML_API void ggml_backend_dev_memory(
    #         ggml_backend_dev_t device, size_t * free, size_t * total);
    "ggml_backend_dev_memory": (
        "ggml-base",
        None,
        [_DEV, ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t)],
    ),
}


class Device(NamedTuple):
    """A compute device that the library can use; memory in bytes."""

    name: str
    description: str
    n_free: int
    n_total: int


def _lib_dir() -> Path:
    return Path(str(resources.files("pyinertia").joinpath("lib")))


def set_library_path() -> None:
    """Point llama_cpp, if it is not imported yet, at the libraries inside this package."""
    if _lib_dir().is_dir():
        os.environ.setdefault(PATH_VARIABLE, str(_lib_dir()))


@functools.cache
def load() -> ctypes.CDLL:
    """Import llama_cpp and return its library with our functions declared.

    Raises:
        NativeLibraryError: The library is missing, not ours, or of another version.
    """
    imported_before = "llama_cpp" in sys.modules
    try:
        import llama_cpp
        import llama_cpp.llama_cpp as binding
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        msg = (
            f"llama_cpp {_installed()} does not load with the libraries in "
            f"{os.environ.get(PATH_VARIABLE, 'its own package')}: {error}. "
            f"pyinertia needs llama_cpp_python=={LLAMA_CPP_PYTHON} and its own llama.cpp; {REBUILD}"
        )
        raise NativeLibraryError(msg) from error
    if os.environ.get(PATH_VARIABLE) == str(_lib_dir()):
        del os.environ[PATH_VARIABLE]  # it has been read; child processes may have other libraries
    if llama_cpp.__version__ != LLAMA_CPP_PYTHON:
        msg = (
            f"llama_cpp_python {llama_cpp.__version__} is installed, this pyinertia needs "
            f"{LLAMA_CPP_PYTHON}: CMAKE_ARGS=-DLLAMA_BUILD=OFF pip install --no-cache-dir "
            f"llama_cpp_python=={LLAMA_CPP_PYTHON}"
        )
        raise NativeLibraryError(msg)
    lib: ctypes.CDLL = binding._lib
    if hasattr(lib, "llama_kv_evict_abi_version"):
        _check("ABI version", lib, lib.llama_kv_evict_abi_version(), ABI_VERSION)
    missing = [name for name in _SIGNATURES if not hasattr(lib, name)]
    if missing:
        raise NativeLibraryError(
            f"{lib._name} has no eviction engine ({missing[0]} is missing); "
            + _advice_for_stock_library(imported_before)
        )
    for name, (restype, argtypes) in _SIGNATURES.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    _check("params size", lib, lib.llama_kv_evict_params_size(), ctypes.sizeof(EvictParams))
    _check("cell size", lib, lib.llama_kv_evict_cell_size(), CELL.itemsize)
    _check("stats size", lib, lib.llama_kv_evict_stats_size(), ctypes.sizeof(EvictStats))
    return lib


def _installed() -> str:
    try:
        return metadata.version("llama_cpp_python")
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _advice_for_stock_library(imported_before: bool) -> str:
    if imported_before:
        return "llama_cpp was imported first, with another library; import pyinertia before it"
    if PATH_VARIABLE in os.environ:
        return f"unset {PATH_VARIABLE}={os.environ[PATH_VARIABLE]}, or {REBUILD}"
    return f"pyinertia/lib holds no such library; {REBUILD}"


def _check(what: str, lib: ctypes.CDLL, theirs: int, ours: int) -> None:
    if theirs != ours:
        msg = f"{lib._name} reports {what} {theirs}, this pyinertia needs {ours}; {REBUILD}"
        raise NativeLibraryError(msg)


def make_params(policy: KVPolicy, compact: bool, n_ctx: int = 0) -> EvictParams:
    """Return the C form of a policy; n_ctx: positions of the context, 0 for as many as cells."""
    params: EvictParams = load().llama_kv_evict_default_params()
    for name in ("beta", "n_sink", "n_recent", "n_window", "n_pool", "n_refresh", "seed", "frozen"):
        setattr(params, name, getattr(policy, name))
    params.scorer = SCORERS[policy.scorer]
    params.aggregation = AGGREGATIONS[policy.aggregation]
    params.heads = HEADS[policy.heads]
    params.lambda_ = policy.lambda_ or 0.0
    if isinstance(policy.n_budget, float):
        params.n_budget, params.budget_share = policy.n_least, policy.n_budget
    else:
        params.n_budget, params.budget_share = policy.n_budget, 0.0
    params.bounded = policy.prefill == "bounded"
    params.n_ctx = n_ctx
    params.compact = compact
    return params


def attach(ctx: int, policy: KVPolicy, compact: bool, n_ctx: int = 0) -> str:
    """Give a context an eviction engine. Returns why it cannot have one, "" if all is well.

    Raises:
        PolicyError: The policy's layer_weights or protect do not fit this model and budget, or its
            scorer_file cannot be read.
    """
    lib, message = load(), ctypes.create_string_buffer(1024)
    scorer = learned.read(policy.scorer_file) if policy.scorer == "learned" else None
    params = make_params(policy, compact, n_ctx)
    if not lib.llama_kv_evict_attach(ctx, params, message, len(message)):
        return message.value.decode("utf-8", "replace") or "the library gave no reason"
    if policy.layer_weights is not None:
        weights = np.array(policy.layer_weights, np.float32)
        if not lib.llama_kv_evict_set_layer_weights(ctx, weights.ctypes.data, weights.size):
            needed = lib.llama_kv_evict_n_layer(ctx)
            msg = (
                f"layer_weights has {weights.size} weights, this model has {needed} scored layers; "
                "give one for each"
            )
            raise PolicyError(msg)
    if scorer is not None and (reason := set_weights(ctx, scorer.n_hidden, scorer.flat())):
        raise PolicyError(f"scorer_file={policy.scorer_file!r}: {reason}")
    if reason := protect(ctx, policy.protect):
        raise PolicyError(reason)
    return ""


def set_weights(ctx: int, n_hidden: int, weights: npt.NDArray[np.float32]) -> str:
    """Give a context's learned scorer its numbers, float32 [n]. Returns why not, "" if so."""
    message, flat = ctypes.create_string_buffer(1024), np.ascontiguousarray(weights, np.float32)
    if load().llama_kv_evict_set_weights(
        ctx, n_hidden, flat.ctypes.data, flat.size, message, len(message)
    ):
        return ""
    return message.value.decode("utf-8", "replace")


def features(ctx: int, seq_id: int) -> npt.NDArray[np.float32]:
    """Return the features of the resident cells by position, float32 [n, 7], [0, 7] without."""
    call, n_features = load().llama_kv_evict_features, len(learned.FEATURES)
    found = np.zeros(max(0, call(ctx, seq_id, None, 0)), np.float32)
    call(ctx, seq_id, found.ctypes.data, found.size)
    return found.reshape(-1, n_features)


def protect(ctx: int, ranges: Iterable[tuple[int, int]]) -> str:
    """Protect these position ranges and no others. Returns why it cannot be, "" if all is well."""
    lib = load()
    lib.llama_kv_evict_unprotect(ctx)
    for p0, p1 in ranges:
        if not lib.llama_kv_evict_protect(ctx, p0, p1):
            return f"the budget has no room for the protected positions [{p0}, {p1})"
    return ""


def prompt(ctx: int, seq_id: int, n_tokens: int) -> None:
    """Announce that the next n_tokens tokens are prompt and that those after them are not."""
    load().llama_kv_evict_prompt(ctx, seq_id, n_tokens)


def probe(ctx: int, seq_id: int, n_tokens: int) -> bool:
    """Announce that the next n_tokens tokens are a probe; 0 takes in what they saw.

    Returns False if the sequence is not in a bounded prompt.
    """
    return bool(load().llama_kv_evict_probe(ctx, seq_id, n_tokens))


def cells(ctx: int, seq_id: int) -> npt.NDArray[np.void] | None:
    """Return the resident cells by position, [n] of `CELL`; None if there is no such sequence."""
    lib = load()
    n_cells = lib.llama_kv_evict_cells(ctx, seq_id, None, 0)
    if n_cells < 0:
        return None
    result = np.zeros(n_cells, CELL)
    lib.llama_kv_evict_cells(ctx, seq_id, result.ctypes.data, n_cells)
    return result


def keep(ctx: int, seq_id: int, positions: npt.NDArray[np.int32]) -> int:
    """Evict all but these positions; returns how many left, -2 if one is not resident."""
    contiguous = np.ascontiguousarray(positions, np.int32)
    n_evicted: int = load().llama_kv_evict_keep(
        ctx, seq_id, contiguous.ctypes.data, contiguous.size
    )
    return n_evicted


def can_close_gaps(ctx: int) -> bool:
    """Whether the positions of a context can be changed; asked while its cache is empty."""
    return bool(load().llama_kv_evict_close_gaps(ctx, 0, 0, None, 0) == 0)


def close_gaps(ctx: int, seq_id: int, n_new: int) -> npt.NDArray[np.int32] | None:
    """Make room for n_new tokens and renumber the resident positions 0, 1, ...

    Returns the old position of each new one, [n]; None where positions cannot be changed.
    """
    lib = load()
    found = cells(ctx, seq_id)
    if found is None or not found.size:
        return None
    old = np.zeros(int(found["pos"][-1]) + 1, np.int32)
    n = lib.llama_kv_evict_close_gaps(ctx, seq_id, n_new, old.ctypes.data, old.size)
    return old[:n] if n > 0 else None


def get_state(ctx: int, seq_id: int) -> bytes:
    """Return what the engine knows about a sequence; b"" without an engine."""
    lib = load()
    size = lib.llama_kv_evict_state_get(ctx, seq_id, None, 0)
    data = ctypes.create_string_buffer(size)
    lib.llama_kv_evict_state_get(ctx, seq_id, data, size)
    return data.raw[:size]


def set_state(ctx: int, seq_id: int, data: bytes) -> str:
    """Take over what `get_state` returned, b"" to forget. Returns why it cannot be, "" if so."""
    message = ctypes.create_string_buffer(1024)
    if load().llama_kv_evict_state_set(ctx, seq_id, data, len(data), message, len(message)):
        return ""
    return message.value.decode("utf-8", "replace") or "the library gave no reason"


def stats(ctx: int) -> dict[str, Any]:
    """Return the counters by name; empty without an engine."""
    values = EvictStats()
    if not load().llama_kv_evict_get_stats(ctx, ctypes.byref(values)):
        return {}
    return {name: getattr(values, name) for name, _ in EvictStats._fields_}


def devices() -> Sequence[Device]:
    """Return the compute devices of the loaded library."""
    from llama_cpp._ctypes_extensions import load_shared_library

    folder = Path(load()._name).parent
    call: dict[str, Any] = {}
    for name, (library, restype, argtypes) in _DEVICE_SIGNATURES.items():
        function = getattr(load_shared_library(library, folder), name)
        function.restype, function.argtypes = restype, argtypes
        call[name.removeprefix("ggml_backend_dev_")] = function
    found = []
    for handle in map(call["get"], range(call["count"]())):
        n_free, n_total = ctypes.c_size_t(), ctypes.c_size_t()
        call["memory"](handle, ctypes.byref(n_free), ctypes.byref(n_total))
        name, description = call["name"](handle).decode(), call["description"](handle).decode()
        found.append(Device(name, description, n_free.value, n_total.value))
    return found
