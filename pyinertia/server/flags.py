"""The command line: a flag for each setting, named like it; and llama.cpp's short names."""

from __future__ import annotations

import argparse
import json
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from pyinertia.cli import hub
from pyinertia.errors import CommandError
from pyinertia.server.settings import ModelSettings, ServerSettings

SHORT = {
    "model": ["-m"],
    "n_ctx": ["-c", "--ctx-size"],
    "n_batch": ["-b", "--batch-size"],
    "n_ubatch": ["-ub", "--ubatch-size"],
    "n_threads": ["-t", "--threads"],
    "n_threads_batch": ["-tb", "--threads-batch"],
    "n_gpu_layers": ["-ngl"],
    "flash_attn": ["-fa"],
    "type_k": ["-ctk", "--cache-type-k"],
    "type_v": ["-ctv", "--cache-type-v"],
    "model_alias": ["-a", "--alias"],
}


SWITCH = ("on", "off", "true", "false", "1", "0", "yes", "no")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        msg = f"{message}; pyinertia serve --help lists the flags"
        raise CommandError(msg)


def parse(args: list[str], description: str) -> tuple[dict[str, Any], str | None]:
    """Return what the command line sets, by the names of the settings, and the configuration file.

    Values are text: the settings know their types. `--n_ctx`, as llama_cpp.server writes it, and
    `--n-ctx` are the same.

    Raises:
        CommandError: A flag is unknown or has no value.
    """
    parser = _Parser(
        prog="pyinertia serve",
        usage="pyinertia serve MODEL [flags]",
        description=description,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        epilog="A setting without a flag is looked for in the environment, in capitals: API_KEY.",
    )
    parser.add_argument("file", nargs="?", metavar="MODEL", help="GGUF model, as with -m")
    parser.add_argument(
        "-hf", "--hf", metavar="REPO[:FILE]", help="fetch the model from the Hugging Face hub, once"
    )
    ours = {name for name in ModelSettings.model_fields if name.startswith("kv_")}
    ours.discard("kv_overrides")
    models = parser.add_argument_group("model and context")
    cache = parser.add_argument_group("KV cache")
    for name in ModelSettings.model_fields:
        _add(cache if name in ours else models, ModelSettings, name)
    server = parser.add_argument_group("server")
    for name in ServerSettings.model_fields:
        _add(server, ServerSettings, name)
    server.add_argument(
        "--config-file", metavar="FILE", help="JSON or YAML: these settings, and a list of models"
    )
    given = vars(parser.parse_args([_dashed(arg) for arg in args]))
    config_file = given.pop("config_file", None)
    file = given.pop("file", None)
    hub_name = given.pop("hf", None)
    named = [one for one in (file, given.get("model"), hub_name) if one is not None]
    if len(named) > 1:
        msg = f"{len(named)} models, {' and '.join(named)}; leave all but one out"
        raise CommandError(msg)
    if hub_name is not None:
        given["model"] = str(hub.fetch(hub_name))
    elif file is not None:
        given["model"] = file
    return given, config_file


def _dashed(arg: str) -> str:
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def _add(group: argparse._ArgumentGroup, settings: type[BaseModel], name: str) -> None:
    field = settings.model_fields[name]
    kinds = _kinds(field.annotation)
    more: dict[str, Any] = {"metavar": "VALUE"}
    if bool in kinds:
        more = {"metavar": "on|off", "nargs": "?", "const": "on", "type": _switch}
    elif list in kinds:
        more = {"metavar": "VALUE", "nargs": "+"}
    elif dict in kinds:
        more = {"metavar": "JSON", "type": _json_object}
    text = field.description or ""
    if "(default" not in text and field.default_factory is None and field.default is not None:
        text += "" if field.is_required() else f" (default: {field.default})"
    flags = [*SHORT.get(name, ()), "--" + name.replace("_", "-")]
    group.add_argument(*flags, dest=name, help=text.strip().replace("%", "%%"), **more)


def _switch(text: str) -> str:
    if text.lower() not in SWITCH:
        msg = f"{text} is not on or off; a model's file comes before the flags, or with -m"
        raise argparse.ArgumentTypeError(msg)
    return text


def _kinds(annotation: Any) -> set[Any]:
    inner = {kind for part in get_args(annotation) for kind in _kinds(part)}
    return inner | {get_origin(annotation) or annotation}


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        msg = f"{text!r} is no JSON object"
        raise argparse.ArgumentTypeError(msg)
    return value
