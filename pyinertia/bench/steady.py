"""One side for a long time: time and memory of ten windows, which should not grow."""

from __future__ import annotations

from collections.abc import Callable
from statistics import mean, median
from typing import Any

from pyinertia.bench import machine
from pyinertia.bench.run import DECODE_WEIGHT, text_tokens
from pyinertia.bench.settings import N_SETTLE, Settings
from pyinertia.bench.sides import Side, Spec
from pyinertia.bench.worker import N_BATCH
from pyinertia.errors import BenchError

N_WINDOWS = 10
N_ASKED = 100  # tokens between two looks at the progress
ROOM = 256  # cells beside those of the prompt: positions run on beyond them
COUNTERS = ("n_evicted", "n_moved", "n_reused")


class Steady:
    """One long decode that may be asked for its windows at any time."""

    def __init__(self, settings: Settings, n_tokens: int) -> None:
        """Take the first of everything in the grid."""
        if n_tokens < N_WINDOWS:
            msg = f"--steady {n_tokens}: must be at least {N_WINDOWS}"
            raise BenchError(msg)
        self.settings, self.n_tokens = settings, n_tokens
        self.group = next(settings.groups())
        self.windows: list[dict[str, Any]] = []
        self.spec = Spec(
            name=settings.policies[0],
            kind="pyinertia",
            n_prompt=self.group.n_prompt,
            n_ctx=self.group.n_prompt + ROOM,
            policy=settings.policies[0],
            budget=settings.budgets[0],
        )

    @property
    def total(self) -> int:
        """Units of work, as `measure` advances them."""
        return self.spec.n_prompt + DECODE_WEIGHT * self.n_tokens

    def measure(self, advance: Callable[[int], None], describe: Callable[[str], None]) -> None:
        """Prefill, let the first cut pass, then decode window by window."""
        n_prompt = self.spec.n_prompt
        tokens = text_tokens(self.settings.model, n_prompt + N_SETTLE + self.n_tokens)
        describe(f"starting {self.spec.name}")
        side = Side(self.spec, self.settings, self.group, tokens)
        try:
            side.open()
            side.begin(N_SETTLE + self.n_tokens)
            for start in range(0, n_prompt, N_BATCH):
                side.prefill(min(N_BATCH, n_prompt - start))
                advance(min(N_BATCH, n_prompt - start))
            side.settle(N_SETTLE)
            before = side.stats()
            for i in range(N_WINDOWS):
                describe(f"window {i + 1} of {N_WINDOWS}")
                ends = [self.n_tokens * k // N_WINDOWS for k in (i, i + 1)]
                times: list[float] = []
                for start in range(ends[0], ends[1], N_ASKED):
                    times += side.decode(min(N_ASKED, ends[1] - start))
                    advance(DECODE_WEIGHT * min(N_ASKED, ends[1] - start))
                after = side.stats()
                if not side.failed:
                    self.windows.append(_window(ends[1], times, before, after))
                before = after
        finally:
            side.close()
        if side.failed:
            msg = f"{self.spec.name}: {side.failed}"
            raise BenchError(msg)

    def results(self) -> dict[str, Any]:
        """Everything known so far, in the form of the JSON file."""
        return {
            "settings": self.settings.as_dict() | {"steady": self.n_tokens},
            "machine": machine.describe(),
            "versions": machine.versions(),
            "windows": self.windows,
        }


def _window(
    end: int, times: list[float], before: dict[str, Any], after: dict[str, Any]
) -> dict[str, Any]:
    return {
        "n_tokens": end,
        "mean_ms": mean(times),
        "median_ms": median(times),
        "max_ms": max(times),
        "rss": after.get("rss"),
        "n_used": after["n_used"],
        **{name: (after[name] - before[name]) / len(times) for name in COUNTERS},
    }
