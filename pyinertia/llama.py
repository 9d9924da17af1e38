"""`Llama`: the class of llama-cpp-python with an evicting KV cache."""

from __future__ import annotations

import atexit
import inspect
import os
import weakref
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from pyinertia import _native, state
from pyinertia.adapter import load_adapter
from pyinertia.binding import BaseLlamaCache, LlamaTokenizer, llama_cpp
from pyinertia.drafts import Drafts, without_guesses
from pyinertia.errors import ModelError, PolicyError
from pyinertia.interrupts import deferred
from pyinertia.loading import (
    check_keywords,
    choice,
    explain,
    explain_context,
    n_ctx_train,
    refuse_unservable,
    warn_budget,
)
from pyinertia.policy import MAX_COUNT, KVPolicy, resolve_policy
from pyinertia.reuse import KV_REUSES, Closed, n_in_place, n_reused
from pyinertia.vocabulary import Tokenizer

CELL_PAD = 256  # llama.cpp rounds a cache up to this
KV_POSITIONS = ("keep", "compact")

_PROMPT, _DECODE = "prompt", "decode"


class Llama(Drafts):
    """A llama.cpp model whose KV cache keeps only the cells worth keeping.

    Everything `llama_cpp.Llama` does works unchanged. A prompt that continues all tokens in the
    cache is appended to them; what another prompt reuses, `kv_reuse` says.

    Attributes:
        kv_policy (KVPolicy): The policy in use, overrides included; `KVPolicy(scorer="none")` for
            None.
    """

    _kv_compact = True  # tests leave the holes of a cut in place with False
    _n_parallel = 1  # sequences of the context, each with n_ctx positions; pyinertia.batch has more

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_policy: str | KVPolicy | None = None,
        kv_budget: int | float | None = None,
        kv_refresh: int | None = None,
        kv_prefill: str | None = None,
        kv_reuse: str = "append",
        kv_positions: str = "keep",
        **kwargs: Any,
    ) -> None:
        """Load a model.

        Args:
            model_path: Path to the GGUF file.
            kv_policy: A key of `pyinertia.POLICIES` or a `KVPolicy`. None and "full" evict
                nothing, which is llama_cpp.Llama bit for bit.
            kv_budget: Most cells a sequence holds, or a float in (0, 1): that share of the prompt.
                Replaces the policy's n_budget.
            kv_refresh: Decode steps between refreshes. Replaces the policy's n_refresh.
            kv_prefill: "full" or "bounded". Replaces the policy's prefill. With "bounded" the cache
                has n_budget + n_batch cells (rounded up to 256, and never fewer than a sliding
                window needs), whatever n_ctx says.
            kv_reuse: What a prompt reuses of a cache from which cells were evicted.

                - "append": all of it, if the prompt continues all its tokens; if it departs
                  earlier, the positions before the departure and before the first evicted one.
                - "strict": nothing, so that answers do not depend on earlier prompts' evictions.
                - "lossy": a prompt that departs also reuses what is left below the departure.
            kv_positions: What happens when n_ctx positions are used up.

                - "keep": an error, as in llama_cpp.Llama.
                - "compact": the resident positions are renumbered 0, 1, ... and generation goes
                  on, without end if max_tokens is None. n_tokens and input_ids then describe the
                  kept tokens. Keys are rotated, and rounded, anew each time.
            **kwargs: The keywords of `llama_cpp.Llama`. With a policy that evicts, swa_full is
                False unless it is given.

        Raises:
            PolicyError: The policy is unknown, out of range, or cannot run on this model.
            ModelError: The model file is missing or cannot be read, the LoRA adapter does not fit,
                or the model cannot take back what a draft model guesses.
            TypeError: A keyword is unknown.
        """
        self._kv_refusal = "the model is not loaded"
        self._kv_phase: str | None = None
        policy: dict[str, Any] = {
            "kv_policy": kv_policy,
            "kv_budget": kv_budget,
            "kv_refresh": kv_refresh,
            "kv_prefill": kv_prefill,
        }
        self._kv_arguments = {**policy, "kv_reuse": kv_reuse, "kv_positions": kv_positions}
        self._kv_query_tokens: list[int] = []
        self._kv_closed = Closed()
        self._kv_sampler: Any = None
        self._kv_adapter = ""
        self._kv_states: BaseLlamaCache | None = None
        choice("kv_reuse", kv_reuse, KV_REUSES)
        choice("kv_positions", kv_positions, KV_POSITIONS)
        self.kv_policy = resolve_policy(**policy)
        self._kv_ranges = list(self.kv_policy.protect)
        check_keywords(kwargs, self._kv_arguments)
        if self.kv_policy.evicts:
            refuse_unservable(kwargs, self._kv_named())
            if kwargs.get("swa_full") is None:
                kwargs["swa_full"] = False
        path = os.fspath(model_path)
        lora_path = kwargs.pop("lora_path", None)
        if self._kv_bounded and kwargs.get("n_ctx") == 0:
            kwargs["n_ctx"] = n_ctx_train(path)
        try:
            super().__init__(path, **kwargs)
        except ValueError as error:
            self.close()
            if reason := explain(error, path):
                raise ModelError(reason) from error
            if "create llama_context" in str(error):
                raise ValueError(explain_context(self.context_params)) from error
            raise
        if type(self.tokenizer_) is LlamaTokenizer:
            self.tokenizer_ = Tokenizer(self)
        # the native context has other cells than positions, or is padded to 256
        self._n_positions = self._n_ctx = self.context_params.n_ctx = len(self.input_ids)
        try:
            if lora_path:
                self.lora_path, self._kv_adapter = lora_path, load_adapter(self, lora_path)
            self._check_draft()
        except ModelError:
            self.close()
            raise
        warn_budget(self.kv_policy, self._n_positions)
        self._attach()
        if kv_positions == "compact":
            self._check_compact()
            self._n_ctx = MAX_COUNT  # where the parent ends completions
        _open.add(self)

    @property
    def _model(self) -> llama_cpp._internals.LlamaModel:
        model: llama_cpp._internals.LlamaModel = self.__dict__["_model"]
        return model

    @_model.setter
    def _model(self, model: llama_cpp._internals.LlamaModel) -> None:
        # the one moment between the model and its context: the cache gets its own size
        self.__dict__["_model"] = model
        if self._kv_bounded:
            params = self.context_params
            n_swa = llama_cpp.llama_model_n_swa(model.model)
            n_cells = max(
                int(self.kv_policy.n_budget) + params.n_batch,
                n_swa + params.n_ubatch if n_swa else 0,
            )
            params.n_ctx = min(params.n_ctx, -(-n_cells // CELL_PAD) * CELL_PAD)
        if self._n_parallel > 1:
            params = self.context_params
            params.n_seq_max, params.kv_unified = self._n_parallel, False
            params.n_ctx = -(-params.n_ctx // CELL_PAD) * CELL_PAD * self._n_parallel

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

    def _attach(self) -> None:
        n_ctx = self._n_ctx * self._n_parallel if self._kv_bounded else 0
        try:
            self._kv_refusal = _native.attach(self.ctx, self.kv_policy, self._kv_compact, n_ctx)
        except PolicyError:
            self.close()
            raise
        if self._kv_refusal and self.kv_policy.evicts:
            architecture = self.metadata.get("general.architecture", "unknown")
            self.close()
            msg = (
                f"{self._kv_named()} cannot run on architecture {architecture!r}: "
                f"{self._kv_refusal}. Use kv_policy=None"
            )
            raise PolicyError(msg)

    # evaluation: the engine is told what is prompt

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those in the cache.

        Outside of `generate`, several tokens, or the first ones, are prompt; a single one after
        them is a decode step.

        Args:
            tokens: Token ids [n].

        Raises:
            ValueError: There is no room for them in n_ctx, nothing is evaluated then; or the model
                was closed.
            RuntimeError: llama.cpp cannot evaluate them.
        """
        self._check_open()
        self._reopen()
        phase = self._kv_phase
        if phase is None:
            phase = _PROMPT if len(tokens) > 1 or self.n_tokens == 0 else _DECODE
            self._kv_stream = None
        if phase == _DECODE and len(tokens) > 1:
            tokens = tokens[: self._n_step()]
        if self.n_tokens + len(tokens) > self._n_positions and self._kv_closes:
            if phase == _PROMPT:
                self._check_cells(self.n_tokens, len(tokens))
            self._eval_parts(tokens, phase)
            return
        self._check_room(self.n_tokens + len(tokens))
        # before the engine looks: tokens of a step that was interrupted have not been
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        if not self._kv_refusal:
            _native.prompt(self.ctx, 0, len(tokens) if phase == _PROMPT else 0)
            if phase == _PROMPT and self._kv_query_tokens:
                tokens = self._eval_probed(tokens)
        if phase == _DECODE and len(tokens) > 1 and not self._logits_all:
            self._eval_drafted(tokens)
        else:
            self._eval_batches(tokens)

    def _eval_batches(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), self.n_batch):
            self._requires_eval = True  # until the logits are those of the last token again
            super().eval(tokens[start : start + self.n_batch])

    def _eval_probed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Evaluate all but the last token, each batch followed by the question; return the rest."""
        query = self._kv_query_tokens
        n_step = self.n_batch - len(query)  # one batch's room holds both
        for start in range(0, len(tokens) - 1, n_step):
            self._eval_batches(tokens[start : min(start + n_step, len(tokens) - 1)])
            self._requires_eval = True
            if not _native.probe(self.ctx, 0, len(query)):
                msg = "the engine does not take the question; kv_query(None) goes on without it"
                raise RuntimeError(msg)
            try:
                self._batch.set_batch(batch=query, n_past=self.n_tokens, logits_all=False)
                self._ctx.decode(self._batch)
            finally:
                _native.probe(self.ctx, 0, 0)
                self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        return tokens[-1:]

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Create a generator of tokens from a prompt, as `llama_cpp.Llama.generate` does.

        When it ends, for whatever reason, the cache holds the prompt and what was yielded, but for
        the last token, which nothing has followed; never what a draft model guessed beyond it. It
        goes on until the caller stops it, or stopping_criteria do.

        Args:
            tokens: Token ids [n] of the whole prompt; what the cache has of it is reused, see
                `kv_reuse`. With reset=False those that follow the tokens in the cache.
            *args: The arguments of `llama_cpp.Llama.generate`.
            **kwargs: The keywords of `llama_cpp.Llama.generate`.

        Yields:
            The next token id. `send` takes token ids that follow it.

        Raises:
            ValueError: The prompt is empty or longer than n_ctx, the cache stays as it is; n_ctx
                is used up under kv_positions="keep"; or the model was closed.
        """
        self._check_open()
        tokens = list(tokens)
        call = inspect.signature(super().generate).bind(tokens, *args, **kwargs)
        reset = call.arguments.get("reset", True)
        if not len(tokens) and (reset or self._requires_eval):
            msg = "generate() needs at least one token to start from"
            raise ValueError(msg)
        if reset:
            tokens = self._reuse(tokens)
        elif not self._kv_closes:
            self._check_room(len(tokens) + self.n_tokens)
        if self.n_tokens + len(tokens) > self._n_positions:
            # the parent counts on n_tokens, so the gaps are closed before it looks
            self._kv_phase = _PROMPT
            try:
                self._eval_parts(tokens[:-1], _PROMPT)
                self._close_gaps(1)
            finally:
                self._kv_phase = None
            tokens = tokens[-1:]
        call.arguments["reset"] = False
        phase = _PROMPT
        due: list[int] | None = tokens
        self._kv_sampler = None
        try:
            while due is not None:
                call.arguments["tokens"] = due
                due = yield from self._generate_here(call, phase)
                phase = _DECODE
        except (Exception, KeyboardInterrupt):
            self._kv_phase = self._kv_n_certain = (
                None  # also where Ctrl-C came between a phase and its end
            )
            raise

    def _generate_here(
        self, call: inspect.BoundArguments, phase: str
    ) -> Generator[int, Sequence[int] | None, list[int] | None]:
        """Generate until positions have to be renumbered; return the tokens that come then."""
        reply = None
        n_certain = self.n_tokens + len(call.arguments["tokens"])
        with closing(super().generate(*call.args, **call.kwargs)) as stream:
            self._kv_stream = stream
            try:
                while True:
                    self._check_open()
                    # a draft model sends several tokens per decode step, so sizes do not tell
                    self._kv_phase, self._kv_n_certain = phase, n_certain
                    try:
                        token = stream.send(reply)
                    except StopIteration:
                        return None
                    finally:
                        self._kv_phase = self._kv_n_certain = None
                    phase = _DECODE
                    reply = yield token
                    if self._kv_closes and n_certain + 1 > self._n_positions:
                        break
                    n_certain += 1
            finally:
                self._drop_drafted(stream, n_certain)
        self._kv_phase = _DECODE
        try:
            self._close_gaps(1)
        finally:
            self._kv_phase = None
        self._kv_sampler = self._sampler
        return [token]

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        # a grammar, penalties and the random numbers go on over a renumbering
        kept, self._kv_sampler = self._kv_sampler, None
        if kept is None and (grammar := kwargs.get("grammar")) is not None:
            self._check_grammar(grammar)
        # a logits_processor's sampler holds the model that it is made by
        owner: Any = weakref.proxy(self)
        if processors := kwargs.get("logits_processor"):
            kwargs["logits_processor"] = [without_guesses(owner, one) for one in processors]
        return kept or llama_cpp.Llama._init_sampler(owner, *args, **kwargs)

    def _check_grammar(self, grammar: Any) -> None:
        """Raise ValueError for a grammar that llama.cpp cannot read; sampling would crash."""
        text, root = grammar._grammar.encode(), grammar._root.encode()
        sampler = llama_cpp.llama_sampler_init_grammar(self._model.vocab, text, root)
        if not sampler:
            msg = (
                "the grammar cannot be parsed; llama.cpp's grammars/README.md has the syntax, and "
                "verbose=True shows what it says about this one"
            )
            raise ValueError(msg)
        llama_cpp.llama_sampler_free(sampler)

    def reset(self) -> None:
        """Forget all tokens; the cells of the sequence leave at once."""
        super().reset()  # type: ignore[no-untyped-call]
        self._kv_stream = None
        self._kv_closed = Closed()
        if self._ctx.ctx is not None and not self._kv_refusal:
            self._ctx.kv_cache_seq_rm(-1, 0, -1)
            self._protect(list(self.kv_policy.protect), 0)

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

    # which tokens need no evaluation, see pyinertia/reuse.py

    def _n_reused(self, prompt: Sequence[int]) -> int:
        if self.n_tokens == 0:
            return 0
        reuse = str(self._kv_arguments["kv_reuse"])
        return n_reused(self._cached(), prompt, reuse, has_logits=not self._requires_eval)

    def _reuse(self, prompt: list[int]) -> list[int]:
        """Cut the cache down to what the prompt reuses, and return the tokens beyond that."""
        n = self._n_reused(prompt)
        n_pos, n_new = self._cached().position(n), len(prompt) - n
        if self._kv_closes:
            self._check_cells(n_pos, n_new)
        else:
            self._check_room(n_pos + n_new)
        if n_pos < self.n_tokens:
            # before the cells leave: what is beyond n_tokens is removed anyway
            self.n_tokens, self._requires_eval = n_pos, True
            if n and self._ctx.kv_cache_seq_rm(-1, n_pos, -1):
                self._reopen()
            else:
                n = 0
        if n == 0:
            self.reset()
        self._begin_prompt(prompt)
        return prompt[n:]

    # positions without end

    @property
    def _kv_closes(self) -> bool:
        return bool(self._kv_arguments["kv_positions"] == "compact")

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
        n_query = len(self._kv_query_tokens) if phase == _PROMPT else 0
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
        _native.prompt(self.ctx, 0, n_new if self._kv_phase == _PROMPT else 0)
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

    # states, see pyinertia/state.py

    def save_state(self) -> state.LlamaState:
        """Save all that the next tokens depend on: tokens, cells, their scores, counters.

        The state can be pickled, and loaded in another process.

        Raises:
            ValueError: The model was closed.
        """
        self._check_open()
        return state.save(self)

    def load_state(self, saved: llama_cpp.LlamaState) -> None:
        """Restore a saved state; what was evicted stays so, and the next evictions are the same.

        A state of `llama_cpp.Llama`, or of one that evicts nothing, is ranked like a prompt.

        Args:
            saved: What `save_state` returned.

        Raises:
            ValueError: The state is damaged, of another model, context or version, or larger than
                n_ctx or the cache; the cache stays as it is. Or the model was closed.
            PolicyError: Its cells were ranked by another rule than this policy's.
        """
        self._check_open()
        state.load(self, saved)

    @property
    def cache(self) -> state.StateCache | None:
        """The cache of states, see `llama_cpp.Llama.set_cache`."""
        return None if self._kv_states is None else state.StateCache(self._kv_states, self)

    @cache.setter
    def cache(self, cache: BaseLlamaCache | None) -> None:
        self._kv_states = cache.states if isinstance(cache, state.StateCache) else cache

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**super().__getstate__(), **self._kv_arguments}  # type: ignore[no-untyped-call]

    def __enter__(self) -> Llama:
        """Return the model; the with statement closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the model."""
        self.close()

    def close(self) -> None:
        """Free the model; also after a constructor that failed half-way."""
        if "_stack" in self.__dict__:
            super().close()


_open: weakref.WeakSet[Llama] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    # later Python is half gone, and what llama.cpp logs would reach a callback that is no more
    for llm in list(_open):
        llm.close()
