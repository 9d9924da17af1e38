"""Runs single ggml ops on the CPU backend, through ctypes: no more than test_ops.py needs.

Shapes are numpy's (outermost first), the reverse of ggml's.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import c_bool, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path

import numpy as np

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8,
         "iq4_nl": 20, "i32": 26, "bf16": 30}  # fmt: skip

NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "i32": np.int32}

PROTOTYPES = {
    "ggml_tensor_overhead": (c_size_t, []),
    "ggml_graph_overhead": (c_size_t, []),
    "ggml_free": (None, [c_void_p]),
    "ggml_new_tensor": (c_void_p, [c_void_p, c_int, c_int, c_void_p]),
    "ggml_view_4d": (c_void_p, [c_void_p] * 2 + [c_int64] * 4 + [c_size_t] * 4),
    "ggml_cast": (c_void_p, [c_void_p, c_void_p, c_int]),
    "ggml_row_size": (c_size_t, [c_int, c_int64]),
    "ggml_get_data": (c_void_p, [c_void_p]),
    "ggml_quantize_chunk": (
        c_size_t,
        [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p],
    ),
    "ggml_new_graph": (c_void_p, [c_void_p]),
    "ggml_build_forward_expand": (None, [c_void_p, c_void_p]),
    "ggml_kv_attn": (c_void_p, [c_void_p] * 9 + [c_int, c_float, c_float, c_float, c_bool]),
    "ggml_kv_mass": (
        c_void_p,
        [c_void_p] * 9 + [c_int, c_int, c_int, c_float, c_float, c_float, c_bool],
    ),
    "ggml_kv_mass_take_time_us": (c_int64, [c_void_p]),
    "ggml_kv_move": (c_void_p, [c_void_p] * 3 + [c_int]),
    "ggml_backend_cpu_init": (c_void_p, []),
    "ggml_backend_cpu_set_n_threads": (None, [c_void_p, c_int]),
    "ggml_backend_cpu_set_use_ref": (None, [c_void_p, c_bool]),
    "ggml_backend_graph_compute": (c_int, [c_void_p, c_void_p]),
    "ggml_backend_free": (None, [c_void_p]),
}


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


class Library:
    """The functions of PROTOTYPES, without their prefix ggml_."""

    def __init__(self, lib_dir: Path) -> None:
        form = {"win32": "{}.dll", "darwin": "lib{}.dylib"}.get(sys.platform, "lib{}.so")
        libs = [ctypes.CDLL(str(lib_dir / form.format(n))) for n in ("ggml-base", "ggml-cpu")]
        for name, (restype, argtypes) in PROTOTYPES.items():
            fn = next(getattr(lib, name) for lib in libs if hasattr(lib, name))
            fn.restype, fn.argtypes = restype, argtypes
            setattr(self, name.removeprefix("ggml_"), fn)
        self.init = libs[0].ggml_init
        self.init.restype, self.init.argtypes = c_void_p, [InitParams]

    def row_bytes(self, type_: str, n: int) -> int:
        return self.row_size(TYPES[type_], n)


class Tensor:
    def __init__(self, lib: Library, ptr: int, type_: str, shape: tuple[int, ...]) -> None:
        self.lib, self.ptr, self.type, self.shape = lib, ptr, type_, shape

    def bytes(self) -> np.ndarray:
        """Raw rows, writable [..., bytes of a row]. Not for views with gaps."""
        shape = (*self.shape[:-1], self.lib.row_bytes(self.type, self.shape[-1]))
        buf = (ctypes.c_uint8 * int(np.prod(shape))).from_address(self.lib.get_data(self.ptr))
        return np.frombuffer(buf, np.uint8).reshape(shape)

    def array(self) -> np.ndarray:
        return self.bytes().view(NUMPY_TYPES[self.type])

    def view(self, ctx: Context, shape: tuple[int, ...], start: int = 0) -> Tensor:
        """The first entries of the tensor's axes; start: index into its last axis but one."""
        row = self.lib.row_bytes(self.type, self.shape[-1])
        nb = [row]
        for n in self.shape[-2::-1]:
            nb.append(nb[-1] * n)
        nb += [nb[-1]] * (3 - len(nb))
        ne = [*shape[::-1], 1, 1][:4]
        ptr = self.lib.view_4d(ctx.ptr, self.ptr, *ne, *nb[:3], start * row)
        return Tensor(self.lib, ptr, self.type, shape)


class Context:
    """Memory for tensors, and a backend to compute them."""

    def __init__(self, lib: Library, mem_size: int = 64 << 20) -> None:
        self.lib = lib
        self.ptr = lib.init(InitParams(mem_size, None, False))

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *exc: object) -> None:
        self.lib.free(self.ptr)

    def empty(self, type_: str, shape: tuple[int, ...]) -> Tensor:
        ne = (c_int64 * len(shape))(*shape[::-1])
        return Tensor(
            self.lib, self.lib.new_tensor(self.ptr, TYPES[type_], len(shape), ne), type_, shape
        )

    def tensor(self, values: np.ndarray, type_: str) -> Tensor:
        """A tensor of these values; any float type, quantised ones too."""
        t = self.empty(type_, values.shape)
        if type_ == "i32":
            t.array()[:] = values
        else:
            x = np.ascontiguousarray(values, np.float32)
            n = x.shape[-1]
            self.lib.quantize_chunk(
                TYPES[type_], x.ctypes.data, self.lib.get_data(t.ptr), 0, x.size // n, n, None
            )
        return t

    def cast(self, t: Tensor, type_: str) -> Tensor:
        res = Tensor(self.lib, self.lib.cast(self.ptr, t.ptr, TYPES[type_]), type_, t.shape)
        self.compute(res.ptr)
        return res

    def rounded(self, values: np.ndarray, type_: str) -> np.ndarray:
        """The values as a tensor of this type holds them."""
        x = self.cast(self.tensor(values, "f32"), type_)
        return (x if type_ == "f32" else self.cast(x, "f32")).array().astype(np.float64)

    def result(self, ptr: int, shape: tuple[int, ...]) -> np.ndarray:
        """A copy of the contiguous float32 tensor."""
        return Tensor(self.lib, ptr, "f32", shape).array().copy()

    def compute(self, ptr: int, n_threads: int = 1, use_ref: bool = False) -> None:
        graph = self.lib.new_graph(self.ptr)
        self.lib.build_forward_expand(graph, ptr)
        backend = self.lib.backend_cpu_init()
        self.lib.backend_cpu_set_n_threads(backend, n_threads)
        self.lib.backend_cpu_set_use_ref(backend, use_ref)
        status = self.lib.backend_graph_compute(backend, graph)
        self.lib.backend_free(backend)
        assert status == 0
