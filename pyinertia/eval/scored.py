"""Evaluations whose answers get a score: RULER, LongBench, needles by depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyinertia.eval.arms import Arm
from pyinertia.eval.sample import Sample
from pyinertia.eval.settings import Item
from pyinertia.eval.store import Result

if TYPE_CHECKING:
    from pyinertia.llama import Llama


@dataclass
class Scored:
    """Greedy answers to the samples of some tasks, and their scores.

    Attributes:
        name: Name of the evaluation.
        items: The samples.
        make: Makes one of them.
        score: What an answer is worth: `score`, and `found` where answers are looked for.
        complete: Whether more text would not change that; the answer then ends.
    """

    name: str
    items: list[Item]
    make: Callable[[Item], Sample]
    score: Callable[[str, Sample], dict[str, Any]]
    complete: Callable[[dict[str, Any]], bool] | None = None
    needs_full: bool = False

    def sample(self, item: Item) -> Sample:
        """Build a sample."""
        return self.make(item)

    def measure(self, llm: Llama, sample: Sample, arm: Arm) -> Result:
        """Answer and score."""
        from pyinertia.eval.play import answer

        def done(text: str) -> bool:
            if sample.one_line and "\n" in text.lstrip("\n"):
                return True
            return self.complete is not None and self.complete(self.score(text, sample))

        result = answer(llm, sample, done)
        return {**result, **self.score(result["text"], sample), "depths": sample.depths}


def all_items(tasks: Sequence[str], n_samples: int) -> list[Item]:
    """Index by index, so that an interrupted run has some samples of every task."""
    return [(task, index) for index in range(n_samples) for task in tasks]
