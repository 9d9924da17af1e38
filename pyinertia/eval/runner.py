"""Measure every sample under every arm, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pyinertia.errors import PyInertiaError
from pyinertia.eval.arms import FULL, FULL_ARM, Arm, Refusal
from pyinertia.eval.sample import Sample
from pyinertia.eval.store import Result, Store

if TYPE_CHECKING:
    from pyinertia.llama import Llama

KV_TYPES = {  # enum ggml_type
    "f32": 0,
    "f16": 1,
    "q4_0": 2,
    "q4_1": 3,
    "q5_0": 6,
    "q5_1": 7,
    "q8_0": 8,
    "iq4_nl": 20,
    "bf16": 30,
}

Item = tuple[str, int]  # task and index


class Evaluation(Protocol):
    """Samples, and what is measured on them."""

    name: str
    items: list[Item]

    def sample(self, item: Item) -> Sample:
        """Build a sample."""

    def measure(self, llm: Llama, sample: Sample, arm: Arm) -> Result:
        """Measure a sample; numbers, texts and lists only."""

    def has_reference(self, item: Item) -> bool:
        """Whether other arms have what they need of the full cache, beside its result."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are opened, and what identifies samples beyond task, index and arm."""

    model: Path
    model_sha256: str
    length: int
    seed: int
    n_threads: int
    n_gpu_layers: int = 0
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    extra: dict[str, Any] = field(default_factory=dict)

    def identity(self, evaluation: str, arm: Arm, item: Item) -> dict[str, Any]:
        """Everything that a result depends on."""
        return {
            "evaluation": evaluation,
            "task": item[0],
            "index": item[1],
            "policy": arm.name,
            "budget": arm.budget,
            "seed": self.seed,
            "length": self.length,
            "model": self.model_sha256,
            "flash_attn": self.flash_attn,
            "type_k": self.type_k,
            "type_v": self.type_v,
            **self.extra,
        }


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

    def identity(arm: Arm, item: Item) -> dict[str, Any]:
        return settings.identity(evaluation.name, arm, item)

    pending = {
        arm: [item for item in evaluation.items if store.get(identity(arm, item)) is None]
        for arm in arms
    }
    wanted = {item for arm in arms if arm != FULL_ARM for item in pending[arm]}
    again = {item for item in wanted if not evaluation.has_reference(item)}
    if FULL_ARM in pending:
        pending[FULL_ARM] = [
            item for item in evaluation.items if item in again or item in pending[FULL_ARM]
        ]
    try:
        with _progress(console) as progress:
            n_pending = sum(map(len, pending.values()))
            task = progress.add_task(evaluation.name, total=n_pending)
            for arm in arms:
                if not pending[arm]:
                    continue
                progress.update(task, description=arm.label)
                try:
                    with _opened(arm, settings, measured.notes) as llm:
                        for item in pending[arm]:
                            sample = evaluation.sample(item)
                            result = evaluation.measure(llm, sample, arm)
                            result["prompt"] = sample.sha256
                            if store.get(identity(arm, item)) is None:
                                store.add(identity(arm, item), result)
                            progress.advance(task)
                except PyInertiaError as error:
                    if arm.name == FULL:
                        raise
                    measured.refusals.append(Refusal(arm.label, str(error)))
                    progress.advance(task, len(pending[arm]))
    except KeyboardInterrupt:
        measured.interrupted = True
    for arm in arms:
        for item in evaluation.items:
            known = store.get(identity(arm, item))
            if known is not None:
                measured.results[arm, item] = known
    return measured


@contextmanager
def _opened(arm: Arm, settings: Settings, notes: list[str]) -> Iterator[Llama]:
    from pyinertia.llama import Llama

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = Llama(
            settings.model,
            n_ctx=settings.length,
            n_threads=settings.n_threads,
            n_threads_batch=settings.n_threads,
            n_gpu_layers=settings.n_gpu_layers,
            flash_attn=settings.flash_attn,
            type_k=KV_TYPES[settings.type_k],
            type_v=KV_TYPES[settings.type_v],
            verbose=False,
            kv_policy=arm.policy,
        )
    notes += [str(w.message) for w in caught if str(w.message) not in notes]
    try:
        yield llm
    finally:
        llm.close()


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
    )
