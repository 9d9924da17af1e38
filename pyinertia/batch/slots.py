"""The engine-facing part: one context whose sequences are slots, and what enters and leaves them.

Every slot is a sequence with a stream, a budget and scores of its own. Nothing here decides what
runs when (schedule.py), or knows text (text.py).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import llama_cpp
import numpy as np

from pyinertia import _native
from pyinertia.errors import PolicyError
from pyinertia.llama import Llama
from pyinertia.loading import n_ctx_train
from pyinertia.policy import MAX_COUNT, KVPolicy, resolve_policy
from pyinertia.vocabulary import token_bytes

ERRORS = {
    1: "the cache has no free cells for it",
    2: "it was aborted",
    -1: "the batch is not valid",
    -3: "the computation failed",
}


class Slots(Llama):
    """A model with `n_parallel` slots: sequences that are evaluated together.

    With a policy that evicts, the prefill is bounded and a slot has n_budget + n_batch cells
    (rounded up to 256, and never fewer than a sliding window needs). Without one it has n_ctx.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        n_parallel: int,
        kv_policy: str | KVPolicy | None = None,
        kv_budget: int | None = None,
        kv_refresh: int | None = None,
        n_ctx: int = 0,
        **kwargs: Any,
    ) -> None:
        """Load a model; the keywords are those of `pyinertia.Llama`.

        Args:
            model_path: Path to the GGUF file.
            n_parallel: Number of slots.
            kv_policy: As in `pyinertia.Llama`.
            kv_budget: As in `pyinertia.Llama`, in cells.
            kv_refresh: As in `pyinertia.Llama`.
            n_ctx: Positions of a slot, 0 for as many as the model was trained for.
            **kwargs: Further keywords of `pyinertia.Llama`.

        Raises:
            PolicyError, ModelError, TypeError: As in `pyinertia.Llama`.
            ValueError: n_ctx or n_batch is below n_parallel, or the slots do not fit into memory.
        """
        self._n_parallel = n_parallel
        evicts = resolve_policy(kv_policy, kv_budget, kv_refresh).evicts
        n_ctx = n_ctx or n_ctx_train(os.fspath(model_path))
        if n_ctx * n_parallel > MAX_COUNT:
            msg = (
                f"n_ctx={n_ctx} times n_parallel={n_parallel} is more than {MAX_COUNT}; pass a "
                "smaller one of them"
            )
            raise ValueError(msg)
        n_batch = kwargs.get("n_batch", 512)
        if 0 < n_ctx < n_parallel or n_batch < n_parallel:
            msg = (
                f"n_parallel={n_parallel} slots need n_ctx and n_batch of at least as many tokens; "
                f"they are n_ctx={n_ctx}, n_batch={n_batch}"
            )
            raise ValueError(msg)
        try:
            super().__init__(
                model_path,
                kv_policy=kv_policy,
                kv_budget=kv_budget,
                kv_refresh=kv_refresh,
                kv_prefill="bounded" if evicts else None,
                n_ctx=n_ctx,
                **{"verbose": False, **kwargs},
            )
        except ValueError as error:
            if "llama_context" not in str(error):
                raise
            msg = (
                f"llama.cpp makes no context of n_parallel={n_parallel} slots with n_ctx={n_ctx}: "
                "pass a smaller n_parallel or n_ctx if memory is short"
                f"{'' if evicts else ' (a kv_policy bounds each slot by its budget)'}, flash_attn="
                "True if type_v is a quantised one; verbose=True shows its own words"
            )
            raise ValueError(msg) from error
        self._shared: list[int] = []
        self._shared_state: ctypes.Array[ctypes.c_uint8] | None = None

    @property
    def n_parallel(self) -> int:
        """Number of slots."""
        return self._n_parallel

    @property
    def n_positions(self) -> int:
        """Positions of a slot: most tokens of prompt and answer together."""
        return self._n_ctx

    def share(self, tokens: Sequence[int], n_most: int | None = None) -> int:
        """Evaluate a prefix once; prompts that begin with it get a copy, and it never leaves.

        To be called once, while all slots are empty. Recurrent and hybrid models do not share:
        their prompts are evaluated whole.

        Args:
            tokens: The prefix.
            n_most: Shorten it to this length. None: refuse one that is too long.

        Returns:
            The number of shared tokens.

        Raises:
            PolicyError: The budget has no room for the prefix.
        """
        tokens = list(tokens[:n_most])
        if not tokens:
            return 0
        protect = (*self.kv_policy.protect, (0, len(tokens)))
        if self.kv_policy.evicts and _native.protect(self.ctx, protect):
            n_least = replace(self.kv_policy, n_budget=MAX_COUNT, protect=protect).n_least
            msg = (
                f"the budget of {self.kv_policy.n_budget} cells has no room for a prefix of "
                f"{len(tokens)} tokens; pass a kv_budget of at least {n_least}, or a shorter prefix"
            )
            raise PolicyError(msg)
        if self._is_recurrent or self._is_hybrid:
            return 0
        self.announce(0, len(tokens))
        for start in range(0, len(tokens), self.n_batch):
            part = tokens[start : start + self.n_batch]
            if code := self.evaluate({0: part}, {0: start}):
                msg = f"the shared prefix cannot be evaluated: {explain(code)}"
                raise RuntimeError(msg)
        size = llama_cpp.llama_state_seq_get_size(self.ctx, 0)
        state = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data(self.ctx, state, size, 0):
            self._shared, self._shared_state = tokens, state
        self.leave(0)
        return len(self._shared)

    def enter(self, slot: int, tokens: Sequence[int]) -> int:
        """Begin a prompt in an empty slot. Returns how many of its tokens are already there."""
        n_past = self._copy_shared(slot) if self._begins_shared(tokens) else 0
        self.announce(slot, len(tokens) - n_past)
        return n_past

    def _begins_shared(self, tokens: Sequence[int]) -> bool:
        # one token at least is evaluated: the answer needs its logits
        n_shared = len(self._shared)
        return len(tokens) > n_shared and list(tokens[:n_shared]) == self._shared

    def _copy_shared(self, slot: int) -> int:
        state = self._shared_state
        if state is None:
            return 0
        n_read = llama_cpp.llama_state_seq_set_data(self.ctx, state, ctypes.sizeof(state), slot)
        return len(self._shared) if n_read else 0

    def announce(self, slot: int, n_tokens: int) -> None:
        """Say that the next n_tokens tokens of the slot are prompt."""
        if not self._kv_refusal:
            _native.prompt(self.ctx, slot, n_tokens)

    def evaluate(self, tokens: Mapping[int, Sequence[int]], n_past: Mapping[int, int]) -> int:
        """Evaluate tokens of some slots in one call, at most n_batch of them.

        Args:
            tokens: Slot -> its next tokens. Only the last one of each gets logits.
            n_past: Slot -> tokens it has.

        Returns:
            0, or the code of llama_decode: then the slots are as they were before.
        """
        batch, i = self._batch.batch, 0
        for slot in sorted(tokens):
            for k, token in enumerate(tokens[slot]):
                batch.token[i], batch.pos[i] = token, n_past[slot] + k
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, slot
                batch.logits[i] = k == len(tokens[slot]) - 1
                i += 1
        batch.n_tokens = i
        code: int = llama_cpp.llama_decode(self.ctx, batch)
        if code:  # some of them may have entered
            for slot in tokens:
                llama_cpp.llama_memory_seq_rm(self._ctx.memory, slot, n_past[slot], -1)
        return code

    def leave(self, slot: int) -> int:
        """Empty a slot. Returns the number of cells it held."""
        held = None if self._kv_refusal else _native.cells(self.ctx, slot)
        pos_max = llama_cpp.llama_memory_seq_pos_max(self._ctx.memory, slot)
        llama_cpp.llama_memory_seq_rm(self._ctx.memory, slot, -1, -1)
        self.announce(slot, -1)  # the engine sees that it is empty before others enter
        return pos_max + 1 if held is None else len(held)

    def move(self, source: int, target: int, n_left: int) -> bool:
        """Move a sequence, scores included, to an empty slot; not in recurrent models.

        Args:
            source: Its slot.
            target: The empty one.
            n_left: Tokens of its prompt that are still to come.
        """
        if self._is_recurrent or self._is_hybrid:
            return False
        memory = self._ctx.memory
        llama_cpp.llama_memory_seq_cp(memory, source, target, -1, -1)
        llama_cpp.llama_memory_seq_rm(memory, source, -1, -1)
        self.announce(target, max(0, n_left))
        return True

    def draw(self, sampler: llama_cpp._internals.LlamaSampler, row: int) -> int:
        """Sample a token from the logits of a token of the last call, by its index there."""
        return int(sampler.sample(self._ctx, row))

    def is_end(self, token: int) -> bool:
        """Whether the token ends a generation."""
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def piece(self, token: int) -> bytes:
        """Return the text of a token; those of control tokens are empty."""
        return token_bytes(self._model.vocab, token)

    def logits(self, row: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits [n_vocab] of a token of the last call, by its index there."""
        pointer = llama_cpp.llama_get_logits_ith(self.ctx, row)
        return np.ctypeslib.as_array(pointer, shape=(self._n_vocab,))

    def sampler(self, seed: int, **settings: Any) -> llama_cpp._internals.LlamaSampler:
        """Return llama.cpp's sampler chain; the settings are those of `Llama.sample`.

        Raises:
            ValueError: A setting is of the wrong kind, or the grammar is none.
        """
        self.set_seed(seed)
        try:
            chain: llama_cpp._internals.LlamaSampler = self._init_sampler(**settings)
        except (ctypes.ArgumentError, TypeError, AttributeError) as error:
            given = ", ".join(f"{name}={value!r}" for name, value in settings.items())
            msg = (
                f"no sampler can be made of {given}: {error}; the settings are numbers, the "
                "grammar is a llama_cpp.LlamaGrammar"
            )
            raise ValueError(msg) from error
        return chain


def explain(code: int) -> str:
    """Return what a code of llama_decode means."""
    return f"{ERRORS.get(code, 'it failed')} (llama_decode returned {code})"
