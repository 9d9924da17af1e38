"""`pyinertia summarise`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyinertia.cli import sinks
from pyinertia.cli.engine import EngineOptions
from pyinertia.cli.group import INTERRUPTED, say
from pyinertia.cli.journal import Journal
from pyinertia.cli.models import in_flags, model_path, warnings_as_notes
from pyinertia.cli.models import keywords as of_model
from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.cli.pile import Pile
from pyinertia.cli.progress import Meter
from pyinertia.documents import STDIN, Source, find, shown, suffixes
from pyinertia.errors import CommandError, PolicyError, PyInertiaError

if TYPE_CHECKING:
    from pyinertia.batch import Summary

DEFAULTS = {"n_predict": 256, "temp": 0.2, "seed": 0, "repeat_penalty": 1.1}

HELP = (
    "Summarise documents, many at a time: files, folders, globs, - for stdin."
    "\n\n"
    f"Read are {suffixes()} (a document per line); other files that are named are read as text. "
    "PDF and HTML need pip install 'pyinertia\\[documents]'. A document longer than the model's "
    "positions is read in parts."
    "\n\n"
    "With -o a run can be stopped at any time, even killed: the same command goes on where it was, "
    "does no document twice and tries again what failed. A document is told by its path and its "
    "content. Other options than before are refused."
    "\n\n"
    "Ends with 0 if all is done, 1 if some documents failed, 2 if it could not start, 130 on "
    "Ctrl-C."
)

# what results depend on, and what it is called on the command line
FLAGS = {
    "model": "-m",
    "model_bytes": "a model of so many bytes:",
    "instruction": "--instruction",
    "part": "--part",
    "field": "--field",
    "encoding": "--encoding",
    "kv_policy": "--kv-policy",
    "kv_budget": "--kv-budget",
    "kv_refresh": "--kv-refresh",
    "ctx_size": "-c",
    "batch_size": "-b",
    "flash_attn": "-fa",
    "cache_type_k": "-ctk",
    "cache_type_v": "-ctv",
    "n_predict": "-n",
    "temp": "--temp",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repeat_penalty": "--repeat-penalty",
    "seed": "--seed",
}


def main(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DOCUMENTS",
            help="Files, folders, globs, or - for stdin.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="PATH",
            help="File of the results, or their folder. Without it they go to stdout, and a run "
            "that was stopped cannot go on.",
            rich_help_panel="Documents",
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="|".join(sinks.FORMATS),
            help="jsonl: a line per document, with counts and settings. markdown: one file to "
            "read, and PATH.jsonl beside it. files: a Markdown file per document in the folder, "
            f"and {sinks.JOURNAL}.",
            rich_help_panel="Documents",
        ),
    ] = sinks.JSONL,
    instruction: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="What is wanted, in the language it is wanted in.",
            show_default="summarise in a few sentences",
            rich_help_panel="Documents",
        ),
    ] = None,
    field: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Field of JSON lines that holds the text.",
            rich_help_panel="Documents",
        ),
    ] = "text",
    encoding: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of text without a byte order mark.",
            rich_help_panel="Documents",
        ),
    ] = "utf-8",
    part: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most tokens of a document that are read in one go; longer ones are read in "
            "parts. Fewer keep more details and take longer.",
            show_default="as many as fit -c",
            rich_help_panel="Documents",
        ),
    ] = None,
    parallel: Annotated[
        int,
        typer.Option(
            "-np",
            "--parallel",
            min=1,
            max=256,
            help="Documents, or parts, at a time.",
            rich_help_panel="Documents",
        ),
    ] = 8,
    retry: Annotated[
        bool,
        typer.Option(
            "--retry/--no-retry",
            help="Try again what failed in an earlier run, or leave it.",
            rich_help_panel="Documents",
        ),
    ] = True,
    quiet: Annotated[
        bool,
        typer.Option("-q", "--quiet", help="No progress.", rich_help_panel="Help"),
    ] = False,
    *,
    model: ModelOptions,
    context: ContextOptions,
    sampling: SamplingOptions,
    kv: KVOptions,
    engine: EngineOptions,
) -> None:
    """Find the documents, do what is left of them."""
    _check(encoding, sampling, kv, context)
    engine.check(model)
    journal_path = sinks.journal_path(form, out)
    found = find(names, lambda text: say(f"note: {text}"))
    path = model_path(model)
    settings = {
        "model": path.name,
        "model_bytes": path.stat().st_size,
        "instruction": instruction,
        "part": part,
        "field": field,
        "encoding": encoding,
        **{
            name: getattr(group, name)
            for group in (kv, context, sampling)
            for name in FLAGS
            if hasattr(group, name)
        },
    }
    journal = Journal(journal_path, settings, FLAGS) if journal_path else None
    n_left = 0
    with ExitStack() as stack:
        if journal:
            stack.callback(journal.close)
        ours = [*sinks.written(form, out, journal.records)] if out and journal else []
        sources = _documents(found, {*map(os.path.normpath, names)}, ours)
        paths = {source.path for source in sources}
        if journal and retry:
            journal.try_again(paths)
        elif journal:
            n_left = sum(bool(one["error"]) and one["path"] in paths for one in journal.records)
        sink = sinks.open_sink(form, out, journal, paths)
        stack.callback(sink.close)
        meter = stack.enter_context(Meter(sum(source.n_bytes for source in sources), quiet))
        stack.enter_context(warnings_as_notes(of_budget=kv.kv_budget is not None))
        pile = Pile(sources, sink, meter, journal, settings)
        stopped = False
        try:
            keywords = _keywords(path, model, context, sampling, kv, instruction, part, parallel)
            pile.work(partial(_summarise, engine, model, keywords))
            if journal:
                journal.finish()
        except KeyboardInterrupt:
            stopped = True
    _say_end(meter, journal, n_left, stopped, quiet)
    if stopped:
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if meter.n_failed or n_left else 0)


def _check(
    encoding: str, sampling: SamplingOptions, kv: KVOptions, context: ContextOptions
) -> None:
    """Refuse what cannot be, before a file is opened.

    Raises:
        CommandError: An option is out of range here.
        PolicyError: The policy is unknown, or its values do not go together.
    """
    try:
        "a".encode(encoding)  # codecs that give no text, as hex, are known too
    except (LookupError, UnicodeError) as error:
        msg = f"--encoding {encoding} is not known; utf-8, latin-1 or cp1252 are"
        raise CommandError(msg) from error
    if sampling.n_predict < 1:
        msg = f"-n {sampling.n_predict}: a summary needs a limit, at least 1"
        raise CommandError(msg)
    if sampling.seed < 0:
        msg = f"--seed {sampling.seed}: a run that can go on needs a seed of 0 or more"
        raise CommandError(msg)
    context.check()
    policy = kv.policy()
    if policy.evicts and policy.prefill != "bounded":
        msg = (
            "many documents at a time have room for a bounded prefill only; leave --kv-prefill "
            "out, give --kv-budget in cells, or pass --kv-policy full"
        )
        raise CommandError(msg)


def _keywords(
    path: Path,
    model: ModelOptions,
    context: ContextOptions,
    sampling: SamplingOptions,
    kv: KVOptions,
    instruction: str | None,
    part: int | None,
    parallel: int,
) -> dict[str, Any]:
    """The options as keywords of `pyinertia.batch.summarise`."""
    policy = kv.policy()
    return {
        "model": path,
        **({} if instruction is None else {"instruction": instruction}),
        "n_part": part,
        "n_parallel": parallel,
        "kv_policy": kv.kv_policy,
        "kv_budget": None if kv.kv_budget is None else int(policy.n_budget),
        "kv_refresh": kv.kv_refresh,
        "n_ctx": context.ctx_size,
        "max_tokens": sampling.n_predict,
        "temperature": sampling.temp,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repeat_penalty,
        "seed": sampling.seed,
        "verbose": model.verbose,
        **of_model(model, context),
    }


def _summarise(
    engine: EngineOptions, model: ModelOptions, keywords: dict[str, Any], texts: Iterator[str]
) -> Iterator[Summary]:
    """The engine's summaries; what it refuses is about options.

    Raises:
        CommandError: It refuses, before the first summary.
    """
    from pyinertia.cli import native_log

    if not model.verbose:
        native_log.silence()
    try:
        with closing(engine.summarise(model)(texts, **keywords)) as summaries:  # type: ignore[type-var]
            yield from summaries
    except PolicyError as error:
        raise CommandError(in_flags(error)) from error
    except PyInertiaError:
        raise
    except ValueError as error:
        raise CommandError(str(error)) from error


def _documents(found: list[Source], names: set[str], ours: list[Path]) -> list[Source]:
    """What was found and is not ours, whatever it is called and whatever links lead to it.

    Raises:
        CommandError: Nothing is left.
    """
    written = {_identity(path) for path in ours} - {None}
    documents = []
    for source in found:
        if source.path == STDIN or _identity(source.path) not in written:
            documents.append(source)
        elif source.path in names:
            say(f"note: {shown(source.path)} is written with this -o, so it is not read")
    if not documents:
        msg = "all documents are written with this -o, so none is read; name others"
        raise CommandError(msg)
    return documents


def _identity(path: Path | str) -> tuple[int, int] | None:
    """What is the same for all names of a file; None if there is none."""
    try:
        status = os.stat(path)  # noqa: PTH116 - paths stay text
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


def _say_end(
    meter: Meter, journal: Journal | None, n_left: int, stopped: bool, quiet: bool
) -> None:
    counts = [f"{meter.n_done} done"]
    if meter.n_failed:
        counts.append(f"{meter.n_failed} failed")
    if journal and journal.n_before:
        counts.append(f"{journal.n_before} done before")
    if n_left:
        counts.append(f"{n_left} failed before")
    if stopped:
        goes_on = "; the same command goes on" if journal else ", and gone without -o"
        say(f"stopped: {', '.join(counts)}{goes_on}")
    elif meter.n_failed or n_left or not quiet:
        say(", ".join(counts) + (f"; {journal.path}" if journal else ""))
