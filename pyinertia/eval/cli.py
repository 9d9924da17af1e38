"""The commands `pyinertia eval ...`; what they need is imported when they run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyinertia.errors import EvalError
from pyinertia.eval.options import Options, choose, command

if TYPE_CHECKING:
    from pyinertia.eval.passages import Passages
    from pyinertia.eval.vocabulary import Vocabulary

app = typer.Typer(
    help="What eviction costs in quality: policies against the full cache, on the same samples.",
    no_args_is_help=True,
)

# the policies that the claims are about: tests/test_eval_claims.py compares
CLAIMED = (
    "value-norm,inertiakv,entropy,keydiff,key-norm,streaming-llm,inertiakv/last,coupled,"
    "value-norm/last,entropy/last,inertiakv-lazy,score-free"
)

Tasks = Annotated[str, typer.Option(metavar="NAMES", help="Tasks, separated by commas, or all.")]
Tokens = Annotated[int, typer.Option(min=4, help="Tokens of a sample that are played one by one.")]
Text = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Text to play; without it Python's own help."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="Local copy of the data; without it the Hugging Face hub is asked."
    ),
]


@command(app, "ruler")
def ruler(
    options: Options,
    tasks: Tasks = "all",
    answer_prefix: Annotated[
        bool,
        typer.Option(
            "--answer-prefix/--no-answer-prefix",
            help="Give the start of the answer, as the benchmark does. Without it the model "
            "finds its own words first, which is harder for a small cache.",
        ),
    ] = True,
    qa: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="SQuAD 2.0 or HotpotQA in JSON, for qa_1 and qa_2; may be given twice. Without "
            "it the Hugging Face hub is asked.",
        ),
    ] = None,
) -> None:
    """RULER (arXiv 2404.06654): needles, variables, frequent words, questions, at any length."""
    from pyinertia.eval import datasets, report, session
    from pyinertia.eval import ruler as benchmark
    from pyinertia.eval.arms import Refusal
    from pyinertia.eval.scored import all_items

    known = dict(benchmark.TASKS)
    wanted = choose(tasks, [*known, *benchmark.QA_TASKS])
    for path in qa or []:
        name, questions = datasets.read_questions(path)
        known[name] = benchmark.qa_task(questions)
    missing = []
    for name in [name for name in wanted if name not in known]:
        typer.echo(f"{name}: asking the Hugging Face hub for its questions", err=True)
        try:
            known[name] = benchmark.qa_task(datasets.questions_from_hub(name))
        except EvalError as error:
            if tasks != "all":
                raise
            missing.append(Refusal(name, str(error)))
    names = [name for name in wanted if name in known]
    session.perform(
        options,
        lambda vocabulary: benchmark.evaluation(
            vocabulary,
            all_items(names, options.samples),
            length=options.length,
            seed=options.seed,
            with_prefix=answer_prefix,
            tasks=known,
        ),
        report.scores(names),
        extra={"answer_prefix": answer_prefix},
        missing=missing,
    )


@command(app, "longbench", length=8192)
def longbench(options: Options, tasks: Tasks = "all", data: Data = None) -> None:
    """LongBench (arXiv 2308.14508): 21 tasks on real texts; --data is data.zip or its folder."""
    from pyinertia.eval import longbench as benchmark
    from pyinertia.eval import metrics
    from pyinertia.eval.datasets import longbench_rows

    metrics.require_libraries()
    names = choose(tasks, list(benchmark.TASKS))
    rows = {name: longbench_rows(data, name) for name in names}
    _longbench(options, "longbench", rows, benchmark.TASKS)


@command(app, "longbench-v2", length=8192)
def longbench_v2(options: Options, tasks: Tasks = "all", data: Data = None) -> None:
    """LongBench v2 (arXiv 2412.15204): choices, by length of the text; --data is data.json."""
    from pyinertia.eval import longbench as benchmark
    from pyinertia.eval.datasets import longbench_v2_rows

    found = longbench_v2_rows(data)
    rows = {
        name: [row for row in found if row["length"] == name]
        for name in choose(tasks, benchmark.LENGTHS)
    }
    _longbench(options, "longbench-v2", rows, dict.fromkeys(rows, benchmark.V2))


def _longbench(options: Options, name: str, rows: dict[str, Any], tasks: Any) -> None:
    from pyinertia.eval import longbench as benchmark
    from pyinertia.eval import report, session

    session.perform(
        options,
        lambda vocabulary: benchmark.evaluation(
            name,
            rows,
            tasks,
            vocabulary,
            n_samples=options.samples,
            length=options.length,
            seed=options.seed,
        ),
        report.scores(list(rows)),
    )


@command(app, "ppl", samples=8)
def ppl(options: Options, tokens: Tokens = 256, text: Text = None) -> None:
    """Perplexity, and KL to the full cache, of a text, by distance from the cut."""
    from pyinertia.eval import perplexity, session

    session.perform(
        options,
        lambda vocabulary: perplexity.Perplexity(
            _passages(vocabulary, options, tokens, text),
            options.samples,
        ),
        perplexity.find,
        extra=_text_identity(text, tokens),
    )


@command(app, "agree", samples=20)
def agree(options: Options, tasks: Tasks = "all") -> None:
    """Greedy answers beside the full cache's, and needles found by depth."""
    from pyinertia.eval import agreement

    names = choose(tasks, agreement.TASKS)
    _answers(options, agreement.evaluation, names, agreement.find)


@command(app, "later", length=2048)
def later(options: Options, tasks: Tasks = "all") -> None:
    """A fact that is told after 300 or 1,000 tokens of answer, and one asked for second.

    The answer before it is given, so that all policies play the same. Its tokens count in --length.
    """
    from pyinertia.eval import later as talks
    from pyinertia.eval import report

    names = choose(tasks, list(talks.TASKS))
    _answers(options, talks.evaluation, names, report.scores(names))


def _answers(options: Options, evaluation: Any, names: list[str], find: Any) -> None:
    from pyinertia.eval import session
    from pyinertia.eval.scored import all_items

    items = all_items(names, options.samples)
    session.perform(
        options,
        lambda vocabulary: evaluation(vocabulary, items, length=options.length, seed=options.seed),
        find,
    )


@command(
    app,
    "overlap",
    samples=8,
    policies="inertiakv,inertiakv/last,coupled,h2o,streaming-llm,random",
)
def overlap(options: Options, tokens: Tokens = 128, text: Text = None) -> None:
    """Cells that policies keep in common, and how alike they rank them, at the same step."""
    from pyinertia.eval import overlap as comparison
    from pyinertia.eval import session

    session.perform(
        options,
        lambda vocabulary: comparison.Overlap(
            _passages(vocabulary, options, tokens, text),
            options.samples,
            tokens,
        ),
        comparison.find,
        extra=_text_identity(text, tokens),
        vary=comparison.without_full,
    )


@command(app, "reproduce", samples=8, length=1280, budgets="256", policies=CLAIMED)
def reproduce(options: Options, tokens: Tokens = 128) -> None:
    """The claims of the InertiaKV abstract beside what is measured: confirmed, refuted, or neither.

    Runs four tasks of ruler, ppl, overlap, and turns of a benchmark for the speed, on the policies
    that the claims are about, each into its own file of --out. A claim is judged if --policies has
    all that it is about.
    """
    from pyinertia.eval import reproduction

    reproduction.perform(options, tokens)


def _passages(vocabulary: Vocabulary, options: Options, tokens: int, text: Path | None) -> Passages:
    from pyinertia.eval.passages import Passages

    return Passages(
        vocabulary,
        text,
        length=options.length,
        n_tokens=tokens,
        n_samples=options.samples,
        seed=options.seed,
    )


def _text_identity(text: Path | None, tokens: int) -> dict[str, Any]:
    from pyinertia.eval.vocabulary import file_sha256

    known = text is not None and text.is_file()
    return {"tokens": tokens, "text": file_sha256(text) if known and text else None}
