"""The contestants: which there are, and the process of one of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pyinertia.bench import worker
from pyinertia.bench.process import Process
from pyinertia.bench.settings import Group, Settings
from pyinertia.kv_types import KV_TYPES

STOCK, NONE = "stock", "kv_policy=None"


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One side of a group."""

    name: str
    kind: str  # pyinertia, stock, openvino
    n_prompt: int
    n_ctx: int
    policy: str | None = None  # as `parse_policy` reads it
    budget: int | None = None


def specs(settings: Settings, group: Group) -> Iterator[Spec]:
    """The sides of a group, stock first."""
    n, room = group.n_prompt, settings.n_decoded
    whole: dict[str, Any] = {"n_prompt": n, "n_ctx": n + room}
    budgets = settings.budgets_below(n)
    if settings.stock_lib:
        if settings.full_cache:
            yield Spec(name=STOCK, kind="stock", **whole)
        for budget in budgets:
            name = f"stock, context of {budget}"
            yield Spec(name=name, kind="stock", n_prompt=budget - room, n_ctx=budget, budget=budget)
    if settings.full_cache:
        yield Spec(name=NONE, kind="pyinertia", **whole)
    for budget in budgets:
        for name in settings.policies:
            yield Spec(name=name, kind="pyinertia", policy=name, budget=budget, **whole)
    if settings.openvino:
        if settings.full_cache:
            yield Spec(name="openvino", kind="openvino", **whole)
        for budget in budgets:
            yield Spec(name="openvino, evicting", kind="openvino", budget=budget, **whole)


@dataclass
class Repeat:
    """Raw times of one repeat in milliseconds; what was not reached is empty."""

    prefill: list[float] = field(default_factory=list)  # batches
    settle: list[float] = field(default_factory=list)  # the first decode steps
    turns: list[list[float]] = field(default_factory=list)  # the tokens of each turn
    prompt_stats: dict[str, Any] = field(default_factory=dict)  # after the prompt
    stats: dict[str, Any] = field(default_factory=dict)  # at the end


class Side(Process):
    """A process that evaluates the next tokens of a text on command, and what it took."""

    def __init__(self, spec: Spec, settings: Settings, group: Group, tokens: list[int]) -> None:
        """Start the process; `open` waits until it is ready."""
        self.spec = spec
        self.repeats: list[Repeat] = []
        env, command = dict(os.environ), [sys.executable, "-m", worker.__name__]
        if spec.kind == "openvino":  # isolated: it sees only what that environment holds
            command = [str(settings.openvino), "-I", worker.__file__]
        elif spec.kind == "stock":
            env["LLAMA_CPP_LIB_PATH"] = str(settings.stock_lib)
        super().__init__(command, env)
        self._job = {
            "kind": spec.kind,
            "model": str(settings.model),
            "n_ctx": spec.n_ctx,
            "n_prompt": spec.n_prompt,
            "n_threads": group.n_threads,
            "flash_attn": settings.flash_attn,
            "type_k": KV_TYPES[group.type_k],
            "type_v": KV_TYPES[group.type_v],
            "kv_type": group.type_k,
            "policy": spec.policy,
            "budget": spec.budget,
            "tokens": tokens,
        }

    def open(self) -> None:
        """Load the model and warm up."""
        self.ask(**self._job)

    def begin(self, n_tokens: int) -> None:
        """Start a repeat: forget everything; n_tokens will be decoded."""
        if not self.failed:
            self.repeats.append(Repeat())
            self.ask(do="begin", n_prompt=self.spec.n_prompt, n_tokens=n_tokens)

    def prefill(self, n: int) -> None:
        """Evaluate n tokens of the prompt as one batch."""
        self.repeats[-1].prefill += self.ask(do="prompt", n=n).get("ms", [])

    def settle(self, n: int) -> None:
        """Decode the first n tokens; those with the cut are among them."""
        repeat = self.repeats[-1]
        repeat.prompt_stats = self.stats()
        repeat.settle = self.decode(n)

    def turn(self, n: int) -> None:
        """Decode n tokens as a turn of the repeat."""
        if times := self.decode(n):
            self.repeats[-1].turns.append(times)

    def decode(self, n: int) -> list[float]:
        """Decode n tokens; milliseconds of each."""
        return list(self.ask(do="decode", n=n).get("ms", []))

    def end(self) -> None:
        """Finish a repeat."""
        self.repeats[-1].stats = self.stats()

    def stats(self) -> dict[str, Any]:
        """Bytes and counters of the process; see `worker`."""
        return self.ask(do="stats")
