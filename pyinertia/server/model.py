"""The model as the server uses it, and the loader of llama_cpp.server around it."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import llama_cpp.server.model as upstream

from pyinertia.binding import llama_cpp
from pyinertia.cli import native_log
from pyinertia.cli.group import say
from pyinertia.cli.models import warnings_as_notes
from pyinertia.errors import CommandError, PolicyError
from pyinertia.llama import Llama
from pyinertia.server.settings import ModelSettings
from pyinertia.server.turns import Turn

# the parent looks at max_tokens only where a character ends; bytes that are none would never end
UTF8_MOST = 4


class ServedLlama(Llama):
    """A model whose work can be cancelled, and that counts what each turn has of it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Load a model, see `pyinertia.Llama`."""
        self.turn = Turn()
        self._n_gone = 0
        super().__init__(*args, **kwargs)
        decode = self._ctx.decode

        def decode_unless_cancelled(batch: Any) -> None:
            self.turn.check()
            decode(batch)

        # the one call between two batches of a prompt, and between two tokens
        self._ctx.decode = decode_unless_cancelled  # type: ignore[method-assign]

    def begin(self, turn: Turn) -> None:
        """What happens from here on belongs to this turn."""
        self.turn = turn
        self._n_gone = self._n_kept_and_gone()[1]

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens, see `pyinertia.Llama.generate`, and count them."""
        turn, start = self.turn, time.perf_counter()
        first, n = 0.0, 0
        try:
            with closing(super().generate(tokens, *args, **kwargs)) as stream:
                for token in stream:
                    first = first or time.perf_counter()
                    if not self._is_end(token):
                        turn.n_completion += 1
                    yield token
                    n += 1
                    if turn.n_most and n >= turn.n_most + UTF8_MOST:
                        yield self.token_eos()
                        return
        finally:
            end = time.perf_counter()
            turn.t_prompt += (first or end) - start
            turn.t_decode += end - (first or end)
            turn.n_kept, turn.n_gone = self._n_kept_and_gone()
            turn.n_evicted += turn.n_gone - self._n_gone

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Raise ValueError if one of these is no token of this model."""
        if len(tokens) and not 0 <= min(tokens) <= max(tokens) < self.n_vocab():
            msg = f"tokens must be from 0 to {self.n_vocab() - 1}"
            raise ValueError(msg)

    def _check_grammar(self, grammar: Any) -> None:
        try:
            super()._check_grammar(grammar)
        except ValueError as error:
            msg = f"the grammar cannot be parsed: {native_log.last_error() or 'see GBNF'}"
            raise ValueError(msg) from error

    def _reuse(self, prompt: list[int]) -> list[int]:
        rest = super()._reuse(prompt)
        self.turn.n_prompt, self.turn.n_cached = len(prompt), len(prompt) - len(rest)
        self._n_gone = self._n_kept_and_gone()[1]
        return rest

    def _n_kept_and_gone(self) -> tuple[int, int]:
        cached = self._cached()
        return cached.positions.size, cached.tokens.size - cached.positions.size


class Models(upstream.LlamaProxy):
    """The models of the server, of which one is loaded at a time."""

    @staticmethod
    def load_llama_from_model_settings(settings: Any) -> Any:
        """Load a model.

        Raises:
            PyInertiaError: The model cannot be read, or the policy cannot run on it.
            CommandError: There is no memory for the context.
        """
        if not settings.verbose:
            native_log.silence()
        if settings.kv_positions is not None or not settings.policy().evicts:
            return _load(settings, settings.kv_positions or "keep")
        try:
            return _load(settings, "compact")
        except PolicyError as error:
            llm = _load(settings, "keep")
            say(f"note: a chat ends at {llm.context_params.n_ctx} positions: {error}")
            return llm


def _load(settings: ModelSettings, kv_positions: str) -> Any:
    ours = {
        "kv_policy": settings.policy(),
        "kv_reuse": settings.kv_reuse,
        "kv_positions": kv_positions,
    }

    class Loaded(ServedLlama):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if kwargs.pop("rpc_servers", None):
                msg = "rpc_servers: llama-cpp-python no longer passes them on; leave them out"
                raise CommandError(msg)
            if not kwargs.pop("mul_mat_q", True):
                msg = "mul_mat_q: llama.cpp no longer has a choice there; leave it out"
                raise CommandError(msg)
            kwargs["n_ubatch"] = min(kwargs["n_ubatch"], kwargs["n_batch"])
            super().__init__(*args, **kwargs, **ours)

    # the loader names the class by its module's global, which is all there is to replace
    loader: Any = upstream
    plain = loader.llama_cpp
    loader.llama_cpp = SimpleNamespace(**{**vars(llama_cpp), "Llama": Loaded})
    try:
        with warnings_as_notes(of_budget=settings.kv_budget is not None):
            return upstream.LlamaProxy.load_llama_from_model_settings(settings)
    except ValueError as error:
        if "create llama_context" not in str(error):
            raise
        why = native_log.last_error() or "--verbose shows why"
        msg = (
            f"{settings.model} cannot run with --n-ctx {settings.n_ctx} ({why}); pass smaller ones "
            "of --n-ctx, --kv-budget and --n-batch, or cache types of fewer bits"
        )
        raise CommandError(msg) from error
    finally:
        loader.llama_cpp = plain
