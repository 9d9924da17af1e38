"""What a benchmark was asked for, checked before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyinertia
from pyinertia.bench.worker import N_BATCH
from pyinertia.errors import BenchError
from pyinertia.kv_types import check_kv_types
from pyinertia.policy_text import parse_policy

N_SETTLE = 4  # first decode query, cut and compaction, new graph
CHECKOUT = Path(pyinertia.__file__).parent.parent
MODEL = CHECKOUT / ".cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
STOCK_LIB = CHECKOUT / "build" / "stock" / "install" / "pyinertia" / "lib"


@dataclass(frozen=True, kw_only=True)
class Group:
    """Settings that all sides of one table share; they take turns."""

    n_prompt: int
    n_threads: int
    type_k: str
    type_v: str


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The grid, and how it is measured."""

    model: Path
    prompts: tuple[int, ...]
    budgets: tuple[int, ...]
    policies: tuple[str, ...]
    threads: tuple[int, ...]
    types_k: tuple[str, ...]
    types_v: tuple[str, ...]  # empty: those of K
    flash_attn: bool
    n_tokens: int
    n_block: int
    repeats: int
    full_cache: bool  # the sides that keep all cells
    stock_lib: Path | None
    openvino: str | None  # a Python with openvino-genai

    def groups(self) -> Iterator[Group]:
        """One table each."""
        for n_threads in self.threads:
            for type_k in self.types_k:
                for type_v in self.types_v or (type_k,):
                    for n_prompt in self.prompts:
                        yield Group(
                            n_prompt=n_prompt, n_threads=n_threads, type_k=type_k, type_v=type_v
                        )

    def budgets_below(self, n_prompt: int) -> list[int]:
        """The budgets that evict something of such a prompt."""
        return [budget for budget in self.budgets if budget < n_prompt]

    def left_out(self) -> Iterator[str]:
        """What of the grid makes no sense, a line each."""
        for n_prompt in self.prompts:
            for budget in self.budgets:
                if budget >= n_prompt:
                    yield f"budget {budget} is left out at prompt {n_prompt}: nothing is evicted"

    @property
    def n_turns(self) -> int:
        """Turns of a repeat; the first token of a turn is not counted, n_block are."""
        return (self.n_tokens - N_SETTLE) // (self.n_block + 1)

    @property
    def n_decoded(self) -> int:
        """Tokens decoded in a repeat, counted or not."""
        return N_SETTLE + self.n_turns * (self.n_block + 1)

    def as_dict(self) -> dict[str, Any]:
        """In the form of the JSON file."""
        paths = {k: str(v) for k, v in vars(self).items() if isinstance(v, Path)}
        return asdict(self) | paths | {"n_batch": N_BATCH}

    def check(self) -> None:
        """Raise BenchError, or PolicyError, at the first thing that cannot run."""
        if not self.model.is_file():
            msg = f"--model {self.model}: there is no such file"
            raise BenchError(msg)
        counts = {"prompt": self.prompts, "budget": self.budgets, "threads": self.threads}
        counts |= {"repeats": (self.repeats,), "block": (self.n_block,)}
        for name, values in counts.items():
            if not values or min(values) < 1:
                msg = f"--{name} {_joined(values)}: must be at least 1"
                raise BenchError(msg)
        if self.n_turns < 1:
            msg = (
                f"--tokens {self.n_tokens}: {N_SETTLE} tokens settle the cut and a turn has "
                f"{self.n_block + 1}; pass at least {N_SETTLE + self.n_block + 1}"
            )
            raise BenchError(msg)
        if not self.types_k:
            msg = "--cache-type-k names no type; pass one, such as f16"
            raise BenchError(msg)
        for type_k in self.types_k:
            for type_v in self.types_v or (type_k,):
                check_kv_types(type_k, type_v, self.flash_attn)
        if not self.policies:
            msg = "--policies names none; pass one, such as inertiakv"
            raise BenchError(msg)
        for name in self.policies:
            for budget in self.budgets:
                check_policy(name, budget, self.n_block)
        for n_prompt in self.prompts:
            if not self.budgets_below(n_prompt):
                msg = (
                    f"--prompt {n_prompt}: no --budget of {_joined(self.budgets)} is below it, "
                    "nothing would be evicted"
                )
                raise BenchError(msg)
        if self.stock_lib:
            self._check_stock()

    def _check_stock(self) -> None:
        if self.stock_lib and not any(self.stock_lib.glob("*llama.*")):
            msg = f"--stock-lib {self.stock_lib}: the folder has no llama library"
            raise BenchError(msg)
        for budget in self.budgets:
            if self.n_decoded >= budget:
                msg = (
                    f"--tokens {self.n_tokens} must be below --budget {budget}: stock with a "
                    "context of that size has to hold them beside some prompt"
                )
                raise BenchError(msg)


def check_policy(name: str, budget: int, n_block: int) -> None:
    """Raise where no policy of that name and budget can be made, or a turn has no fair share of it.

    The worker makes it.
    """
    policy = parse_policy(name, budget)
    if not policy.evicts:
        msg = f"--policies {name}: it evicts nothing; every table has it as kv_policy=None"
        raise BenchError(msg)
    if n_block % policy.n_refresh:
        msg = (
            f"--block {n_block}: {name} scores one step of {policy.n_refresh}; pass a multiple of "
            f"that, --block {policy.n_refresh * -(-n_block // policy.n_refresh)}"
        )
        raise BenchError(msg)


def _joined(values: tuple[object, ...] | list[str]) -> str:
    return ",".join(map(str, values))
