"""What a model's cache takes, without allocating it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from pyinertia import _native
from pyinertia.policy import POLICIES, KVPolicy

_native.load()  # before llama_cpp is imported

import llama_cpp  # noqa: E402
from llama_cpp import _internals  # noqa: E402

if TYPE_CHECKING:
    from pyinertia.llama import Llama

CELL_PAD = 256  # llama.cpp rounds a cache up to a multiple of it


class CacheSize:
    """Sizes of caches of a model, from two small ones: a cache grows by whole cells."""

    def __init__(self, llm: Llama, n_ctx: int) -> None:
        """Measure; n_ctx is the number of positions that the model would be used with."""
        self._llm, self._n_ctx = llm, n_ctx
        params = llm.context_params
        n_swa = llama_cpp.llama_model_n_swa(llm.model)
        self._n_least = n_swa + params.n_ubatch if n_swa else 0  # a window's cells
        self._n_window = pad(self._n_least)
        n = max(self._n_window, CELL_PAD)
        few, more = self._measured(n), self._measured(n + CELL_PAD)
        self.bytes_per_token: int | None = None
        if few is not None and more is not None:
            self.bytes_per_token = (more - few) // CELL_PAD
            rest = few - n * self.bytes_per_token
            self._per_window_cell = rest // self._n_window if self._n_window else 0

    def n_bytes(self, n_cells: int | None) -> int | None:
        """Bytes of K and V in a cache of so many cells; None if the engine cannot tell."""
        if self.bytes_per_token is None or n_cells is None:
            return None
        n = pad(n_cells)
        return n * self.bytes_per_token + min(n, self._n_window) * self._per_window_cell

    def n_cells(self, policy: KVPolicy) -> int:
        """Cells that `Llama` allocates under a policy."""
        if policy.prefill != "bounded":
            return pad(self._n_ctx)
        n_batch = self._llm.context_params.n_batch
        return min(pad(max(int(policy.n_budget) + n_batch, self._n_least)), pad(self._n_ctx))

    def refusal(self, policy: KVPolicy) -> str:
        """Why the policy cannot run, in the engine's words; "" if it can."""
        n = self.n_cells(policy) if policy.prefill == "bounded" else CELL_PAD
        with self._context(n) as ctx:
            refusal = _native.attach(ctx, policy, True, max(self._n_ctx, n))
        return refusal if policy.evicts else ""

    def _measured(self, n_cells: int) -> int | None:
        with self._context(n_cells) as ctx:
            if _native.attach(ctx, POLICIES["full"], True):
                return None
            n_bytes: int = _native.stats(ctx)["kv_bytes"]
        return n_bytes

    @contextmanager
    def _context(self, n_cells: int) -> Iterator[int]:
        params = type(self._llm.context_params).from_buffer_copy(self._llm.context_params)
        params.n_ctx = n_cells
        model, verbose = self._llm._model, self._llm.verbose
        with closing(_internals.LlamaContext(model=model, params=params, verbose=verbose)) as made:
            yield made.ctx


def pad(n_cells: int) -> int:
    """Cells that llama.cpp makes of so many."""
    return -(-n_cells // CELL_PAD) * CELL_PAD
