"""What holds for every command: one readable line per error, a clean end on Ctrl-C and pipes."""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from pyinertia.errors import PyInertiaError

BROKEN_PIPE, INTERRUPTED = 141, 130  # 128 and the signal, as shells count
_ASKED_FOR = (PyInertiaError, FileNotFoundError)  # what the caller can put right

_debug = False


def _set_debug(value: bool) -> bool:
    global _debug
    _debug = _debug or value
    return value


DEBUG = typer.Option(
    "--debug",
    help="Show the traceback of an error.",
    is_eager=True,
    callback=_set_debug,
    rich_help_panel="Help",
)


def say(text: str) -> None:
    """Write a line for the user to stderr, beside the output."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Group(TyperGroup):
    """Commands whose errors are one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command.

        Ends with 2 if it cannot do what it was asked for, 1 on another error, 130 on Ctrl-C and
        141 if nobody reads.
        """
        if isinstance(sys.stdout, io.TextIOWrapper):  # a console need not know all characters
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except KeyboardInterrupt as error:
            raise typer.Exit(INTERRUPTED) from error
        except BrokenPipeError as error:
            # what is still buffered must not fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from error
        except Exception as error:
            # exits and usage errors are typer's own, and shown by it
            if _debug or isinstance(error, typer.Abort) or hasattr(error, "exit_code"):
                raise
            say(f"error: {_one_line(error)}")
            raise typer.Exit(2 if isinstance(error, _ASKED_FOR) else 1) from error
        return result


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, PyInertiaError):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return f"{text} (--debug shows where)"
