"""`pyinertia inspect`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from pyinertia.cli.group import INTERRUPTED, say
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.cli.run import InChat, System, check_system, prompt_tokens, read_prompt
from pyinertia.errors import CommandError

if TYPE_CHECKING:
    from pyinertia.inspect import Recording
    from pyinertia.llama import Llama

DEFAULTS = {"n_predict": 128, "temp": 0.0, "seed": 0}

HELP = (
    "Show what stays in the cache while a model answers a prompt: which tokens are dropped, and "
    "what the others score, after every decode step."
    "\n\n"
    "Without --html and --png the state at the end goes to stdout. The prompt is run as `pyinertia "
    "run -f` would; of a long run every 2nd step is shown, or every 4th, ..., so that there are "
    "256 at most."
)


def main(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="PROMPT", help="File: text, HTML or PDF; - for stdin.", show_default=False
        ),
    ],
    html: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a page to look at: it needs a browser, and no network.",
            rich_help_panel="Output",
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write a picture. Needs pip install 'pyinertia\\[plot]'.",
            rich_help_panel="Output",
        ),
    ] = None,
    system: System = None,
    chat: InChat = True,
    *,
    model: ModelOptions,
    context: ContextOptions,
    sampling: SamplingOptions,
    kv: KVOptions,
) -> None:
    """Check, run, show."""
    text = read_prompt(None, file)
    check_system(system, chat)
    writers = _writers(html, png, [path for path in (file, model.model) if path])
    from pyinertia.cli.models import open_model

    llm = open_model(model, context, kv, sampling)
    try:
        tokens = prompt_tokens(llm, text, system, chat)
        recording = _record(llm, tokens, sampling, kv.kv_policy)
    finally:
        llm.close()
    for path, write in writers:
        write(recording)
        say(f"wrote {path}")
    if not writers:
        from pyinertia.inspect import terminal

        # a pipe has no width
        width = None if sys.stdout.isatty() else 400
        terminal.show(recording, Console(width=width, highlight=False))
    if recording.end == "interrupted":
        raise typer.Exit(INTERRUPTED)


def _record(llm: Llama, tokens: list[int], sampling: SamplingOptions, policy: str) -> Recording:
    """Run with a bar on stderr, if that is a terminal."""
    from pyinertia.inspect import record

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn())
    n_most = sampling.n_predict if sampling.n_predict >= 0 else None
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(f"reading {len(tokens):,} tokens", total=None)

        def told(n_decoded: int) -> None:
            bar.update(
                task, description=f"answering, {n_decoded:,}", total=n_most, completed=n_decoded
            )

        return record(
            llm,
            tokens,
            sampling.n_predict,
            model=Path(llm.model_path).stem,
            policy=policy,
            told=told,
            temp=sampling.temp,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repeat_penalty=sampling.repeat_penalty,
        )


Writer = Callable[["Recording"], None]


def _writers(html: Path | None, png: Path | None, inputs: list[Path]) -> list[tuple[Path, Writer]]:
    """What writes where; both are known to work before the run.

    Raises:
        CommandError: A file cannot be written, is an input, or matplotlib is missing.
    """
    found: list[tuple[Path, Writer]] = []
    if html is not None:
        _check_writable("--html", html, inputs)
        from pyinertia.inspect import page

        found.append(
            (html, lambda r: _write_text(html, page.html(r))),
        )
    if png is not None:
        if html is not None and html.absolute() == png.absolute():
            msg = f"--html and --png are the same file, {png}; pass another one"
            raise CommandError(msg)
        _check_writable("--png", png, inputs)
        try:
            from pyinertia.inspect import plot
        except ImportError as error:
            msg = "--png needs matplotlib; install it with: pip install 'pyinertia[plot]'"
            raise CommandError(msg) from error
        found.append((png, lambda r: plot.write(r, png)))
    return found


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _check_writable(option: str, path: Path, inputs: list[Path]) -> None:
    """Try it; what is there stays as it is."""
    try:
        if path.exists():
            if any(one.exists() and path.samefile(one) for one in inputs):
                msg = f"{option} {path} is what the command reads; pass another one"
                raise CommandError(msg)
            path.open("ab").close()
        else:
            path.open("xb").close()
            path.unlink()
    except OSError as error:
        msg = f"{option} {path} cannot be written ({error.strerror}); pass another one"
        raise CommandError(msg) from error
