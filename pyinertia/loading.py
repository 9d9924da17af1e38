"""What happens to the keywords of a `Llama` before its model is loaded, and to a failed load."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable
from contextlib import closing
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pyinertia.binding import IMAGE_HANDLERS, llama_cpp
from pyinertia.errors import ModelError, PolicyError
from pyinertia.policy import KVPolicy
from pyinertia.vocabulary import open_vocabulary

# names that llama_cpp.server and LangChain still pass, though the parent ignores them
LEGACY_KEYWORDS = frozenset(
    {"f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps", "rpc_servers"}
)
LEAST_USEFUL_BUDGET = 256
SPLITS_OF_LAYERS = {  # split modes that put parts of a layer's keys on several devices
    llama_cpp.LLAMA_SPLIT_MODE_ROW: "row",
    llama_cpp.LLAMA_SPLIT_MODE_TENSOR: "tensor",
}


def check_keywords(kwargs: dict[str, Any], ours: Iterable[str]) -> None:
    """Drop legacy keywords from kwargs with a warning and raise TypeError for unknown ones."""
    known = {"model_path", *ours}
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


def refuse_unservable(kwargs: dict[str, Any], named: str) -> None:
    """Raise PolicyError for what cannot run beside a policy that evicts; named: the policy."""
    if kwargs.get("embedding"):
        msg = f"{named} needs a model that generates, embedding=True does not; use kv_policy=None"
        raise PolicyError(msg)
    if split := SPLITS_OF_LAYERS.get(kwargs.get("split_mode", -1)):
        msg = (
            f"{named} needs a layer's keys on one device, split_mode {split} spreads them; use "
            "split_mode=llama_cpp.LLAMA_SPLIT_MODE_LAYER, or kv_policy=None"
        )
        raise PolicyError(msg)
    refuse_images(kwargs.get("chat_handler"), named)


def refuse_images(chat_handler: object, named: str) -> None:
    """Raise PolicyError for a chat handler that puts images into the cache; named: the policy."""
    if isinstance(chat_handler, IMAGE_HANDLERS):
        msg = (
            f"{named} does not serve images, whose cells may share a position; "
            "use kv_policy=None with this chat_handler"
        )
        raise PolicyError(msg)


def warn_budget(policy: KVPolicy, n_ctx: int) -> None:
    """Warn of a budget that is never reached, or too small to be of use."""
    budget = policy.n_budget
    if not policy.evicts or isinstance(budget, float):
        return
    reason = ""
    if budget >= n_ctx:
        reason = f"is never reached in n_ctx={n_ctx}; pass a smaller kv_budget, or a larger n_ctx"
    elif budget < LEAST_USEFUL_BUDGET:
        reason = (
            f"is below {LEAST_USEFUL_BUDGET}, where quality falls off and speed no longer gains"
        )
    if reason:
        warnings.warn(f"a KV budget of {budget} cells {reason}", UserWarning, stacklevel=3)


def warn_gpu(n_gpu_layers: int) -> None:
    """Warn of layers for a GPU that is not there; llama.cpp computes them on the CPU."""
    if n_gpu_layers and not llama_cpp.llama_supports_gpu_offload():
        warnings.warn(
            f"n_gpu_layers={n_gpu_layers}: no GPU is found, the CPU computes all layers; the "
            "command pyinertia lists the devices",
            UserWarning,
            stacklevel=3,
        )


def choice(name: str, value: object, known: tuple[object, ...]) -> None:
    """Raise PolicyError unless the value is one of the known ones."""
    if value not in known:
        listed = ", ".join(repr(one) for one in known)
        raise PolicyError(f"{name}={value!r}: {name} must be one of {listed}")


def n_ctx_train(path: str) -> int:
    """Return the positions a model was trained for, 0 if its file cannot be read."""
    try:
        model = open_vocabulary(path)
    except ModelError:
        return 0
    with closing(model):
        try:
            metadata = model.metadata()
        except UnicodeDecodeError:  # the file is damaged; loading it will tell what it can
            return 0
        architecture = metadata.get("general.architecture", "")
        length = metadata.get(f"{architecture}.context_length", "")
        return int(length) if length.isdecimal() else 0


def explain_context(params: Any) -> str:
    """Return what may be wrong where llama.cpp makes no context; params: what it was given."""
    return (
        f"Failed to create llama_context with n_ctx={params.n_ctx}, n_batch={params.n_batch}, "
        f"type_k={params.type_k} and type_v={params.type_v}: there is no memory for it, or they do "
        "not go together. Pass smaller ones, or verbose=True to see why"
    )


def explain(error: ValueError, path: str) -> str:
    """Return what is wrong with the file, "" if the error is about something else."""
    if not Path(path).exists():
        return f"{path} does not exist; check model_path"
    if "load model" in str(error):
        return (
            f"{path} is not a complete GGUF model that this llama.cpp can read; download it again, "
            "or pass verbose=True to see why"
        )
    return ""
