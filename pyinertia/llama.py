"""`Llama`: the class of llama-cpp-python with an evicting KV cache."""

from __future__ import annotations

import atexit
import os
import weakref
from typing import Any

from pyinertia import _native, state
from pyinertia.adapter import load_adapter
from pyinertia.binding import BaseLlamaCache, LlamaTokenizer, llama_cpp
from pyinertia.errors import ModelError, PolicyError
from pyinertia.evaluation import Evaluation
from pyinertia.loading import (
    check_keywords,
    choice,
    explain,
    explain_context,
    n_ctx_train,
    refuse_unservable,
    warn_budget,
    warn_gpu,
)
from pyinertia.policy import MAX_COUNT, KVPolicy, resolve_policy
from pyinertia.positions import KV_POSITIONS
from pyinertia.reuse import KV_REUSES, Closed
from pyinertia.vocabulary import Tokenizer

CELL_PAD = 256  # llama.cpp rounds a cache up to this


class Llama(Evaluation):
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
        self._kv_query_tokens: list[int] | None = None
        self._kv_ending: list[int] = []
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
        warn_gpu(kwargs.get("n_gpu_layers", 0))
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
