"""What can be asked of a cache's eviction engine."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from typing import Any

import numpy as np
import numpy.typing as npt

from pyinertia import _native
from pyinertia.binding import llama_cpp
from pyinertia.errors import PolicyError
from pyinertia.policy import QUERY_SCORERS, KVPolicy
from pyinertia.reuse import Cached, Closed
from pyinertia.stats import KVStats


class EngineCalls(llama_cpp.Llama):
    """A llama.cpp model whose cache has an engine, unless `_kv_refusal` says why it has none."""

    kv_policy: KVPolicy
    _kv_refusal: str
    _kv_arguments: dict[str, Any]
    _kv_query_tokens: list[int] | None  # None: a prompt's own end
    _kv_ending: list[int]
    _kv_closed: Closed

    @property
    def _kv_bounded(self) -> bool:
        return self.kv_policy.prefill == "bounded"

    def _kv_named(self) -> str:
        return f"kv_policy={self._kv_arguments['kv_policy']!r}"

    def kv_cells(self, seq_id: int = 0) -> npt.NDArray[np.void]:
        """Return the resident cells of a sequence.

        Args:
            seq_id: The sequence; a `Llama` has one, 0.

        Returns:
            Structured array [n_resident] with fields pos (int32) and score (float32), by position.
                Scores are as of the last scored query, and have no unit: compare them within
                one call.

        Raises:
            ValueError: There is no such sequence, or the model was closed.
            PolicyError: The cache of this model has no engine.
        """
        ctx = self._kv_ctx()
        known = isinstance(seq_id, Integral) and 0 <= seq_id < 2**31
        cells = _native.cells(ctx, int(seq_id)) if known else None
        if cells is None:
            msg = f"seq_id={seq_id!r}: this context has no such sequence; use 0"
            raise ValueError(msg)
        return cells

    def kv_stats(self) -> KVStats:
        """Return the engine's counters: cells, tokens, bytes, milliseconds.

        Raises:
            ValueError: The model was closed.
            PolicyError: The cache of this model has no engine.
        """
        return KVStats(**_native.stats(self._kv_ctx()))

    def kv_evict(self, keep: Iterable[int]) -> int:
        """Keep exactly these positions and the newest one; evict the rest, sinks included.

        Args:
            keep: Positions, each of them resident.

        Returns:
            The number of evicted cells.

        Raises:
            ValueError: A position is not resident, or not a whole number, nothing is evicted then;
                or the model was closed.
            PolicyError: The cache of this model has no engine.
        """
        ctx = self._kv_ctx()
        listed = np.asarray(list(keep))
        if listed.size and (listed.ndim != 1 or listed.dtype.kind not in "iu"):
            msg = f"kv_evict(keep={keep!r}): keep must be positions, whole numbers"
            raise ValueError(msg)
        absent = np.setdiff1d(listed, self.kv_cells()["pos"])
        if absent.size:
            msg = (
                f"kv_evict: positions {absent[:8].tolist()} are not resident; "
                "kv_cells()['pos'] lists those that are"
            )
            raise ValueError(msg)
        return _native.keep(ctx, 0, np.unique(listed).astype(np.int32))

    def kv_query(self, text: str | None) -> None:
        """Name what the next prompts will be asked, so that a bounded prefill keeps it.

        While a prompt enters, the text is shown to the model after each batch, and the attention
        of its last n_window tokens ranks the cells; it leaves again before the next batch.

        Args:
            text: The question, in the words of the prompt. None, as at the start: the last 64
                tokens of each prompt that `generate` evaluates in several batches. "": none, cells
                are ranked by the batches so far.

        Raises:
            PolicyError: The policy's prefill is not "bounded", its scorer does not look at queries,
                or the model is a hybrid, whose recurrent part cannot take the question back.
            ValueError: The question is longer than half of n_batch, or than n_ubatch in a model
                with sliding windows.
        """
        self._kv_ctx()
        if not text:
            self._kv_query_tokens = None if text is None else []
            return
        if not self._kv_bounded:
            msg = f"kv_query needs kv_prefill='bounded', {self._kv_named()} prefills whole prompts"
            raise PolicyError(msg)
        if self.kv_policy.scorer not in QUERY_SCORERS:
            msg = (
                f"kv_query needs a scorer that looks at queries ({', '.join(QUERY_SCORERS)}), "
                f"{self._kv_named()} does not"
            )
            raise PolicyError(msg)
        if self._is_hybrid:
            msg = "kv_query cannot run on a hybrid model; put the question before the document"
            raise PolicyError(msg)
        tokens = self.tokenize(text.encode(), add_bos=False, special=True)
        n_most, name = self.n_batch // 2, "half of n_batch"
        if llama_cpp.llama_model_n_swa(self.model) and n_most > self.context_params.n_ubatch:
            # a second ubatch would take cells from the window that the next token needs
            n_most, name = self.context_params.n_ubatch, "n_ubatch"
        if len(tokens) > n_most:
            msg = (
                f"kv_query: {len(tokens)} tokens are more than {name}, {n_most}; shorten the "
                f"question, or create the Llama with a larger {name.split()[-1]}"
            )
            raise ValueError(msg)
        self._kv_query_tokens = tokens

    def _question(self) -> list[int]:
        """What cuts within a prompt are ranked by: what was named, or the prompt's own end."""
        return self._kv_ending if self._kv_query_tokens is None else self._kv_query_tokens

    def _kv_ctx(self) -> int:
        self._check_open()
        if self._kv_refusal:
            msg = f"this context has no eviction engine: {self._kv_refusal}"
            raise PolicyError(msg)
        return self.ctx

    def _check_open(self) -> None:
        if self._ctx.ctx is None:
            msg = "this Llama is closed"
            raise ValueError(msg)

    def _cached(self) -> Cached:
        """Return what the cache holds; tokens of a step that was interrupted have not been."""
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        ids, closed = self._input_ids, self._kv_closed
        if self.n_tokens < closed.n_pos:  # taken back by hand
            ids, closed = ids[: closed.n_whole], Closed()
        if self._kv_refusal:
            positions = np.arange(ids.size, dtype=np.int32)
        else:
            positions = self.kv_cells()["pos"]
        return Cached(
            tokens=np.append(np.array(closed.tokens, np.intc), ids[closed.n_pos :]),
            positions=positions[positions < self.n_tokens],
            n_tokens=self.n_tokens,
            closed=closed,
            pos_min=llama_cpp.llama_memory_seq_pos_min(self._ctx.memory, 0),
            n_swa=llama_cpp.llama_model_n_swa(self.model),
        )
