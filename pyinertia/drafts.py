"""Speculative decoding: several tokens in a step, of which all but the first were guessed.

The parent evaluates a token and the guesses of its draft model in one batch, samples after each,
and takes the first wrong guess and those after it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pyinertia.chat import Chats
from pyinertia.errors import ModelError


class Drafts(Chats):
    """A model that may have a draft model."""

    _n_positions: int
    _kv_stream: object = None  # the generator whose guesses may be in the cache
    _kv_n_certain: int | None = None  # while it samples: the tokens that are no guesses

    def _check_draft(self) -> None:
        if self.draft_model is None:
            return
        if self._is_recurrent or self._is_hybrid:
            architecture = self.metadata.get("general.architecture", "unknown")
            msg = (
                f"draft_model: the recurrent state of architecture {architecture!r} cannot take "
                "rejected tokens back; leave draft_model out"
            )
            raise ModelError(msg)
        # the parent has rows for that many logits only, whatever it says
        self._logits_all = len(self.scores) >= self._n_positions

    def _n_step(self) -> int:
        """The most tokens of a decode step: they come in one batch, and the budget has room."""
        if self._is_recurrent or self._is_hybrid:
            return 1  # what is sent to a generator are guesses, too
        n_room, policy = self._n_positions - self.n_tokens, self.kv_policy
        if policy.evicts and not isinstance(policy.n_budget, float):
            n_kept = self._n_least(self._kv_n_system) - policy.n_refresh
            n_room = min(n_room, policy.n_budget - n_kept)
        return max(1, min(self.n_batch, int(self.context_params.n_ubatch), n_room))

    def _eval_drafted(self, tokens: Sequence[int]) -> None:
        """Evaluate a token and what was guessed after it, with the logits of each."""
        n_past = self.n_tokens
        self._requires_eval = True
        self._batch.set_batch(batch=tokens, n_past=n_past, logits_all=True)
        self._ctx.decode(self._batch)
        self.input_ids[n_past : n_past + len(tokens)] = tokens
        self.n_tokens = n_past + len(tokens)
        self._requires_eval = False

    def _drop_drafted(self, stream: object, n_certain: int) -> None:
        """At the end of a stream: take back what was guessed, and not yet accepted."""
        if self._kv_stream is not stream or self._ctx.ctx is None:
            return  # the cache is another prompt's by now
        self._kv_stream = None
        if self.n_tokens > n_certain:
            # before the cells leave: what is beyond n_tokens is removed anyway
            self.n_tokens, self._requires_eval = n_certain, True
            self._ctx.kv_cache_seq_rm(-1, n_certain, -1)


def without_guesses(llm: Drafts, processor: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a logits processor that is not shown the guesses, as the parent would show them."""
    return lambda input_ids, scores: processor(input_ids[: llm._kv_n_certain], scores)
