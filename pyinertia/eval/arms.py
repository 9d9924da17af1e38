"""What is compared: policies times budgets, and the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pyinertia.errors import EvalError, PolicyError
from pyinertia.policy import POLICIES, KVPolicy
from pyinertia.policy_text import effective, parse_policy, parse_value, split_names

FULL = "full"
QUERY = "/query"


@dataclass(frozen=True)
class Arm:
    """One policy at one budget.

    Attributes:
        name: How the user wrote the policy.
        budget: Cells, or a share of the prompt. None: the full cache.
        policy: The policy at that budget.
        query: What is named before the prompt enters (`Llama.kv_query`), a text or None. True: the
            sample's own question.
    """

    name: str
    budget: int | float | None
    policy: KVPolicy
    query: str | Literal[True] | None = None

    @property
    def label(self) -> str:
        """Short name for tables and plots."""
        if self.budget is None:
            return self.name
        share = isinstance(self.budget, float)
        return f"{self.name} {100 * self.budget:g}%" if share else f"{self.name} {self.budget}"


@dataclass(frozen=True)
class Refusal:
    """An arm that cannot run, and why."""

    label: str
    reason: str


FULL_ARM = Arm(FULL, None, POLICIES[FULL])


def parse_budgets(text: str) -> list[int | float]:
    """Read budgets, each once: counts of cells, and shares of the prompt in (0, 1).

    Raises:
        EvalError: One is neither.
    """
    budgets: list[int | float] = []
    for part in split_names(text):
        value = parse_value(part)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        share = isinstance(value, float) and 0 < value < 1
        if not (whole or share):
            msg = (
                f"--budgets: {part!r} is not a budget; write cells, as in 512, or a share of the "
                "prompt in (0, 1), as in 0.25"
            )
            raise EvalError(msg)
        if value not in budgets:
            budgets.append(value)
    return budgets


def parse_arms(policies: str, budgets: str) -> tuple[list[Arm], list[Refusal]]:
    """Return the arms, the full cache first, and those that cannot run.

    A policy that ends with `/query` has the question named before its prompt enters, one that ends
    with `/query=TEXT` that text, which has no comma, or no text.

    Raises:
        CommandError: A policy cannot be read.
        EvalError: A number cannot be read, two policies are one in effect, or no arm but the full
            cache is left.
    """
    arms, refusals = [FULL_ARM], []
    sizes = parse_budgets(budgets)
    named: dict[tuple[KVPolicy, str | Literal[True] | None], str] = {}
    for name in split_names(policies):
        if name == FULL:
            continue
        text, query = _split_query(name)
        for budget in sizes:
            try:
                policy = parse_policy(text, budget)
            except PolicyError as error:
                refusals.append(Refusal(f"{name} {budget}", str(error)))
                continue
            if not policy.evicts:
                msg = f"--policies: {name} evicts nothing, as the full cache that always runs"
                raise EvalError(msg)
            other = named.setdefault((effective(policy), query), name)
            if other != name:
                msg = (
                    f"--policies: {other} and {name} keep the same cells, what differs has no "
                    "effect in them; leave one out"
                )
                raise EvalError(msg)
            arms.append(Arm(name, budget, policy, query))
    if len(arms) == 1:
        reason = refusals[0].reason if refusals else "--policies and --budgets name none"
        msg = f"there is nothing to compare with the full cache: {reason}"
        raise EvalError(msg)
    return arms, refusals


def _split_query(name: str) -> tuple[str, str | Literal[True] | None]:
    text, found, rest = name.partition(QUERY)
    if found and not rest:
        return text, True
    if rest.startswith("="):
        return text, rest[1:].strip()
    return name, None
