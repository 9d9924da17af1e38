"""A model as the command line names it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyinertia.cli.group import say
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.errors import CommandError, ModelError, PolicyError
from pyinertia.kv_types import KV_TYPES

if TYPE_CHECKING:
    from pyinertia.llama import Llama


def model_path(options: ModelOptions) -> Path:
    """Return the model's file, from the hub if that is where it is.

    Raises:
        CommandError: No model is named, or two, or the hub does not have it.
        ModelError: There is no such file.
    """
    if (options.model is None) == (options.hf is None):
        msg = "name one model: -m FILE, or -hf REPO[:FILE] to fetch it from the Hugging Face hub"
        raise CommandError(msg)
    if options.hf is not None:
        from pyinertia.cli import hub

        return hub.fetch(options.hf)
    path: Path = options.model  # type: ignore[assignment]
    check_file(path)
    return path


def check_file(path: Path) -> None:
    """Refuse a model that is no file.

    Raises:
        ModelError: It is not.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        msg = f"{path} {what}; pass a GGUF file"
        raise ModelError(msg)


def open_model(
    model: ModelOptions, context: ContextOptions, kv: KVOptions, sampling: SamplingOptions
) -> Llama:
    """Load the model; notes about the budget go to stderr.

    Raises:
        CommandError: Options do not go together, or there is no memory for the context.
        PyInertiaError: The model cannot be read, or the policy cannot run on it.
    """
    context.check()
    policy = kv.policy()
    path = model_path(model)
    from pyinertia.cli import native_log
    from pyinertia.llama import Llama

    if not model.verbose:
        native_log.silence()
    with warnings_as_notes(of_budget=kv.kv_budget is not None):
        try:
            llm = Llama(
                path,
                **kv.keywords(),
                n_ctx=context.ctx_size,
                seed=seed(sampling),
                verbose=model.verbose,
                **keywords(model, context),
            )
        except PolicyError as error:
            raise CommandError(in_flags(error)) from error
        except ValueError as error:
            if "create llama_context" not in str(error):
                raise
            why = native_log.last_error() or "--verbose shows why"
            msg = (
                f"{path.name} cannot run with -c {context.ctx_size}, --kv-budget "
                f"{policy.n_budget}, -ctk {context.cache_type_k} and -ctv {context.cache_type_v} "
                f"({why}); try smaller ones, or f16"
            )
            raise CommandError(msg) from error
    n_trained = llm._model.n_ctx_train()
    if context.ctx_size > n_trained:
        say(
            f"note: -c {context.ctx_size} is more than the {n_trained} positions that the model "
            "was trained for; beyond those it may talk nonsense"
        )
    return llm


def in_flags(error: PolicyError) -> str:
    """What the library says about a policy, in the words of the command line."""
    text = str(error).replace("Use kv_policy=None", "Use --kv-policy full")
    return re.sub(r"kv_policy='([\w-]+)'", r"--kv-policy \1", text)


@contextmanager
def warnings_as_notes(of_budget: bool) -> Iterator[None]:
    """Show the library's warnings as lines of their own, those of the budget only if wanted.

    About the default budget there is nothing that the user could mend.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        if not of_budget:
            warnings.filterwarnings("ignore", "a KV budget", UserWarning)
        warnings.showwarning = lambda message, *_: say(f"note: {message}")
        yield


def keywords(model: ModelOptions, context: ContextOptions) -> dict[str, Any]:
    """The options as keywords of `Llama`, but for the length and the policy."""
    from pyinertia.bench.machine import n_cpus

    threads = model.threads or n_cpus()
    return {
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_gpu_layers": model.n_gpu_layers,
        "n_batch": context.batch_size,
        "n_ubatch": min(context.ubatch_size, context.batch_size),
        "swa_full": False,  # as in llama.cpp's own programs
        "flash_attn": context.flash_attn == "on",
        "type_k": KV_TYPES[context.cache_type_k],
        "type_v": KV_TYPES[context.cache_type_v],
    }


def seed(sampling: SamplingOptions) -> int:
    """The seed; llama.cpp has a number that stands for another one each time."""
    return 2**32 - 1 if sampling.seed == -1 else sampling.seed
