"""`Llama`: the class of llama-cpp-python with an evicting KV cache."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from difflib import get_close_matches
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pyinertia import _native
from pyinertia.errors import ModelError, PolicyError
from pyinertia.policy import QUERY_SCORERS, KVPolicy, resolve_policy
from pyinertia.stats import KVStats

_native.load()  # before llama_cpp is imported: it decides which library llama_cpp gets

import llama_cpp  # noqa: E402

# names that llama_cpp.server and LangChain still pass, though the parent ignores them
LEGACY_KEYWORDS = frozenset(
    {"f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps", "rpc_servers"}
)
LEAST_USEFUL_BUDGET = 256
CELL_PAD = 256  # llama.cpp rounds a cache up to this

_PROMPT, _DECODE = "prompt", "decode"


class Llama(llama_cpp.Llama):
    """A llama.cpp model whose KV cache keeps only the cells worth keeping.

    Everything `llama_cpp.Llama` does works unchanged. A prompt that continues all tokens in the
    cache is appended to them. Any other prompt reuses the prefix it shares with the cache only
    while that prefix is whole; once cells were evicted it is evaluated afresh.
    """

    _kv_compact = True  # tests leave the holes of a cut in place with False

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        kv_policy: str | KVPolicy | None = None,
        kv_budget: int | float | None = None,
        kv_refresh: int | None = None,
        kv_prefill: str | None = None,
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
            **kwargs: The keywords of `llama_cpp.Llama`. With a policy that evicts, swa_full is
                False unless it is given.

        Raises:
            PolicyError: The policy is unknown, out of range, or cannot run on this model.
            ModelError: The model file is missing or cannot be read.
            TypeError: A keyword is unknown.
        """
        self._kv_refusal = "the model is not loaded"
        self._kv_phase: str | None = None
        self._kv_arguments: dict[str, Any] = {
            "kv_policy": kv_policy,
            "kv_budget": kv_budget,
            "kv_refresh": kv_refresh,
            "kv_prefill": kv_prefill,
        }
        self._kv_query_tokens: list[int] = []
        self.kv_policy = resolve_policy(**self._kv_arguments)
        _check_keywords(kwargs)
        if self.kv_policy.evicts:
            self._refuse_unservable(kwargs)
            if kwargs.get("swa_full") is None:
                kwargs["swa_full"] = False
        path = os.fspath(model_path)
        if self._kv_bounded and kwargs.get("n_ctx") == 0:
            kwargs["n_ctx"] = _n_ctx_train(path)
        try:
            super().__init__(path, **kwargs)
        except ValueError as error:
            self.close()
            if reason := _explain(error, path):
                raise ModelError(reason) from error
            raise
        # the native context has other cells than positions, or is padded to 256
        self._n_ctx = self.context_params.n_ctx = len(self.input_ids)
        self._check_adapter()
        self._warn_budget()
        self._attach()

    @property
    def _kv_bounded(self) -> bool:
        return self.kv_policy.prefill == "bounded"

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

    def _check_adapter(self) -> None:
        # the parent compares the null pointer with None and would use it
        if self.lora_path and not self._lora_adapter:
            self._lora_adapter = None
            self.close()
            msg = f"lora_path={self.lora_path!r} is not a LoRA adapter for this model"
            raise ModelError(msg)

    def _warn_budget(self) -> None:
        budget = self.kv_policy.n_budget
        if not self.kv_policy.evicts or isinstance(budget, float):
            return
        reason = ""
        if budget >= self._n_ctx:
            reason = (
                f"is never reached in n_ctx={self._n_ctx}; "
                "pass a smaller kv_budget, or a larger n_ctx"
            )
        elif budget < LEAST_USEFUL_BUDGET:
            reason = (
                f"is below {LEAST_USEFUL_BUDGET}, where quality falls off and speed no longer gains"
            )
        if reason:
            warnings.warn(f"a KV budget of {budget} cells {reason}", UserWarning, stacklevel=3)

    def _attach(self) -> None:
        n_ctx = self._n_ctx if self._kv_bounded else 0
        self._kv_refusal = _native.attach(self.ctx, self.kv_policy, self._kv_compact, n_ctx)
        if self._kv_refusal and self.kv_policy.evicts:
            architecture = self.metadata.get("general.architecture", "unknown")
            self.close()
            msg = (
                f"{self._kv_named()} cannot run on architecture {architecture!r}: "
                f"{self._kv_refusal}. Use kv_policy=None"
            )
            raise PolicyError(msg)

    def _refuse_unservable(self, kwargs: dict[str, Any]) -> None:
        if kwargs.get("embedding"):
            msg = (
                f"{self._kv_named()} needs a model that generates, embedding=True does not; "
                "use kv_policy=None"
            )
            raise PolicyError(msg)
        formats = llama_cpp.llama_chat_format
        images = (formats.Llava15ChatHandler, formats.MTMDChatHandler)
        if isinstance(kwargs.get("chat_handler"), images):
            msg = (
                f"{self._kv_named()} does not serve images, whose cells may share a position; "
                "use kv_policy=None with this chat_handler"
            )
            raise PolicyError(msg)

    def _kv_named(self) -> str:
        return f"kv_policy={self._kv_arguments['kv_policy']!r}"

    # what the engine knows

    def kv_cells(self, seq_id: int = 0) -> npt.NDArray[np.void]:
        """Return the resident cells of a sequence.

        Returns:
            Structured array [n_resident] with fields pos (int32) and score (float32), by position.
        """
        ctx = self._kv_ctx()
        known = isinstance(seq_id, Integral) and 0 <= seq_id < 2**31
        cells = _native.cells(ctx, int(seq_id)) if known else None
        if cells is None:
            msg = f"seq_id={seq_id!r}: this context has no such sequence; use 0"
            raise ValueError(msg)
        return cells

    def kv_stats(self) -> KVStats:
        """Return the engine's counters."""
        return KVStats(**_native.stats(self._kv_ctx()))

    def kv_evict(self, keep: Iterable[int]) -> int:
        """Keep exactly these positions and the newest one; evict the rest, sinks included.

        Args:
            keep: Positions, each of them resident.

        Returns:
            The number of evicted cells.

        Raises:
            ValueError: A position is not resident, or not a whole number; nothing is evicted then.
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
            text: The question, in the words of the prompt. None: no question from here on.

        Raises:
            PolicyError: The policy's prefill is not "bounded", its scorer does not look at queries,
                or the model is a hybrid, whose recurrent part cannot take the question back.
            ValueError: The question is empty, or longer than half of n_batch, or than n_ubatch in
                a model with sliding windows.
        """
        self._kv_ctx()
        if text is None:
            self._kv_query_tokens = []
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
        if not tokens:
            msg = f"kv_query: {text!r} has no tokens; give a question, or None for none"
            raise ValueError(msg)
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

    # what the parent does, with the engine told

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens after those in the cache.

        Outside of `generate`, several tokens, or the first ones, are prompt; a single one after
        them is a decode step.

        Raises:
            ValueError: There is no room for them in n_ctx; nothing is evaluated then.
        """
        self._check_open()
        self._check_room(self.n_tokens + len(tokens))
        if not self._kv_refusal:
            phase = self._kv_phase
            if phase is None:
                phase = _PROMPT if len(tokens) > 1 or self.n_tokens == 0 else _DECODE
            _native.prompt(self.ctx, 0, len(tokens) if phase == _PROMPT else 0)
            if phase == _PROMPT and self._kv_query_tokens:
                tokens = self._eval_probed(tokens)
        super().eval(tokens)

    def _eval_probed(self, tokens: Sequence[int]) -> Sequence[int]:
        """Evaluate all but the last token, each batch followed by the question; return the rest."""
        query = self._kv_query_tokens
        n_step = self.n_batch - len(query)  # one batch's room holds both
        for start in range(0, len(tokens) - 1, n_step):
            super().eval(tokens[start : min(start + n_step, len(tokens) - 1)])
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

        Raises:
            ValueError: The prompt is empty or longer than n_ctx; the cache stays as it is.
        """
        self._check_open()
        tokens = list(tokens)
        call = inspect.signature(super().generate).bind(tokens, *args, **kwargs)
        reset = call.arguments.get("reset", True)
        if not len(tokens) and (reset or self._requires_eval):
            msg = "generate() needs at least one token to start from"
            raise ValueError(msg)
        self._check_room(len(tokens) + (0 if reset else self.n_tokens))
        if reset and not self._kv_reusable(tokens):
            self.reset()
        phase, reply = _PROMPT, None
        with closing(super().generate(tokens, *args, **kwargs)) as stream:
            while True:
                self._check_open()
                # a draft model sends several tokens per decode step, so sizes do not tell
                self._kv_phase = phase
                try:
                    token = stream.send(reply)
                except StopIteration:
                    return
                finally:
                    self._kv_phase = None
                phase = _DECODE
                reply = yield token

    def reset(self) -> None:
        """Forget all tokens; the cells of the sequence leave at once."""
        super().reset()  # type: ignore[no-untyped-call]
        if self._ctx.ctx is not None and not self._kv_refusal:
            self._ctx.kv_cache_seq_rm(-1, 0, -1)

    def load_state(self, state: llama_cpp.LlamaState) -> None:
        """Restore a saved state. Cells that were evicted stay so, scores start again.

        Raises:
            ValueError: The state holds more tokens than n_ctx; the cache stays as it is.
        """
        self._check_open()
        self._check_room(state.n_tokens)
        ids = self.input_ids
        try:
            super().load_state(state)
        except Exception:
            self.reset()
            raise
        finally:  # the parent takes the state's array, which may be of another n_ctx
            if self.input_ids is not ids:
                ids[: self.n_tokens] = self.input_ids[: self.n_tokens]
                self.input_ids = ids

    def save_state(self) -> llama_cpp.LlamaState:
        """Save tokens and cells; the scores are not part of it."""
        self._check_open()
        return super().save_state()

    def _kv_reusable(self, tokens: Sequence[int]) -> bool:
        # the engine knows which positions are resident, whatever happened to n_tokens since
        if self._kv_refusal or self.n_tokens == 0:
            return True
        n = self.n_tokens
        if list(tokens[:n]) == self._input_ids.tolist() and (
            len(tokens) > n or not self._requires_eval
        ):
            return True
        n_resident = np.count_nonzero(self.kv_cells()["pos"] < n)
        # a sliding window's own cache forgets its start without the engine
        pos_min = llama_cpp.llama_memory_seq_pos_min(self._ctx.memory, 0)
        return bool(n_resident == n and pos_min == 0)

    def _check_room(self, n_tokens: int) -> None:
        if n_tokens > self._n_ctx:
            msg = (
                f"{n_tokens} tokens exceed the context window of {self._n_ctx}; "
                "shorten the prompt, or create the Llama with a larger n_ctx"
            )
            raise ValueError(msg)

    def __getstate__(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**super().__getstate__(), **self._kv_arguments}  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Free the model; also after a constructor that failed half-way."""
        if "_stack" in self.__dict__:
            super().close()


def _check_keywords(kwargs: dict[str, Any]) -> None:
    """Drop legacy keywords from kwargs with a warning and raise TypeError for unknown ones."""
    known = {"model_path", "kv_policy", "kv_budget", "kv_refresh", "kv_prefill"}
    known |= set(inspect.signature(llama_cpp.Llama.__init__).parameters) - {"self", "kwargs"}
    legacy = sorted(LEGACY_KEYWORDS & (kwargs.keys() - known))
    for name in legacy:
        del kwargs[name]
    if legacy:
        warnings.warn(
            f"{', '.join(legacy)}: llama_cpp.Llama no longer has these keywords and ignores them; "
            "leave them out",
            DeprecationWarning,
            stacklevel=3,
        )
    for name in sorted(kwargs.keys() - known):
        nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
        msg = (
            f"Llama() got an unexpected keyword argument {name!r}; the nearest known one is "
            f"{nearest!r}"
        )
        raise TypeError(msg)


def _n_ctx_train(path: str) -> int:
    """Return the positions a model was trained for, 0 if its file cannot be read."""
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        model = llama_cpp._internals.LlamaModel(path_model=path, params=params, verbose=False)
    except ValueError:
        return 0
    with closing(model):
        metadata = model.metadata()
        architecture = metadata.get("general.architecture", "")
        return int(metadata.get(f"{architecture}.context_length", 0))


def _explain(error: ValueError, path: str) -> str:
    """Return what is wrong with the file, "" if the error is about something else."""
    if not Path(path).exists():
        return f"{path} does not exist; check model_path"
    if "load model" in str(error):
        return (
            f"{path} is not a complete GGUF model that this llama.cpp can read; download it again, "
            "or pass verbose=True to see why"
        )
    return ""
