"""The options that all evaluations share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from pyinertia.bench.machine import n_cpus
from pyinertia.errors import CommandError, EvalError, ModelError
from pyinertia.eval.arms import parse_arms
from pyinertia.kv_types import check_kv_types
from pyinertia.policy_text import split_names


@dataclass(frozen=True, kw_only=True)
class Options:
    """What every command takes; the fields are its options."""

    model: Annotated[Path, typer.Option("-m", "--model", metavar="FILE", help="GGUF model.")]
    policies: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Policies, separated by commas. NAME/bounded or NAME/FIELD=VALUE changes one; "
            "NAME/bounded/query names a sample's question first, NAME/bounded/query=TEXT that "
            "text, or none. The full cache always runs.",
        ),
    ] = "inertiakv,score-free,streaming-llm,random"
    budgets: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="Budgets, separated by commas: cells (512) or shares (0.25)."
        ),
    ] = "256,512"
    samples: Annotated[int, typer.Option(min=1, help="Samples per task.")] = 20
    length: Annotated[
        int, typer.Option(min=64, help="Tokens of a sample, room for the answer included.")
    ] = 4096
    seed: Annotated[int, typer.Option(min=0, help="Seed of the samples.")] = 0
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder of the results. A run that was stopped goes on where it was.",
        ),
    ] = Path("eval")
    chat: Annotated[
        bool,
        typer.Option("--chat/--no-chat", help="Use the model's chat template, if it has one."),
    ] = True
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNG plots.")] = True
    threads: Annotated[
        int,
        typer.Option("-t", "--threads", min=1, help="CPU threads.", show_default="as many as CPUs"),
    ] = n_cpus()
    batch_size: Annotated[
        int,
        typer.Option(
            "-b",
            "--batch-size",
            min=1,
            help="n_batch: what a bounded prefill evaluates between two cuts.",
        ),
    ] = 512
    n_gpu_layers: Annotated[
        int, typer.Option("-ngl", "--n-gpu-layers", help="Layers on the GPU, -1 for all.")
    ] = 0
    flash_attn: Annotated[
        str, typer.Option("-fa", "--flash-attn", metavar="on|off", help="Flash attention.")
    ] = "on"
    cache_type_k: Annotated[
        str, typer.Option("-ctk", "--cache-type-k", metavar="TYPE", help="Type of the cached keys.")
    ] = "f16"
    cache_type_v: Annotated[
        str,
        typer.Option("-ctv", "--cache-type-v", metavar="TYPE", help="Type of the cached values."),
    ] = "f16"

    def check(self) -> None:
        """Refuse what cannot be, before anything is fetched or opened.

        Raises:
            CommandError: A policy or a cache type is unknown, or the types need flash attention.
            EvalError: A budget is none, or two policies are one.
            ModelError: There is no such file.
        """
        parse_arms(self.policies, self.budgets)
        if not self.model.is_file():
            msg = f"{self.model} does not exist; pass a GGUF file with -m"
            raise ModelError(msg)
        if self.flash_attn not in ("on", "off"):
            msg = f"-fa {self.flash_attn}: must be on or off"
            raise CommandError(msg)
        check_kv_types(self.cache_type_k, self.cache_type_v, self.flash_attn == "on")


def command(app: typer.Typer, name: str, **defaults: Any) -> Callable[[Any], Any]:
    """Register a function of (Options, own options) as a command; `defaults` are of Options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
        hints = get_type_hints(Options, include_extras=True)
        shared = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=defaults.get(
                    field.name,
                    inspect.Parameter.empty if field.name == "model" else field.default,
                ),
                annotation=hints[field.name],
            )
            for field in fields(Options)
        ]

        def call(**given: Any) -> None:
            options = Options(**{field.name: given.pop(field.name) for field in fields(Options)})
            options.check()
            function(options, **given)

        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own]
        described: Any = call  # typer reads the options off the signature
        described.__signature__ = inspect.Signature([*shared[:1], *own, *shared[1:]])
        described.__annotations__ = {p.name: p.annotation for p in [*shared, *own]}
        described.__doc__ = function.__doc__
        app.command(name)(described)
        return function

    return register


def choose(given: str, known: tuple[str, ...] | list[str], option: str = "--tasks") -> list[str]:
    """Read a list of names, or "all".

    Raises:
        EvalError: A name is unknown, or there is none.
    """
    names = split_names(given)
    if names == ["all"]:
        return list(known)
    for name in names:
        if name not in known:
            nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            msg = (
                f"{option}: {name!r} is not known; known: {', '.join(known)}, or all. "
                f"Did you mean {nearest!r}?"
            )
            raise EvalError(msg)
    if not names:
        msg = f"{option} names nothing; known: {', '.join(known)}, or all"
        raise EvalError(msg)
    return names
