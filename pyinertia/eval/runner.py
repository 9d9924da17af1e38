"""Measure every sample under every arm, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pyinertia.errors import PolicyError
from pyinertia.eval.arms import FULL_ARM, Arm, Refusal
from pyinertia.eval.models import Models
from pyinertia.eval.sample import Sample
from pyinertia.eval.settings import Item, Settings
from pyinertia.eval.store import Result, Store

if TYPE_CHECKING:
    from pyinertia.llama import Llama


class Evaluation(Protocol):
    """Samples, and what is measured on them."""

    name: str
    items: list[Item]
    needs_full: bool  # whether the full cache plays a sample before the other arms do

    def sample(self, item: Item) -> Sample:
        """Build a sample."""

    def measure(self, llm: Llama, sample: Sample, arm: Arm) -> Result:
        """Measure a sample; numbers, texts and lists only."""


@dataclass
class Measured:
    """The results of a run, by arm and item, as far as it got."""

    results: dict[tuple[Arm, Item], Result] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def of(self, arm: Arm) -> dict[Item, Result]:
        """The results of one arm."""
        return {item: result for (a, item), result in self.results.items() if a == arm}


def run(
    evaluation: Evaluation, arms: list[Arm], settings: Settings, store: Store, console: Console
) -> Measured:
    """Measure what the store does not have yet; an interrupt ends it early.

    An arm that the model refuses is left out, with its reason.
    """
    measured = Measured()
    refused: set[Arm] = set()
    first = {task: (task, index) for task, index in reversed(evaluation.items)}
    for item in first.values():  # a task that the length has no room for is told at once
        evaluation.sample(item)
    try:
        with _progress(console) as progress, Models(settings) as models:
            task = progress.add_task("", total=len(evaluation.items) * len(arms))
            for item in evaluation.items:
                progress.update(task, description=f"{item[0]} {item[1]}")
                sample = evaluation.sample(item)
                keys = {
                    arm: settings.identity(evaluation.name, arm, item, sample.sha256)
                    for arm in arms
                }
                stored = {arm: store.get(key) for arm, key in keys.items()}
                measured.results |= {(arm, item): r for arm, r in stored.items() if r is not None}
                missing = [arm for arm, result in stored.items() if result is None]
                again = evaluation.needs_full and missing and FULL_ARM not in missing
                for arm in [FULL_ARM, *missing] if again else missing:
                    if arm in refused:
                        continue
                    try:
                        result = evaluation.measure(models.ready(arm, sample), sample, arm)
                    except PolicyError as error:
                        refused.add(arm)
                        measured.refusals.append(Refusal(arm.label, str(error)))
                        continue
                    if arm in missing:
                        store.add(keys[arm], result)
                        measured.results[arm, item] = result
                progress.advance(task, len(arms))
    except KeyboardInterrupt:
        measured.interrupted = True
    return measured


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
