"""Evaluation: the engine is told what is prompt, and what is generated."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from pyinertia import _native
from pyinertia.binding import llama_cpp
from pyinertia.drafts import without_guesses
from pyinertia.policy import QUERY_SCORERS
from pyinertia.positions import DECODE, PROMPT, Positions
from pyinertia.reuse import Closed, n_reused

N_QUESTION = 64  # tokens of a prompt's end that say what it asks


class Evaluation(Positions):
    """A model that evaluates what the cache does not hold, and generates."""

    _kv_sampler: Any

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
            phase = PROMPT if len(tokens) > 1 or self.n_tokens == 0 else DECODE
            self._kv_stream = None
        if phase == DECODE and len(tokens) > 1:
            tokens = tokens[: self._n_step()]
        if self.n_tokens + len(tokens) > self._n_positions and self._kv_closes:
            if phase == PROMPT:
                self._check_cells(self.n_tokens, len(tokens))
            self._eval_parts(tokens, phase)
            return
        self._check_room(self.n_tokens + len(tokens))
        # before the engine looks: tokens of a step that was interrupted have not been
        self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1)
        if not self._kv_refusal:
            _native.prompt(self.ctx, 0, len(tokens) if phase == PROMPT else 0)
            if phase == PROMPT and (question := self._question()):
                tokens = self._eval_probed(tokens, question)
        if phase == DECODE and len(tokens) > 1 and not self._logits_all:
            self._eval_drafted(tokens)
        else:
            self._eval_batches(tokens)

    def _eval_batches(self, tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), self.n_batch):
            self._requires_eval = True  # until the logits are those of the last token again
            super().eval(tokens[start : start + self.n_batch])

    def _ending(self, tokens: list[int]) -> list[int]:
        """The end of a prompt that enters in several cuts, which would else not know it."""
        may_ask = self._kv_bounded and self.kv_policy.scorer in QUERY_SCORERS
        if not may_ask or self._is_hybrid or len(tokens) <= self.n_batch:
            return []
        n = min(N_QUESTION, self.n_batch // 4, self.context_params.n_ubatch // 2)
        return tokens[len(tokens) - n :]

    def _eval_probed(self, tokens: Sequence[int], question: Sequence[int]) -> Sequence[int]:
        """Evaluate all but the last token, each batch followed by the question; return the rest."""
        n_step = self.n_batch - len(question)  # one batch's room holds both
        for start in range(0, len(tokens) - 1, n_step):
            self._eval_batches(tokens[start : min(start + n_step, len(tokens) - 1)])
            self._requires_eval = True
            if not _native.probe(self.ctx, 0, len(question)):
                msg = "the engine does not take the question; kv_query('') goes on without it"
                raise RuntimeError(msg)
            try:
                self._batch.set_batch(batch=question, n_past=self.n_tokens, logits_all=False)
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
        call.arguments["reset"] = False
        phase = PROMPT
        due: list[int] | None = tokens
        self._kv_sampler = None
        try:
            self._kv_ending = self._ending(tokens)
            if self.n_tokens + len(tokens) > self._n_positions:
                # the parent counts on n_tokens, so the gaps are closed before it looks
                self._kv_phase = PROMPT
                self._eval_parts(tokens[:-1], PROMPT)
                self._close_gaps(1)
                due = tokens[-1:]
            while due is not None:
                call.arguments["tokens"] = due
                due = yield from self._generate_here(call, phase)
                phase = DECODE
        except (Exception, KeyboardInterrupt):
            # also where Ctrl-C came between a phase and its end
            self._kv_phase = self._kv_n_certain = None
            self._kv_ending = []
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
                        self._kv_ending = []
                    phase = DECODE
                    reply = yield token
                    if self._kv_closes and n_certain + 1 > self._n_positions:
                        break
                    n_certain += 1
            finally:
                self._drop_drafted(stream, n_certain)
        self._kv_phase = DECODE
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
