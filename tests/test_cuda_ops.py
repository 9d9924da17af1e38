"""The CUDA kernels' bodies, thread after thread on the host, against float64 and the CPU reference.

The same source as on a GPU (ggml-cuda/kv-*-block.cuh), so indices, masks, tails and reductions are
checked on every machine. What only a GPU shows is not: rounding of its own functions, speed.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
from dataclasses import dataclass

import bootstrap
import numpy as np
import pytest
from conftest import OP_CASES
from ggml_ctypes import Context, Library
from op_cases import FLOATS, QUANTS, Case, random_case
from reference import kv_move

TYPES = ["f32", "f16", "bf16", "q8_0", "q4_0"]  # of K

EXPECTED = {"CUDA KV_MASS on the host": 184, "CUDA KV_MOVE on the host": 36}  # cases below


@dataclass(frozen=True)
class CudaHost:
    """The kernels as built for the host; reverse: threads and blocks run last to first."""

    library: ctypes.CDLL
    reverse: bool = False
    n_slot: int = 0  # most queries of a pass, 0: as on a GPU

    def compute(self, op: int) -> int:
        done = self.try_compute(op)
        assert done > 0
        return done

    def try_compute(self, op: int) -> int:
        function = self.library.kv_cuda_host_compute
        function.argtypes = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_int]
        result: int = function(op, self.reverse, self.n_slot)
        return result


@pytest.fixture(scope="module")
def lib(lib_dir):
    return Library(lib_dir)


@pytest.fixture(scope="module")
def host(lib, request):
    path = bootstrap.cuda_host_library(request.config.getoption("--build"))
    if not path.is_file():
        pytest.fail("not built: run python scripts/test.py")
    return CudaHost(ctypes.CDLL(str(path)))


@pytest.fixture
def count(request):
    """Counts cases of an op, for the summary and its bar."""

    def one_more(op: str) -> None:
        cases, name = request.config.stash[OP_CASES], f"CUDA {op} on the host"
        cases[name] = cases.get(name, 0) + 1

    return one_more


def run(lib: Library, case: Case, host: CudaHost | None, **changes) -> np.ndarray:
    case = copy.copy(case)
    case.device = dataclasses.replace(host, **changes) if host else None
    case.use_ref = host is None
    return case.run(lib)


def check(lib: Library, host: CudaHost, case: Case) -> None:
    """Right by float64 and by the CPU reference, and the same in any order of threads."""
    case.device = host
    case.check(lib)
    rows = case.run(lib)
    assert np.array_equal(run(lib, case, host, reverse=True), rows)
    assert np.all(np.abs(rows - run(lib, case, None)) <= 2 * case.expect(lib)[1])


# the cases of patches/overlay/tests/test-kv-evict.h
SHAPES = [(n_embd, n_kv, n) for n_embd in (64, 128, 256) for n_kv in (1, 33, 512) for n in (1, 9)]
FLAGS = [
    {"max_bias": bias, "softcap": cap, "sinks": sinks, "assign": assign}
    for bias in (0.0, 8.0)
    for cap in (0.0, 30.0)
    for sinks in (False, True)
    for assign in (False, True)
]


@pytest.mark.parametrize(("n_embd", "n_kv", "n_tokens"), SHAPES)
@pytest.mark.parametrize("type_k", TYPES)
def test_every_type(lib, host, count, type_k, n_embd, n_kv, n_tokens):
    n_stream, type_mask = (1, "f16") if n_tokens == 1 else (2, "f32")
    fixed = {"n_head_kv": 2, "n_gqa": 3, "n_stream": n_stream, "type_mask": type_mask}
    fixed |= {"n_embd": n_embd, "n_kv": n_kv, "n_tokens": n_tokens, "softcap": 0.0}
    check(lib, host, random_case(type_k, n_kv, **fixed))
    count("KV_MASS")


@pytest.mark.parametrize("n_gqa", [*range(1, 9), 16])
def test_every_gqa(lib, host, count, n_gqa):
    check(lib, host, random_case("f16", 5, n_embd=80, n_gqa=n_gqa, n_kv=257, n_tokens=5))
    check(lib, host, random_case("q8_0", 6, n_gqa=n_gqa, n_kv=100, n_tokens=1))
    count("KV_MASS")
    count("KV_MASS")


@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(map(str, flags.values())))
def test_every_flag(lib, host, count, flags):
    check(lib, host, random_case("f16", 3, n_head_kv=3, n_gqa=3, n_kv=300, n_tokens=6, **flags))
    count("KV_MASS")


@pytest.mark.parametrize("n_embd", [8, 40, 72, 96, 112, 192, 320, 512, 576, 1024])
def test_every_head_size(lib, host, count, n_embd):
    """Heads with chunks for a part of the lanes, for all of them, and for several turns."""
    check(lib, host, random_case("bf16", 8, n_embd=n_embd, n_kv=70, n_head_kv=2, n_gqa=2))
    count("KV_MASS")


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("type_k", TYPES)
def test_random(lib, host, count, type_k, seed):
    n_kv, n_tokens = [3, 31, 64, 65, 100, 257, 511, 1000][seed], [1, 2, 9, 40][seed % 4]
    check(lib, host, random_case(type_k, 100 + seed, n_kv=n_kv, n_tokens=n_tokens))
    count("KV_MASS")


@pytest.mark.parametrize(("n_kv", "n_embd"), [(8191, 64), (20000, 8)])
def test_long_cache(lib, host, count, n_kv, n_embd):
    """As many tiles as there may be, of one step and of several."""
    check(lib, host, random_case("f16", 9, n_kv=n_kv, n_embd=n_embd, n_head_kv=1, n_tokens=1))
    count("KV_MASS")


def test_a_prompts_window(lib, host, count):
    """Some of a batch's queries are scored: more tokens than threads, several tokens a thread."""
    shape = {"n_tokens": 600, "n_stream": 1, "n_kv": 640, "n_head_kv": 2, "n_gqa": 2}
    check(lib, host, random_case("f16", 11, n_embd=64, **shape))
    count("KV_MASS")


@pytest.mark.parametrize("n_slot", [1, 3])
def test_passes_do_not_show(lib, host, count, n_slot):
    case = random_case("f16", 12, n_tokens=9, n_stream=2, n_kv=100)
    assert np.array_equal(run(lib, case, host, n_slot=n_slot), run(lib, case, host))
    count("KV_MASS")


def test_more_queries_than_a_pass_has(lib, host, count):
    case = random_case("f16", 13, n_tokens=100, n_stream=1, n_kv=50, n_head_kv=1, n_gqa=2)
    case.rows = np.zeros((90, 63), "f4")
    case.row_idx[:] = -1
    case.row_idx[np.arange(5, 95)] = np.random.default_rng(0).permutation(90)
    check(lib, host, case)
    count("KV_MASS")


def test_nothing_to_score_changes_no_byte(lib, host, count):
    case = random_case("f16", 1, n_tokens=512, n_kv=200, assign=True)
    case.row_idx[:] = -1
    assert np.array_equal(run(lib, case, host), case.rows)
    count("KV_MASS")


@pytest.mark.parametrize("type_k", FLOATS)
def test_masked_cells_may_hold_anything(lib, host, count, type_k):
    case = random_case(type_k, 2, n_kv=70, n_tokens=3, assign=True)
    dark = np.arange(70) % 3 == 1
    case.mask[:, :, dark] = -np.inf
    clean = run(lib, case, host)
    case.k[:, dark] = np.nan
    assert np.array_equal(run(lib, case, host), clean)
    assert np.all(clean[case.row_idx[case.row_idx >= 0], :70][:, dark] == 0)
    count("KV_MASS")


def kv_mass_node(lib, c, type_k="f16", n_embd=64, kind=0, heads=0) -> int:
    f32 = [(1, 100), (1, 2, n_embd), (1, 1, 1, 100), (4,)]
    rows, q, mask, coef = (c.tensor(np.zeros(shape), "f32").ptr for shape in f32)
    k = c.tensor(np.zeros((1, 100, 2, n_embd)), type_k).ptr
    idx = c.tensor(np.zeros(1), "i32").ptr
    v = k if kind == 1 else None
    return lib.kv_mass(
        c.ptr, rows, q, k, v, mask, None, coef, idx, kind, heads, 0, 1.0, 0.0, 0.0, False
    )


@pytest.mark.parametrize(
    "other",
    [
        *({"kind": kind} for kind in (1, 2, 3, 4)),
        {"heads": 1},
        *({"type_k": type_k} for type_k in QUANTS if type_k not in TYPES),
        {"n_embd": 68},
        {"n_embd": 2048},
    ],
    ids=str,
)
def test_what_the_gpu_does_not_take(lib, host, other):
    """Other scorers, other types and odd heads are refused, not computed wrongly."""
    with Context(lib) as c:
        assert host.try_compute(kv_mass_node(lib, c)) == 1
        assert host.try_compute(kv_mass_node(lib, c, **other)) == 0


MOVES = [(type_, 1, n) for type_ in FLOATS + QUANTS for n in (32, 64, 1024)]
MOVES += [(type_, 0, n) for type_ in FLOATS for n in (5, 90, 300)]


@pytest.mark.parametrize(("type_", "dim", "n"), MOVES)
def test_kv_move(lib, host, count, type_, dim, n):
    rng = np.random.default_rng(n)
    shape = (2, 3, 90, n) if dim == 1 else (2, 3, 64, n)
    n_cells = shape[3 - dim]
    n_move = n_cells * 4 // 9
    src, dst = rng.permutation(n_cells)[: 2 * n_move].reshape(2, n_move)
    for reverse in (False, True):
        with Context(lib) as c:
            a = c.tensor(rng.normal(size=shape), type_)
            idx = c.tensor(np.stack([src, dst]), "i32")
            cells = a.bytes().reshape(*shape[:3], shape[3] if dim == 0 else 1, -1)
            expected = kv_move(cells, src, dst, axis=3 - dim)
            assert not np.array_equal(cells, expected)

            node = lib.kv_move(c.ptr, a.ptr, idx.ptr, dim)
            unit = dataclasses.replace(host, reverse=reverse).compute(node)
            assert np.array_equal(cells, expected)
            if dim == 1:  # the widest copies that the rows allow
                row = lib.row_bytes(type_, n)
                assert unit == next(size for size in (16, 8, 4, 2) if row % size == 0)
    count("KV_MOVE")
