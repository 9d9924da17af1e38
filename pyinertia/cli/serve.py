"""`pyinertia serve`."""

from __future__ import annotations

from typing import Annotated

import typer

from pyinertia.cli.group import DEBUG
from pyinertia.errors import CommandError

HELP = (
    "Serve a model over HTTP, to OpenAI's clients. Endpoints, settings and flags are those of "
    "llama_cpp.server."
)
# the flags are the settings, and those need the extra
SETTINGS = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def main(context: typer.Context, debug: Annotated[bool, DEBUG] = False) -> None:
    """Read the flags, load the model, serve."""
    try:
        from pyinertia.server import flags, run, settings
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pyinertia"):
            raise
        msg = f"serve needs {error.name}; pip install 'pyinertia[server]'"
        raise CommandError(msg) from error
    given, config_file = flags.parse(context.args, HELP)
    run.serve(*settings.read(given, config_file))
