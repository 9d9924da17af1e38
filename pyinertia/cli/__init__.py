"""The command `pyinertia`; a command that needs an extra imports it when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

import pyinertia
from pyinertia.cli import about, bench, chat, info, inspect, run, serve, summarise
from pyinertia.cli.group import DEBUG, Group
from pyinertia.cli.options import command
from pyinertia.eval import cli as eval_cli

USE, MEASURE = "Use a model", "Measure"

app = typer.Typer(
    cls=Group,
    help="llama.cpp with a KV cache that keeps what attention still needs. Without a command: "
    "versions, devices and policies.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
command(app, "run", help=run.HELP, rich_help_panel=USE)(run.main)
command(app, "chat", help=chat.HELP, rich_help_panel=USE)(chat.main)
command(
    app,
    "summarise",
    defaults=summarise.DEFAULTS,
    help=summarise.HELP,
    rich_help_panel=USE,
)(summarise.main)
app.command("serve", help=serve.HELP, rich_help_panel=USE, context_settings=serve.SETTINGS)(
    serve.main
)
command(app, "info", help=info.HELP, rich_help_panel=USE)(info.main)
command(
    app,
    "inspect",
    defaults=inspect.DEFAULTS,
    help=inspect.HELP,
    rich_help_panel=USE,
)(inspect.main)
app.command("bench", help=bench.HELP, rich_help_panel=MEASURE)(bench.main)
app.add_typer(eval_cli.app, name="eval", rich_help_panel=MEASURE)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pyinertia {pyinertia.__version__}")
        raise typer.Exit


VERSION = typer.Option("--version", help="Show the version.", is_eager=True, callback=_show_version)


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    version: Annotated[bool, VERSION] = False,
    debug: Annotated[bool, DEBUG] = False,
) -> None:
    """Without a command: versions, devices and policies."""
    if context.invoked_subcommand is None:
        raise typer.Exit(about.main())
