"""The commands `pyinertia eval ...`."""

from __future__ import annotations

from typing import Annotated

import typer

from pyinertia.eval.options import Options, choose, command

app = typer.Typer(
    help="What eviction costs in quality: policies against the full cache, on the same samples.",
    no_args_is_help=True,
)


@command(app, "ruler")
def ruler(
    options: Options,
    tasks: Annotated[
        str, typer.Option(metavar="NAMES", help="Tasks, separated by commas, or all.")
    ] = "all",
    answer_prefix: Annotated[
        bool,
        typer.Option(
            "--answer-prefix/--no-answer-prefix",
            help="Give the start of the answer, as the benchmark does. Without it the model "
            "finds its own words first, which is harder for a small cache.",
        ),
    ] = True,
) -> None:
    """RULER (arXiv 2404.06654): needles, variables and frequent words in a text of any length."""
    from pyinertia.eval import report, session
    from pyinertia.eval import ruler as tasks_of
    from pyinertia.eval.scored import Scored, all_items
    from pyinertia.eval.vocabulary import Vocabulary

    names = choose(tasks, list(tasks_of.TASKS))

    def make(vocabulary: Vocabulary) -> Scored:
        return tasks_of.evaluation(
            vocabulary,
            all_items(names, options.samples),
            length=options.length,
            seed=options.seed,
            with_prefix=answer_prefix,
        )

    session.perform(options, make, report.scores(names), extra={"answer_prefix": answer_prefix})
