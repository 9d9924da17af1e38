"""What can be set: llama_cpp.server's settings, and what leaves the KV cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_type_hints

from pydantic import Field, ValidationError, field_validator

from pyinertia.bench.machine import n_cpus
from pyinertia.binding import llama_cpp as llama_cpp  # before llama_cpp.server looks for it
from pyinertia.cli.options import KVOptions
from pyinertia.errors import CommandError
from pyinertia.kv_types import KV_TYPES
from pyinertia.policy import KVPolicy

import llama_cpp.server.settings as upstream  # isort: skip


def _help(name: str) -> str:
    option = get_type_hints(KVOptions, include_extras=True)[name].__metadata__[0]
    shown = option.show_default
    return (
        f"{option.help} (default: {shown if isinstance(shown, str) else getattr(KVOptions, name)})"
    )


class ModelSettings(upstream.ModelSettings):
    """A model, and what leaves its KV cache; the defaults are those of `pyinertia run`."""

    kv_policy: str = Field(default=KVOptions.kv_policy, description=_help("kv_policy"))
    kv_budget: int | float | None = Field(default=None, description=_help("kv_budget"))
    kv_refresh: int | None = Field(default=None, ge=1, description=_help("kv_refresh"))
    kv_prefill: Literal["full", "bounded"] | None = Field(
        default=None, description=_help("kv_prefill")
    )
    kv_reuse: Literal["append", "strict", "lossy"] = Field(
        default="append",
        description="What a prompt that departs from the cached one reuses after an eviction: "
        "append: what is whole before the departure; strict: nothing; lossy: all that is left "
        "before it. (default: append)",
    )
    kv_positions: Literal["keep", "compact"] | None = Field(
        default=None,
        description="When all positions are used up: compact renumbers the resident ones and goes "
        "on, keep refuses. (default: compact where the model can)",
    )
    n_ctx: int = Field(
        default=0,
        ge=0,
        description="Positions, 0 for as many as the model was trained for. (default: 0)",
    )
    n_threads: int = Field(default_factory=n_cpus, ge=1, description="CPU threads, -1 for all.")
    n_threads_batch: int = Field(
        default_factory=n_cpus, ge=1, description="CPU threads for prompts, -1 for all."
    )
    flash_attn: bool = Field(default=True, description="Flash attention. (default: on)")
    logits_all: bool = Field(
        default=False,
        description="Keep all logits, which logprobs need. Takes n_ctx * n_vocab * 4 bytes and "
        "does not go with compact positions. (default: off)",
    )
    use_mlock: bool = Field(default=False, description="Lock the model in memory. (default: off)")
    verbose: bool = Field(default=False, description="Show llama.cpp's own log. (default: off)")

    @field_validator("type_k", "type_v", mode="before")
    @classmethod
    def _named_type(cls, value: object) -> object:
        return KV_TYPES.get(value, value) if isinstance(value, str) else value

    @field_validator("n_threads", "n_threads_batch", mode="before")
    @classmethod
    def _all_threads(cls, value: object) -> object:
        return n_cpus() if str(value) == "-1" else value  # the command line has text

    def policy(self) -> KVPolicy:
        """The eviction policy that these settings name, see `KVOptions.policy`."""
        budget = None if self.kv_budget is None else str(self.kv_budget)
        return KVOptions(
            kv_policy=self.kv_policy,
            kv_budget=budget,
            kv_refresh=self.kv_refresh,
            kv_prefill=self.kv_prefill,
        ).policy()


class ServerSettings(upstream.ServerSettings):
    """Where the server listens, and to whom."""

    port: int = Field(
        default=8000, ge=0, le=65535, description="Port, 0 for any that is free. (default: 8000)"
    )
    interrupt_requests: bool = Field(
        default=False,
        description="End a stream when another request waits, instead of letting that one wait. "
        "(default: off)",
    )


class ConfigFile(ServerSettings):
    """The server and its models, as a configuration file has them."""

    models: list[ModelSettings] = Field(min_length=1)


def read(flags: dict[str, Any], config_file: str | None) -> tuple[ServerSettings, list[Any]]:
    """Return the settings of the server and of its models.

    Args:
        flags: What the command line says, by the names of the settings.
        config_file: JSON or YAML that says the same for one or more models; flags of the server
            win over it.

    Raises:
        CommandError: A value is not allowed, or the file cannot be read.
    """
    of_server = {name: v for name, v in flags.items() if name in ServerSettings.model_fields}
    of_model = {name: v for name, v in flags.items() if name in ModelSettings.model_fields}
    try:
        if config_file is None:
            return ServerSettings(**of_server), [ModelSettings(**of_model)]
        if of_model:
            listed = ", ".join("--" + name.replace("_", "-") for name in of_model)
            msg = f"--config-file says all about the models; leave {listed} out"
            raise CommandError(msg)
        config = ConfigFile(**{**_parse(Path(config_file)), **of_server})
        names = [model.model_alias or model.model for model in config.models]
        if twice := {name for name in names if names.count(name) > 1}:
            msg = f"{config_file} has two models called {min(twice)}; give them a model_alias each"
            raise CommandError(msg)
        return config, config.models
    except ValidationError as error:
        raise CommandError(_reason(error, config_file)) from error


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix in (".yaml", ".yml"):
            import yaml

            found = yaml.safe_load(text)
        else:
            found = json.loads(text)
    except OSError:
        raise
    except Exception as error:  # YAML has errors of its own
        msg = f"{path} is neither JSON nor YAML (by its suffix): {error}"
        raise CommandError(msg) from error
    if not isinstance(found, dict):
        msg = f"{path} must hold an object with the key models, see docs/how-to/serve.md"
        raise CommandError(msg)
    return found


def _reason(error: ValidationError, config_file: str | None) -> str:
    parts = []
    for one in error.errors():
        name = ".".join(map(str, one["loc"]))
        if name == "model" and one["type"] == "missing":
            return "no model; name a GGUF file: pyinertia serve FILE, or pass --config-file"
        given = "" if one["type"] == "missing" else f" (given: {one['input']!r})"
        parts.append(f"{name}: {one['msg']}{given}")
    where = f"{config_file}: " if config_file else ""
    return where + "; ".join(dict.fromkeys(parts))
