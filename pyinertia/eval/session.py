"""One evaluation from its options to its tables, file and plots."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

import pyinertia
from pyinertia.eval import report
from pyinertia.eval.arms import Arm, Refusal, parse_arms
from pyinertia.eval.options import Options
from pyinertia.eval.runner import Evaluation, Measured, run
from pyinertia.eval.settings import Settings
from pyinertia.eval.store import Store
from pyinertia.eval.vocabulary import Vocabulary, file_sha256


@dataclass
class Run:
    """What was measured, and what a report says about it."""

    arms: list[Arm]
    measured: Measured
    about: dict[str, Any]


def perform(
    options: Options,
    make: Callable[[Vocabulary], Evaluation],
    find: Callable[[Measured, Sequence[Arm]], report.Findings],
    extra: dict[str, Any] | None = None,
    vary: Callable[[list[Arm]], list[Arm]] = lambda arms: arms,
    missing: Sequence[Refusal] = (),
) -> None:
    """Measure, and show what was found.

    Args:
        options: What was asked for.
        make: Makes the evaluation with the model's vocabulary.
        find: Makes findings of what was measured.
        extra: What else identifies a sample.
        vary: Changes the arms.
        missing: Tasks that cannot run.
    """
    done = measure(options, make, extra, vary, missing)
    show(options, done.about, done.measured, find(done.measured, done.arms))


def measure(
    options: Options,
    make: Callable[[Vocabulary], Evaluation],
    extra: dict[str, Any] | None = None,
    vary: Callable[[list[Arm]], list[Arm]] = lambda arms: arms,
    missing: Sequence[Refusal] = (),
) -> Run:
    """Measure what the folder does not have yet; see `perform`."""
    arms, refusals = parse_arms(options.policies, options.budgets)
    arms = vary(arms)
    vocabulary = Vocabulary(options.model)
    if not options.chat:
        vocabulary.forget_chat()
    vocabulary.check_length(options.length)
    evaluation = make(vocabulary)
    settings = settings_of(options, {"chat": vocabulary.has_chat, **(extra or {})})
    store = Store(options.out / f"{evaluation.name}.jsonl")
    try:
        measured = run(evaluation, arms, settings, store, Console(stderr=True))
    finally:
        store.close()
    measured.refusals[:0] = [*missing, *refusals]
    measured.notes += [
        f"{arm.label} is never full: samples are --length {options.length} at most"
        for arm in arms
        if isinstance(arm.budget, int) and arm.budget >= options.length
    ]
    return Run(arms, measured, about(options, evaluation.name, settings))


def settings_of(options: Options, extra: dict[str, Any]) -> Settings:
    """What the options say of how models run."""
    return Settings(
        model=options.model,
        model_sha256=file_sha256(options.model),
        length=options.length,
        seed=options.seed,
        n_threads=options.threads,
        n_gpu_layers=options.n_gpu_layers,
        flash_attn=options.flash_attn == "on",
        type_k=options.cache_type_k,
        type_v=options.cache_type_v,
        n_batch=options.batch_size,
        extra=extra,
    )


def about(options: Options, evaluation: str, settings: Settings) -> dict[str, Any]:
    """What a report says of its run."""
    return {
        "evaluation": evaluation,
        "model_name": Vocabulary(options.model).name,
        "samples": options.samples,
        "pyinertia": pyinertia.__version__,
        **asdict(settings),
        "model": options.model.name,
    }


def show(
    options: Options, about: dict[str, Any], measured: Measured, findings: report.Findings
) -> None:
    """Print the tables, write the JSON file, draw the plots."""
    rows, tables, draw = findings
    wide = None if sys.stdout.isatty() else 200  # a file has no width to keep to
    report.show(Console(width=wide), tables, measured)
    target = options.out / f"{about['evaluation']}.json"
    report.write_json(target, about, measured, rows)
    written = [target]
    if options.plots and rows:
        written += _drawn(draw, target.with_suffix(""))
    sys.stderr.write(f"written: {', '.join(map(str, written))}\n")
    if measured.interrupted:
        sys.stderr.write("stopped; the same command goes on from here\n")
        raise typer.Exit(130)


def _drawn(draw: Callable[[Path], list[Path]], prefix: Path) -> list[Path]:
    try:
        return draw(prefix)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"no plots: {error}; pip install 'pyinertia[plot]'\n")
        return []
