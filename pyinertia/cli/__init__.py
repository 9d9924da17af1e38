"""The command `pyinertia`; a command that needs an extra imports it when it runs."""

from __future__ import annotations

import typer

from pyinertia.cli import about, bench
from pyinertia.eval import cli as eval_cli

app = typer.Typer(
    help="llama.cpp with a KV cache that keeps what attention still needs.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
app.command("bench", help=bench.HELP)(bench.main)
app.add_typer(eval_cli.app, name="eval")


@app.callback(invoke_without_command=True)
def main(context: typer.Context) -> None:
    """Without a command: versions, devices and policies."""
    if context.invoked_subcommand is None:
        raise typer.Exit(about.main())
