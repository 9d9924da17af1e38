"""All groups, one after the other; within a group the sides take turns."""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pyinertia.bench import gguf, machine
from pyinertia.bench.settings import N_SETTLE, Group, Settings
from pyinertia.bench.sides import Side, Spec, specs
from pyinertia.bench.summary import summarise
from pyinertia.bench.worker import N_BATCH
from pyinertia.vocabulary import open_vocabulary

DECODE_WEIGHT = 8  # about how many tokens of a prompt take as long as a decode step


class Run:
    """A benchmark that may be asked for its results at any time, also after an interrupt."""

    def __init__(self, settings: Settings) -> None:
        """Read the model's size and tokenize the text."""
        self.settings = settings
        self.tokens = text_tokens(settings.model, max(settings.prompts) + settings.n_decoded)
        self.weight_bytes = gguf.bytes_per_token(settings.model)
        self.bandwidth: dict[int, float] = {}
        self.measured: list[tuple[Group, list[Side]]] = []

    @property
    def total(self) -> int:
        """Units of work, as `measure` advances them."""
        every = (spec for group in self.settings.groups() for spec in specs(self.settings, group))
        return self.settings.repeats * sum(map(self._work, every))

    def _work(self, spec: Spec) -> int:
        return spec.n_prompt + DECODE_WEIGHT * self.settings.n_decoded

    def measure(self, advance: Callable[[int], None], describe: Callable[[str], None]) -> None:
        """Measure every group of the grid."""
        for group in self.settings.groups():
            self._measure_bandwidth(group.n_threads, describe)
            sides: list[Side] = []
            self.measured.append((group, sides))
            try:
                for spec in specs(self.settings, group):
                    describe(f"starting {spec.name}")
                    sides.append(Side(spec, self.settings, group, self.tokens))
                    sides[-1].open()
                for i in range(self.settings.repeats):
                    describe(f"prompt {group.n_prompt}, repeat {i + 1} of {self.settings.repeats}")
                    self._repeat(sides, group.n_prompt, i, advance)
            finally:
                for side in sides:
                    side.close()
            self._measure_bandwidth(group.n_threads, describe)

    def _measure_bandwidth(self, n_threads: int, describe: Callable[[str], None]) -> None:
        """Around every group, and keep the best: a busy moment must not flatter the sides."""
        describe("memory bandwidth")
        found = machine.read_bandwidth(n_threads)
        self.bandwidth[n_threads] = max(found, self.bandwidth.get(n_threads, 0.0))

    def _repeat(
        self, sides: list[Side], n_prompt: int, i: int, advance: Callable[[int], None]
    ) -> None:
        settings = self.settings
        for side in _rotated(sides, i):
            side.begin(settings.n_decoded)
        for j, start in enumerate(range(0, n_prompt, N_BATCH)):
            for side in _rotated(sides, i + j):
                n = max(0, min(N_BATCH, side.spec.n_prompt - start))
                if n and not side.failed:
                    side.prefill(n)
                advance(n)
        for side in _rotated(sides, i):
            if not side.failed:
                side.settle(N_SETTLE)
            advance(DECODE_WEIGHT * N_SETTLE)
        for j in range(settings.n_turns):
            for side in _rotated(sides, i + j):
                if not side.failed:
                    side.turn(settings.n_block + 1)
                advance(DECODE_WEIGHT * (settings.n_block + 1))
        for side in sides:
            if not side.failed:
                side.end()

    def results(self) -> dict[str, Any]:
        """Everything known so far, in the form of the JSON file."""
        return {
            "settings": self.settings.as_dict(),
            "machine": machine.describe(),
            "versions": machine.versions(),
            "weight_bytes_per_token": self.weight_bytes,
            "read_bandwidth": self.bandwidth,
            "groups": [
                {
                    **asdict(group),
                    "sides": summarise(
                        sides, self.weight_bytes, self.bandwidth.get(group.n_threads)
                    ),
                }
                for group, sides in self.measured
            ],
        }


def text_tokens(model: Path, n_tokens: int) -> list[int]:
    """Return the first tokens of Python's own help texts, which every Python has."""
    vocabulary = open_vocabulary(model)
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    # no vocabulary of words needs more than 8 bytes of it for a token
    tokens: list[int] = vocabulary.tokenize(
        text.encode()[: 8 * n_tokens], add_bos=True, special=False
    )
    repeats = -(-n_tokens // len(tokens))
    return (tokens * repeats)[:n_tokens]


def _rotated(sides: list[Side], i: int) -> list[Side]:
    k = i % len(sides)
    return sides[k:] + sides[:k]
