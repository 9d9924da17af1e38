"""Saved states: tokens, cells, and what the engine knows about them."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyinertia import _native
from pyinertia.binding import BaseLlamaCache, LlamaDiskCache, LlamaRAMCache, llama_cpp
from pyinertia.chat import Conversation
from pyinertia.errors import PolicyError
from pyinertia.interrupts import deferred
from pyinertia.policy import KVPolicy
from pyinertia.reuse import Cached, Closed, n_reused, n_shared

if TYPE_CHECKING:
    from pyinertia.llama import Llama

VERSION = 2  # of the fields of LlamaState

RANKING = ("scorer", "heads", "aggregation", "beta", "lambda_", "layer_weights")
CONTEXT = (  # what K and V depend on
    *("type_k", "type_v", "flash_attn_type", "rope_scaling_type", "rope_freq_base"),
    *("rope_freq_scale", "yarn_ext_factor", "yarn_attn_factor", "yarn_orig_ctx"),
)


class LlamaState(llama_cpp.LlamaState):
    """A saved state. It can be pickled; a damaged one is refused when it is loaded."""

    def __init__(
        self,
        *,
        input_ids: npt.NDArray[np.intc],
        scores: npt.NDArray[np.single],
        llama_state: bytes,
        seed: int,
        engine: bytes,
        policy: KVPolicy,
        model: str,
        context: dict[str, Any],
        cached: Cached,
        ranges: list[tuple[int, int]],
        n_system: int,
        chat: Conversation,
    ) -> None:
        """Collect the parts.

        Args:
            input_ids: intc [n_tokens]. The tokens of the positions.
            scores: float32 [n_tokens, n_vocab]. The logits, empty without logits_all.
            llama_state: llama.cpp's own state: the cells.
            seed: The seed of the sampler.
            engine: What the engine knows beyond that, b"" without one.
            policy: The policy they were ranked by.
            model: A fingerprint of the model.
            context: The parameters of the context that cells depend on.
            cached: What the cache holds.
            ranges: Protected ranges.
            n_system: Protected positions of a system message.
            chat: The chat that the cache stands for.
        """
        super().__init__(input_ids, scores, input_ids.size, llama_state, len(llama_state), seed)
        self.version = VERSION
        self.engine, self.policy, self.model, self.context = engine, policy, model, context
        self.cached, self.ranges, self.n_system, self.chat = cached, ranges, n_system, chat
        self.checksum = self.digest()

    def digest(self) -> bytes:
        """Return a hash of all parts."""
        digest = hashlib.blake2b(digest_size=16)
        arrays = (self.input_ids, self.scores, self.cached.tokens, self.cached.positions)
        for part in (self.llama_state, self.engine, *(array.tobytes() for array in arrays)):
            digest.update(part)
        rest = (self.n_tokens, self.seed, self.policy, self.model, self.context, self.ranges)
        digest.update(repr((*rest, self.n_system, self.chat, self.cached.closed)).encode())
        return digest.digest()


def save(llm: Llama) -> LlamaState:
    """Return the state of a Llama."""
    n = llm.n_tokens
    llm._ctx.kv_cache_seq_rm(-1, n, -1)  # cells of tokens that were taken back by hand
    return LlamaState(
        input_ids=llm.input_ids[:n].copy(),
        scores=llm.scores[: n if llm._logits_all else 0].copy(),
        llama_state=_cells(llm),
        seed=llm._seed,
        engine=b"" if llm._kv_refusal else _native.get_state(llm.ctx, 0),
        policy=llm.kv_policy,
        model=_fingerprint(llm),
        context=_context(llm),
        cached=llm._cached(),
        ranges=llm._kv_ranges,
        n_system=llm._kv_n_system,
        chat=llm._kv_chat,
    )


@deferred()
def load(llm: Llama, state: llama_cpp.LlamaState) -> None:
    """Put a state into a Llama. See `Llama.load_state` for what is refused."""
    check(llm, state)
    engine = b""
    if isinstance(state, LlamaState) and _same_ranking(state.policy, llm.kv_policy):
        engine = state.engine
    llm._ctx.kv_cache_seq_rm(-1, llm.n_tokens, -1)
    before = _cells(llm), b"" if llm._kv_refusal else _native.get_state(llm.ctx, 0)
    reason = _set_cells(llm, state.llama_state, state.n_tokens) or _set_engine(llm, engine)
    if reason:
        if _set_cells(llm, before[0], llm.n_tokens) or _set_engine(llm, before[1]):
            llm.reset()
        msg = f"this state cannot be loaded: {reason}"
        raise ValueError(msg)
    llm.n_tokens, llm._seed, llm._requires_eval = state.n_tokens, state.seed, True
    llm._kv_stream = None
    llm.input_ids[: state.n_tokens] = state.input_ids[: state.n_tokens]
    if llm._logits_all:
        llm.scores[: state.n_tokens] = state.scores[: state.n_tokens]
    ours = state if isinstance(state, LlamaState) else None
    is_same = ours is not None and ours.policy.protect == llm.kv_policy.protect
    llm._kv_closed = ours.cached.closed if ours else Closed()
    llm._kv_chat = ours.chat if ours else Conversation()
    llm._protect(
        ours.ranges if ours and is_same else list(llm.kv_policy.protect),
        ours.n_system if ours and llm.kv_policy.evicts else 0,
    )


def check(llm: Llama, state: llama_cpp.LlamaState) -> None:
    """Raise ValueError or PolicyError if a Llama cannot take a state, without touching it."""
    if not isinstance(state, llama_cpp.LlamaState):
        msg = f"load_state needs what save_state returned, got {type(state).__name__}"
        raise ValueError(msg)
    llm._check_room(state.n_tokens)
    ids = np.asarray(state.input_ids)[: state.n_tokens]
    if state.n_tokens < 0 or ids.size != state.n_tokens or len(state.llama_state) == 0:
        raise ValueError("this state is damaged: its tokens are not all there; save it again")
    if ids.size and not 0 <= ids.min() <= ids.max() < llm.n_vocab():
        raise ValueError("this state is damaged, or of another model: unknown tokens")
    shape = np.shape(state.scores)
    is_whole = len(shape) == 2 and shape[0] >= state.n_tokens and shape[1] == llm.n_vocab()
    if llm._logits_all and not is_whole:
        msg = (
            "this state was saved without logits_all, this Llama has logits_all=True and would "
            "have no logits of its tokens; create it with the same"
        )
        raise ValueError(msg)
    if not isinstance(state, LlamaState):
        return
    if getattr(state, "version", None) != VERSION:
        msg = (
            f"this state has version {getattr(state, 'version', None)}, this pyinertia reads "
            f"version {VERSION}; evaluate its tokens again"
        )
        raise ValueError(msg)
    if state.checksum != state.digest():
        raise ValueError("this state is damaged: its checksum is wrong; save it again")
    if state.model != _fingerprint(llm):
        msg = f"this state is of another model: {state.model}, this is {_fingerprint(llm)}"
        raise ValueError(msg)
    for name, value in _context(llm).items():
        if state.context.get(name) != value:
            msg = (
                f"this state was saved with {name}={state.context.get(name)}, this Llama has "
                f"{name}={value}; create it with the same"
            )
            raise ValueError(msg)
    if state.policy.evicts and llm.kv_policy.evicts:
        _check_ranking(state.policy, llm.kv_policy)
    if llm.kv_policy.evicts:
        llm._check_system(state.n_system)


def _check_ranking(theirs: KVPolicy, ours: KVPolicy) -> None:
    if _same_ranking(theirs, ours):
        return
    different = [name for name in RANKING if getattr(theirs, name) != getattr(ours, name)]
    listed = ", ".join(f"{name}={getattr(theirs, name)!r}" for name in different or ["seed"])
    msg = (
        f"the cells of this state were ranked with {listed}, not as this policy does; load it "
        "under the same policy, or with kv_policy=None"
    )
    raise PolicyError(msg)


def _same_ranking(a: KVPolicy, b: KVPolicy) -> bool:
    names = RANKING + (("seed",) if a.scorer == "random" else ())
    return all(getattr(a, name) == getattr(b, name) for name in names)


def _cells(llm: Llama) -> bytes:
    size = llama_cpp.llama_state_get_size(llm.ctx)
    data = (ctypes.c_uint8 * size)()
    n = llama_cpp.llama_state_get_data(llm.ctx, data, size)
    return bytes(memoryview(data)[:n])


def _set_cells(llm: Llama, data: bytes, n_tokens: int) -> str:
    """Hand bytes to llama.cpp. Returns what is wrong with them, "" if they are in the cache."""
    if int.from_bytes(data[:4], "little") > len(data):  # llama.cpp would allocate that much
        return "it does not begin with the name of an architecture"
    array = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    if llama_cpp.llama_state_set_data(llm.ctx, array, len(data)) != len(data):
        return "llama.cpp does not accept its cells (damaged, or of a cache of another shape)"
    if llm._kv_refusal:
        return ""
    pos = llm.kv_cells()["pos"].astype(np.int64)
    # llama.cpp takes positions from 0 on as they come
    if not np.all(np.diff(pos) > 0) or int(pos[-1] if pos.size else -1) != n_tokens - 1:
        return "its cells have impossible positions"
    if llm.kv_stats().n_used != pos.size:
        return "it has cells of other sequences"
    return ""


def _set_engine(llm: Llama, engine: bytes) -> str:
    return "" if llm._kv_refusal else _native.set_state(llm.ctx, 0, engine)


def _context(llm: Llama) -> dict[str, Any]:
    return {name: getattr(llm.context_params, name) for name in CONTEXT}


def _fingerprint(llm: Llama) -> str:
    name = llm.metadata.get("general.name", llm.metadata.get("general.architecture", "unknown"))
    sizes = llama_cpp.llama_model_n_params(llm.model), llama_cpp.llama_model_size(llm.model)
    digest = hashlib.blake2b(repr((sorted(llm.metadata.items()), sizes)).encode(), digest_size=8)
    adapter = f", {llm._kv_adapter}" if llm._kv_adapter else ""
    return f"{name} ({digest.hexdigest()}{adapter})"


class StateCache(BaseLlamaCache):
    """A `LlamaRAMCache` or `LlamaDiskCache` that offers only states a prompt can use.

    The parent compares tokens and loads the state with the longest common prefix; one from which
    cells were evicted is of no use if the prompt departs from it. So the best state is chosen and
    loaded here, and the parent is told that there is none.
    """

    def __init__(self, states: BaseLlamaCache, llm: Llama) -> None:
        """Wrap the cache that was given to a Llama."""
        super().__init__(states.capacity_bytes)
        self.states, self.llm = states, llm

    @property
    def cache_size(self) -> int:
        """Bytes of all states."""
        return int(self.states.cache_size)

    def __contains__(self, key: Sequence[int]) -> bool:
        """Return whether a state shares a prefix with these tokens."""
        return key in self.states

    def __setitem__(self, key: Sequence[int], state: llama_cpp.LlamaState) -> None:
        """Keep a state."""
        self.states[key] = state

    def __getitem__(self, prompt: Sequence[int]) -> llama_cpp.LlamaState:
        """Load the state that saves the prompt the most evaluation, then raise KeyError."""
        llm, best_key, best = self.llm, None, None
        n_best = llm._n_reused(prompt)
        for key, state in self._by_prefix(prompt):
            if n_shared(_ids(key), _ids(prompt)) <= n_best:
                break  # the others share less
            try:
                check(llm, state)
            except ValueError:
                continue  # of another model, policy or version
            n = n_reused(_cached(state), prompt, llm._kv_arguments["kv_reuse"])
            if n > n_best:
                n_best, best_key, best = n, key, state
        if best is not None:
            with suppress(ValueError):  # it has more cells than fit: the prompt is evaluated
                load(llm, best)
            if isinstance(self.states, LlamaRAMCache) and best_key is not None:
                self.states.cache_state.move_to_end(best_key)  # the least used one leaves first
        raise KeyError("nothing more to load")

    def _by_prefix(self, prompt: Sequence[int]) -> Any:
        """Yield (key, state), those that share the most tokens with the prompt first."""
        held: Any
        if isinstance(self.states, LlamaRAMCache):
            held = self.states.cache_state
        elif isinstance(self.states, LlamaDiskCache):
            held = self.states.cache
        else:  # one of the caller's own answers with one state
            if prompt in self.states:
                yield prompt, self.states[prompt]
            return
        ids = _ids(prompt)
        for key in sorted(held, key=lambda key: -n_shared(_ids(key), ids)):
            yield key, held[key]


def _ids(tokens: Sequence[int]) -> npt.NDArray[np.intc]:
    return np.asarray(tokens, np.intc)


def _cached(state: llama_cpp.LlamaState) -> Cached:
    if isinstance(state, LlamaState):
        return state.cached
    ids = np.asarray(state.input_ids[: state.n_tokens], np.intc)
    return Cached(ids, np.arange(ids.size, dtype=np.int32), ids.size, Closed())
