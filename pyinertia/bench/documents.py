"""Many documents: one at a time with the full cache, and several at a time with a policy."""

from __future__ import annotations

import os
import pydoc_data.topics
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyinertia.bench import documents_worker, machine
from pyinertia.bench.process import Process
from pyinertia.bench.settings import Settings
from pyinertia.errors import BenchError
from pyinertia.kv_types import KV_TYPES
from pyinertia.vocabulary import open_vocabulary

N_SHORTEST, N_LONGEST = 1000, 4000  # tokens of a document
N_FRAME = 512  # positions for the instruction and the template, and what padding takes
N_TURN = 4  # documents of a side before the next side has its turn
FULL = "full cache"


class Side(Process):
    """A process that summarises documents, so many at a time."""

    def __init__(self, n_parallel: int, policy: str | None) -> None:
        self.n_parallel, self.policy = n_parallel, policy
        self.seconds = 0.0
        self.n_done = 0
        self.stats: dict[str, Any] = {}
        super().__init__([sys.executable, "-m", documents_worker.__name__], dict(os.environ))

    def turn(self, n_documents: int) -> None:
        """Finish so many documents more."""
        answer = self.ask(do="documents", n=n_documents)
        if not self.failed:
            self.seconds += answer["seconds"]
            self.n_done += n_documents
            self.stats = self.ask(do="stats")

    def row(self) -> dict[str, Any]:
        """In the form of the JSON file."""
        return {
            "name": self.policy or FULL,
            "n_parallel": self.n_parallel,
            "failed": self.failed,
            "n_documents": self.n_done,
            "seconds": self.seconds,
            **self.stats,
        }


@dataclass
class Documents:
    """A benchmark that may be asked for its rows at any time."""

    settings: Settings
    n_documents: int
    parallel: tuple[int, ...]
    sides: list[Side] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise BenchError where nothing could be measured."""
        for name, values in (("documents", (self.n_documents,)), ("parallel", self.parallel)):
            if not values or min(values) < 1:
                msg = f"--{name} {','.join(map(str, values))}: must be at least 1"
                raise BenchError(msg)

    @property
    def total(self) -> int:
        """Units of work, as `measure` advances them."""
        return self.n_documents * (len(self.parallel) + self.settings.full_cache)

    def measure(self, advance: Callable[[int], None], describe: Callable[[str], None]) -> None:
        """Let the sides take turns of N_TURN documents."""
        settings, policy = self.settings, self.settings.policies[0]
        texts = pieces(settings.model, self.n_documents)
        job = {
            "model": str(settings.model),
            "budget": settings.budgets[0],
            "n_ctx": N_LONGEST + N_FRAME + settings.n_tokens,
            "n_threads": settings.threads[0],
            "flash_attn": settings.flash_attn,
            "type_k": KV_TYPES[settings.types_k[0]],
            "type_v": KV_TYPES[(settings.types_v or settings.types_k)[0]],
            "n_tokens": settings.n_tokens,
            "documents": texts,
        }
        wanted = [(1, None)] * settings.full_cache + [(n, policy) for n in self.parallel]
        try:
            for n_parallel, name in wanted:
                describe(f"starting {name or FULL}, {n_parallel} at a time")
                self.sides.append(Side(n_parallel, name))
                self.sides[-1].ask(**job, n_parallel=n_parallel, policy=name)
            for start in range(0, self.n_documents, N_TURN):
                n_turn = min(N_TURN, self.n_documents - start)
                describe(f"documents {start + 1} to {start + n_turn} of {self.n_documents}")
                for side in self.sides:
                    side.turn(n_turn)
                    advance(n_turn)
        finally:
            for side in self.sides:
                side.close()

    def results(self) -> dict[str, Any]:
        """Everything known so far, in the form of the JSON file."""
        return {
            "settings": self.settings.as_dict() | {"documents": self.n_documents},
            "machine": machine.describe(),
            "versions": machine.versions(),
            "rows": [side.row() for side in self.sides],
        }


def pieces(model: Path, n: int, seed: int = 0) -> list[str]:
    """Return n texts of N_SHORTEST to N_LONGEST tokens of Python's own help.

    Their lengths are drawn evenly on a logarithmic scale. The help starts again where it ends.
    """
    vocabulary, rng = open_vocabulary(model), random.Random(seed)
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    tokens = vocabulary.tokenize(text.encode(), add_bos=False, special=False)
    texts, start = [], 0
    for _ in range(n):
        length = round(N_SHORTEST * (N_LONGEST / N_SHORTEST) ** rng.random())
        if start + length > len(tokens):
            start = 0
        part = tokens[start : start + length]
        texts.append(vocabulary.detokenize(part).decode("utf-8", errors="ignore"))
        start += length
    return texts
