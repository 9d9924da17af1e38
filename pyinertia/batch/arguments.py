"""What `generate_many` and `summarise` are called with: checked before a model is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeVar

import llama_cpp

from pyinertia.batch.schedule import Settings
from pyinertia.llama import Llama
from pyinertia.policy import MAX_COUNT, KVPolicy, resolve_policy

N_PARALLEL_MOST = 256  # LLAMA_MAX_SEQ

# those of Llama.create_completion that a sampler chain takes
SAMPLING = (
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "frequency_penalty",
    "presence_penalty",
    "mirostat_mode",
    "mirostat_tau",
    "mirostat_eta",
    "grammar",
)
# keywords of Llama that have no meaning here, or another one
NOT_OURS = {"kv_prefill", "embedding", "logits_all", "draft_model", "vocab_only", "seed"}

Item = TypeVar("Item")


def check_counts(n_parallel: int, n_ctx: int, max_tokens: int | None, seed: int) -> int:
    """Return max_tokens as a number.

    Raises:
        ValueError: One of them is not a whole number, or out of range.
    """
    check_count("n_parallel", n_parallel, 1, N_PARALLEL_MOST)
    check_count("n_ctx", n_ctx, 0)
    check_count("seed", seed, 0)
    return MAX_COUNT if max_tokens is None else check_count("max_tokens", max_tokens, 1)


def check_count(name: str, value: Any, least: int, most: int = MAX_COUNT) -> int:
    """Return a whole number; ValueError if it is none, or out of range."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        msg = f"{name}={value!r} must be a whole number in [{least}, {most}]"
        raise ValueError(msg)
    return int(value)


def check_policy(
    kv_policy: str | KVPolicy | None, kv_budget: int | None, kv_refresh: int | None
) -> None:
    """Raise the errors of a policy, those of its bounded prefill included."""
    if resolve_policy(kv_policy, kv_budget, kv_refresh).evicts:
        resolve_policy(kv_policy, kv_budget, kv_refresh, "bounded")


def check_items(name: str, items: Iterable[Item]) -> Iterator[Item]:
    """Return an iterator over prompts or documents; a single one by itself is a mistake."""
    if isinstance(items, str | bytes | Mapping):
        msg = f"{name} must be several, in a list or another iterable; this is a single one"
        raise TypeError(msg)
    return iter(items)


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings as a tuple."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        msg = f"stop={stop!r} must be a text, or texts, none of them empty"
        raise ValueError(msg)
    return stops


def split_keywords(
    max_tokens: int, temperature: float, kwargs: dict[str, Any]
) -> tuple[Settings, dict[str, Any]]:
    """Return the settings of a run, and the keywords that load the model.

    Raises:
        TypeError: A keyword is unknown.
    """
    parameters = {
        *inspect.signature(llama_cpp.Llama.__init__).parameters,
        *inspect.signature(Llama.__init__).parameters,
    }
    known = {*SAMPLING, *parameters} - NOT_OURS - {"self", "kwargs", "model_path"}
    for name in sorted(kwargs.keys() - known):
        nearest = get_close_matches(name, sorted(known), n=1, cutoff=0.0)[0]
        msg = (
            f"a batch has no keyword {name!r}; the nearest one is {nearest!r}. It takes the "
            "sampling settings of Llama.create_completion and the keywords of Llama"
        )
        raise TypeError(msg)
    sampling = {name: kwargs[name] for name in SAMPLING if name in kwargs}
    settings = Settings(max_tokens=max_tokens, sampling={"temp": temperature, **sampling})
    return settings, {name: kwargs[name] for name in kwargs.keys() - sampling.keys()}
