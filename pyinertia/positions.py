"""Positions: a sequence has n_ctx of them; used up, they are an error, or the gaps are closed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pyinertia import _native
from pyinertia.drafts import Drafts
from pyinertia.errors import PolicyError
from pyinertia.interrupts import deferred
from pyinertia.reuse import Closed, n_in_place

KV_POSITIONS = ("keep", "compact")
PROMPT, DECODE = "prompt", "decode"


class Positions(Drafts):
    """A model that may renumber the positions in its cache."""

    _kv_phase: str | None  # PROMPT or DECODE while tokens are evaluated for a generator

    def n_ctx(self) -> int:
        """Return the number of positions; llama.cpp's own number is padded to 256."""
        return self.__dict__.get("_n_positions") or int(super().n_ctx())

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self._n_positions:
            msg = (
                f"{n_tokens} tokens exceed the context window of {self._n_positions}; "
                "shorten the prompt, or create the Llama with a larger n_ctx"
            )
            raise ValueError(msg)

    @property
    def _kv_closes(self) -> bool:
        return bool(self._kv_arguments["kv_positions"] == "compact")

    def _check_compact(self) -> None:
        reason, budget = "", self.kv_policy.n_budget
        if not self.kv_policy.evicts:
            reason = f"{self._kv_named()} evicts nothing, so no gaps can be closed"
        elif not isinstance(budget, float) and budget >= self._n_positions:
            reason = f"a budget of {budget} cells leaves no gaps in {self._n_positions} positions"
        elif self.draft_model is not None:
            reason = "a draft_model takes positions back"
        elif self._logits_all:
            reason = "logits_all=True numbers the logits by position"
        elif not _native.can_close_gaps(self.ctx):
            reason = (
                "the keys in this cache cannot be rotated (hybrid models, M-RoPE, sliding windows "
                "without swa_full=True, quantised keys of heads whose size is no multiple of 64)"
            )
        if reason:
            self.close()
            msg = f"kv_positions='compact': {reason}; use kv_positions='keep' and a larger n_ctx"
            raise PolicyError(msg)

    def _check_cells(self, n_pos: int, n_new: int) -> None:
        # a full prefill evicts nothing while a prompt enters, and a token has to follow it
        n_kept = int(np.count_nonzero(self._cached().positions < n_pos))
        if not self._kv_bounded and n_kept + n_new >= self._n_positions:
            msg = (
                f"{n_new} new tokens beside {n_kept} in the cache exceed its {self._n_positions} "
                "cells; shorten the prompt, or create the Llama with kv_prefill='bounded' or a "
                "larger n_ctx"
            )
            raise ValueError(msg)

    def _reopen(self) -> None:
        """Nothing is left of the positions that moved: numbers mean what they say again."""
        if self.n_tokens < self._kv_closed.n_pos:
            self._kv_closed = Closed()
            self._protect(list(self.kv_policy.protect), min(self._kv_n_system, self.n_tokens))

    def _eval_parts(self, tokens: Sequence[int], phase: str) -> None:
        """Evaluate more tokens than there are positions: before each batch gaps are closed."""
        n_query = len(self._question()) if phase == PROMPT else 0
        n_step = self.n_batch - n_query
        before, self._kv_phase = self._kv_phase, phase
        try:
            for start in range(0, len(tokens), n_step):
                part = tokens[start : start + n_step]
                self._close_gaps(len(part), n_query)
                self.eval(part)
        finally:
            self._kv_phase = before

    @deferred()
    def _close_gaps(self, n_new: int, n_query: int = 0) -> None:
        """Renumber the resident positions if n_new more, and a question, would pass n_ctx."""
        if self.n_tokens + n_new + n_query <= self._n_positions:
            return
        cached = self._cached()
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        _native.prompt(self.ctx, 0, n_new if self._kv_phase == PROMPT else 0)
        old = _native.close_gaps(self.ctx, 0, n_new + n_query)
        if old is None:
            msg = "the positions cannot be renumbered; create the Llama with a larger n_ctx"
            raise RuntimeError(msg)

        def renumbered(pos: int) -> int:
            return int(np.searchsorted(old, pos)) + max(0, pos - self.n_tokens)

        moved = [(renumbered(p0), renumbered(p1)) for p0, p1 in self._kv_ranges]
        self._kv_ranges = [(p0, p1) for p0, p1 in moved if p0 < p1]
        self._kv_n_system = renumbered(self._kv_n_system)
        self.input_ids[: old.size] = self.input_ids[old]
        n_whole = min(cached.n_whole, n_in_place(old), n_in_place(self.kv_cells()["pos"]))
        self._kv_closed = Closed(cached.tokens.tolist(), old.size, n_whole)
        self.n_tokens = old.size
        if self.n_tokens + n_new > self._n_positions:
            msg = (
                f"{n_new} more tokens exceed the context window of {self._n_positions}, of which "
                f"{self.n_tokens} are resident; use kv_prefill='bounded', or a larger n_ctx"
            )
            raise ValueError(msg)
