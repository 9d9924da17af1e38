"""The options that commands share: each stands here once, in the panel that `--help` shows it in.

The names are llama.cpp's where it has them. A command names the groups it takes as parameters,
and `command` spreads their fields over its command line.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import typer

from pyinertia.cli.group import DEBUG
from pyinertia.errors import CommandError
from pyinertia.eval.settings import KV_TYPES
from pyinertia.policy import POLICIES, PREFILLS, KVPolicy, resolve_policy

UNQUANTISED = ("f32", "f16", "bf16")


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Which model, and how it runs."""

    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", metavar="FILE", help="GGUF model.", rich_help_panel="Model"),
    ] = None
    hf: Annotated[
        str | None,
        typer.Option(
            "-hf",
            "--hf",
            metavar="REPO[:FILE]",
            help="Fetch the model from the Hugging Face hub, once. FILE is a name, a pattern or "
            "a quantisation such as Q8_0.",
            show_default="no; FILE: Q4_K_M, or the only one",
            rich_help_panel="Model",
        ),
    ] = None
    threads: Annotated[
        int | None,
        typer.Option(
            "-t",
            "--threads",
            min=1,
            help="CPU threads.",
            show_default="as many as CPUs",
            rich_help_panel="Model",
        ),
    ] = None
    n_gpu_layers: Annotated[
        int,
        typer.Option(
            "-ngl",
            "--n-gpu-layers",
            min=-1,
            help="Layers on the GPU, -1 for all.",
            rich_help_panel="Model",
        ),
    ] = 0
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Show llama.cpp's own log.", rich_help_panel="Help"),
    ] = False
    debug: Annotated[bool, DEBUG] = False


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Positions, batches and the types of the cache."""

    ctx_size: Annotated[
        int,
        typer.Option(
            "-c",
            "--ctx-size",
            min=0,
            help="Positions: the most tokens of prompt and answers together, whether they are "
            "still in the cache or not. 0 for as many as the model was trained for.",
            rich_help_panel="Context",
        ),
    ] = 0
    batch_size: Annotated[
        int,
        typer.Option(
            "-b",
            "--batch-size",
            min=1,
            help="Tokens of the prompt that enter at once.",
            rich_help_panel="Context",
        ),
    ] = 512
    ubatch_size: Annotated[
        int,
        typer.Option(
            "-ub",
            "--ubatch-size",
            min=1,
            help="Tokens that are computed at once.",
            rich_help_panel="Context",
        ),
    ] = 512
    flash_attn: Annotated[
        str,
        typer.Option(
            "-fa",
            "--flash-attn",
            metavar="on|off",
            help="Flash attention.",
            rich_help_panel="Context",
        ),
    ] = "on"
    cache_type_k: Annotated[
        str,
        typer.Option(
            "-ctk",
            "--cache-type-k",
            metavar="TYPE",
            help=f"Type of the cached keys: {', '.join(KV_TYPES)}.",
            rich_help_panel="Context",
        ),
    ] = "f16"
    cache_type_v: Annotated[
        str,
        typer.Option(
            "-ctv",
            "--cache-type-v",
            metavar="TYPE",
            help="Type of the cached values.",
            rich_help_panel="Context",
        ),
    ] = "f16"

    def check(self) -> None:
        """Refuse unknown types, and a quantised V without flash attention."""
        for option, kind in (("-ctk", self.cache_type_k), ("-ctv", self.cache_type_v)):
            if kind not in KV_TYPES:
                msg = f"{option} {kind}: the cache types are {', '.join(KV_TYPES)}"
                raise CommandError(msg)
        if self.flash_attn not in ("on", "off"):
            msg = f"-fa {self.flash_attn}: must be on or off"
            raise CommandError(msg)
        if self.flash_attn == "off" and self.cache_type_v not in UNQUANTISED:
            msg = f"-ctv {self.cache_type_v} needs flash attention; leave -fa off out"
            raise CommandError(msg)


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the next token is chosen."""

    n_predict: Annotated[
        int,
        typer.Option(
            "-n",
            "--n-predict",
            min=-1,
            help="Most tokens of an answer, -1 for as many as the model wants.",
            rich_help_panel="Sampling",
        ),
    ] = -1
    temp: Annotated[
        float,
        typer.Option("--temp", min=0, help="Temperature, 0 is greedy.", rich_help_panel="Sampling"),
    ] = 0.8
    top_k: Annotated[
        int,
        typer.Option(
            "--top-k", min=0, help="Only the k likeliest, 0 is off.", rich_help_panel="Sampling"
        ),
    ] = 40
    top_p: Annotated[
        float,
        typer.Option(
            "--top-p",
            min=0,
            max=1,
            help="Only the likeliest that have this share together, 1 is off.",
            rich_help_panel="Sampling",
        ),
    ] = 0.95
    min_p: Annotated[
        float,
        typer.Option(
            "--min-p",
            min=0,
            max=1,
            help="Only those with this share of the likeliest one's, 0 is off.",
            rich_help_panel="Sampling",
        ),
    ] = 0.05
    repeat_penalty: Annotated[
        float,
        typer.Option(
            "--repeat-penalty",
            min=0,
            help="Above 1 makes what was said less likely, 1 is off.",
            rich_help_panel="Sampling",
        ),
    ] = 1.0
    seed: Annotated[
        int,
        typer.Option(
            "-s",
            "--seed",
            min=-1,
            max=2**32 - 2,
            help="Seed, -1 for another one each time.",
            rich_help_panel="Sampling",
        ),
    ] = -1


@dataclass(frozen=True, kw_only=True)
class KVOptions:
    """What leaves the KV cache."""

    kv_policy: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"What stays: {', '.join(POLICIES)}. full keeps everything, and needs memory "
            "for all of -c.",
            rich_help_panel="KV cache",
        ),
    ] = "inertiakv"
    kv_budget: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Most cells that stay, or with --kv-prefill full a share of the prompt: 0.25.",
            show_default=str(KVPolicy().n_budget),
            rich_help_panel="KV cache",
        ),
    ] = None
    kv_refresh: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Decode steps from one scored one to the next.",
            show_default="the policy's",
            rich_help_panel="KV cache",
        ),
    ] = None
    kv_prefill: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(PREFILLS),
            help="bounded: a long prompt is cut while it is read, memory is that of the budget and "
            "one batch. full: it is read whole and cut then, which keeps what matters better and "
            "needs memory for all of -c.",
            show_default="bounded; full for a share",
            rich_help_panel="KV cache",
        ),
    ] = None

    def policy(self) -> KVPolicy:
        """The policy that these options name.

        Raises:
            CommandError: A value is out of range, or has no meaning under this policy.
            PolicyError: The name is unknown, or values do not go together.
        """
        plain = resolve_policy(self.kv_policy)
        if not plain.evicts:
            for option in ("kv_budget", "kv_refresh", "kv_prefill"):
                if getattr(self, option) is not None:
                    flag = "--" + option.replace("_", "-")
                    msg = f"--kv-policy {self.kv_policy} drops nothing, so leave {flag} out"
                    raise CommandError(msg)
            return plain
        return resolve_policy(**self.keywords())

    def keywords(self) -> dict[str, Any]:
        """The options as keywords of `Llama`."""
        if not resolve_policy(self.kv_policy).evicts:
            return {"kv_policy": self.kv_policy}
        budget = _budget(self.kv_budget)
        return {
            "kv_policy": self.kv_policy,
            "kv_budget": budget,
            "kv_refresh": self.kv_refresh,
            "kv_prefill": self.kv_prefill or ("full" if isinstance(budget, float) else "bounded"),
        }


def _budget(text: str | None) -> int | float | None:
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        pass
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0 < share < 1:
        msg = f"--kv-budget {text}: must be a number of cells (1024), or a share (0.25)"
        raise CommandError(msg)
    return share


def command(
    app: typer.Typer, name: str, defaults: Mapping[str, Any] = MappingProxyType({}), **settings: Any
) -> Callable[[Any], Any]:
    """Register a function as a command; parameters that are groups become their options.

    Args:
        app: Where the command goes.
        name: What it is called.
        defaults: Of options in groups, where this command has others.
        **settings: Of `typer.Typer.command`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        groups: dict[str, type[Any]] = {}
        shown: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if is_dataclass(parameter.annotation) and isinstance(parameter.annotation, type):
                groups[parameter.name] = parameter.annotation
                shown += _fields(parameter.annotation, defaults)
            else:
                shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        def call(**given: Any) -> None:
            for group, kind in groups.items():
                given[group] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            function(**given)

        described: Any = call  # typer reads the options off the signature
        described.__signature__ = inspect.Signature(shown)
        described.__annotations__ = {p.name: p.annotation for p in shown}
        described.__doc__ = function.__doc__
        app.command(name, **settings)(described)
        return function

    return register


def _fields(group: type[Any], defaults: Mapping[str, Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults.get(field.name, field.default),
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
