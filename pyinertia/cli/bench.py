"""`pyinertia bench`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from pyinertia.errors import BenchError


class Grid(NamedTuple):
    """Values that stand where none are given."""

    prompt: str
    budget: str
    policies: str
    tokens: int
    repeats: int


FULL = Grid("2000,8000", "512", "inertiakv,inertiakv-lazy,score-free,streaming-llm", 128, 5)
QUICK = Grid("512", "256", "inertiakv,streaming-llm", 40, 2)

HELP = (
    "Measure speed and memory of policies beside their rivals: the unpatched build of the same "
    "llama.cpp, at the full cache and at a context equal to the budget, and OpenVINO GenAI with "
    "and without its own eviction."
    "\n\n"
    "Every side is a process of its own. The sides of a table evaluate the same text and take "
    "turns, a batch of the prompt or a few tokens each, so that a slow phase of the machine hits "
    "them all. Where several values make sense, pass them with commas between: -p 2000,8000."
    "\n\n"
    f"--quick stands for -p {QUICK.prompt} --budget {QUICK.budget} -n {QUICK.tokens} "
    f"-r {QUICK.repeats} --policies {QUICK.policies}: with SmolLM2-135M on 2 CPUs two minutes at "
    "most."
)


def main(
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", help="GGUF file.", show_default="SmolLM2 of a checkout"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="Prompt lengths.", show_default=FULL.prompt),
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", help="n_budget.", show_default=FULL.budget)
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Names, as `pyinertia` lists them. NAME/bounded or NAME/FIELD=VALUE changes one.",
            show_default=FULL.policies,
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("-n", "--tokens", help="To decode.", show_default=str(FULL.tokens)),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("-r", "--repeats", show_default=str(FULL.repeats))
    ] = None,
    threads: Annotated[
        str | None, typer.Option("-t", "--threads", show_default="as many as CPUs")
    ] = None,
    cache_type_k: Annotated[
        str, typer.Option("-ctk", "--cache-type-k", help="f16, q8_0, ...")
    ] = "f16",
    cache_type_v: Annotated[
        str | None, typer.Option("-ctv", "--cache-type-v", show_default="as K")
    ] = None,
    flash_attn: Annotated[str, typer.Option("-fa", "--flash-attn", metavar="on|off")] = "on",
    block: Annotated[int, typer.Option(help="Tokens of a turn that count.")] = 8,
    stock_lib: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Libraries of the unpatched llama.cpp.",
            show_default="those of a checkout",
        ),
    ] = None,
    openvino: Annotated[
        str | None,
        typer.Option(
            metavar="PYTHON|auto|off",
            help="A Python with openvino-genai; auto installs one into the user's cache, 300 MB.",
            show_default="that one, if it is there",
        ),
    ] = None,
    full_cache: Annotated[
        bool, typer.Option(help="The sides that keep all cells: long prompts make them slow.")
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="A small grid, see above.")] = False,
    steady: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead: decode N tokens with the first policy, and show ten windows of them.",
        ),
    ] = None,
    documents: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Instead: summarise N texts of 1,000 to 4,000 tokens in answers of -n tokens, one "
            "at a time with the full cache, and with the first policy and budget.",
        ),
    ] = None,
    parallel: Annotated[
        str, typer.Option(help="How many documents at a time, for --documents.")
    ] = "1,2,4,8",
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write all raw repeats there.")
    ] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write PNGs there.")] = None,
) -> None:
    """Parse, measure, show; an interrupt shows what was measured so far."""
    from pyinertia.bench import machine, report
    from pyinertia.bench import plots as drawing
    from pyinertia.bench.documents import Documents
    from pyinertia.bench.run import Run
    from pyinertia.bench.settings import Settings
    from pyinertia.bench.steady import Steady

    if documents is not None and steady is not None:
        raise BenchError("--documents and --steady: pass one of them")
    is_grid = documents is None and steady is None
    grid = QUICK if quick else FULL
    if flash_attn not in ("on", "off"):
        raise BenchError(f"-fa {flash_attn}: must be on or off")
    wanted = Settings(
        model=_model(model),
        prompts=_numbers("--prompt", prompt or grid.prompt),
        budgets=_numbers("--budget", budget or grid.budget),
        policies=_names(policies or grid.policies),
        threads=_numbers("--threads", threads or str(machine.n_cpus())),
        types_k=_names(cache_type_k),
        types_v=_names(cache_type_v or ""),
        flash_attn=flash_attn == "on",
        n_tokens=grid.tokens if tokens is None else tokens,
        n_block=block,
        repeats=grid.repeats if repeats is None else repeats,
        full_cache=full_cache,
        stock_lib=_stock_lib(stock_lib) if is_grid else None,
        openvino=_openvino(openvino) if is_grid else None,
    )
    wanted.check()
    if json_file and not json_file.absolute().parent.is_dir():
        msg = f"--json {json_file}: there is no such folder"
        raise BenchError(msg)
    if plots:
        drawing.check(plots)
    benchmark: Documents | Steady | Run
    if documents is not None:
        benchmark = Documents(wanted, documents, _numbers("--parallel", parallel))
    elif steady is not None:
        benchmark = Steady(wanted, steady)
    else:
        for line in wanted.left_out():
            _say(line)
        benchmark = Run(wanted)
    interrupted = _interrupted(benchmark.measure, benchmark.total)
    results = benchmark.results()
    report.show(_console(), results)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for path in drawing.write(results, plots) if plots else []:
        _say(f"wrote {path}")
    raise typer.Exit(130 if interrupted else 0)


def _interrupted(measure: Callable[..., None], total: int) -> bool:
    """Measure with a bar on stderr; return whether Ctrl-C ended it."""
    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn()]
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        try:
            measure(lambda n: bar.advance(task, n), lambda text: bar.update(task, description=text))
        except KeyboardInterrupt:
            _say("interrupted; this was measured so far:")
            return True
    return False


def _console() -> Console:
    # a pipe has no width, and a table that is cut helps nobody
    return Console(width=None if sys.stdout.isatty() else 400)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _model(path: Path | None) -> Path:
    from pyinertia.bench.settings import MODEL

    if path or MODEL.is_file():
        return path or MODEL
    raise BenchError("no model; pass the path of a GGUF file with -m")


def _stock_lib(path: Path | None) -> Path | None:
    from pyinertia.bench.settings import STOCK_LIB

    if path or STOCK_LIB.is_dir():
        return path or STOCK_LIB
    _say(
        "stock is left out: pass the libraries of an unpatched build with --stock-lib, "
        "or run `python scripts/bootstrap.py --stock` in a checkout"
    )
    return None


def _openvino(choice: str | None) -> str | None:
    from pyinertia.bench import openvino

    if choice == "off":
        return None
    if choice == "auto":
        _say(f"openvino: in {openvino.environment()}, made if it is missing")
        return str(openvino.install())
    if choice:
        openvino.check(choice)
        return choice
    if openvino.python().is_file():
        return str(openvino.python())
    _say("openvino is left out: pass --openvino auto to install it, or off to read this no more")
    return None


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError as error:
        msg = f"{flag} {text}: must be whole numbers, with commas between"
        raise BenchError(msg) from error
