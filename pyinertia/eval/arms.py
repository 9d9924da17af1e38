"""What is compared: policies times budgets, and the full cache."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

from pyinertia.errors import EvalError, PolicyError
from pyinertia.policy import AGGREGATIONS, POLICIES, KVPolicy, resolve_policy

FULL = "full"
QUERY = "/query"


@dataclass(frozen=True)
class Arm:
    """One policy at one budget.

    Attributes:
        name: How the user wrote the policy.
        budget: Cells, or a share of the prompt. None: the full cache.
        policy: The policy at that budget.
        query: Whether the question is named before its prompt enters (`Llama.kv_query`).
    """

    name: str
    budget: int | float | None
    policy: KVPolicy
    query: bool = False

    @property
    def label(self) -> str:
        """Short name for tables and plots."""
        if self.budget is None:
            return self.name
        share = isinstance(self.budget, float)
        return f"{self.name} {self.budget:.0%}" if share else f"{self.name} {self.budget}"


@dataclass(frozen=True)
class Refusal:
    """An arm that cannot run, and why."""

    label: str
    reason: str


FULL_ARM = Arm(FULL, None, POLICIES[FULL])


def parse_policy(text: str) -> KVPolicy:
    """Read a policy: a preset and changes of it.

    A change is a kind of prefill, an aggregation or any field: `inertiakv/bounded`, `h2o/last`,
    `tova/n_recent=64`.

    Raises:
        EvalError: The preset or a field is unknown.
        PolicyError: A value is out of range.
    """
    name, *changes = text.split("/")
    if name not in POLICIES:
        nearest = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        msg = (
            f"--policies: {name!r} is not known; known policies: {', '.join(POLICIES)}. "
            f"Did you mean {nearest!r}?"
        )
        raise EvalError(msg)
    policy = POLICIES[name]
    lists = {"protect", "layer_weights"}
    known = {f.name: f for f in fields(KVPolicy) if f.name not in lists | {"n_budget"}}
    for change in changes:
        field, equals, value = change.partition("=")
        if change in {"full", "bounded"}:
            policy = replace(policy, prefill=change)
        elif change in AGGREGATIONS:
            policy = replace(policy, aggregation=change)
        elif equals and field in known:
            policy = replace(policy, **{field: _value(value)})
        else:
            msg = (
                f"--policies: {text!r}: {change!r} changes nothing of a policy; write "
                f"{name}/bounded, or {name}/FIELD=VALUE with one of {', '.join(known)}"
            )
            raise EvalError(msg)
    return policy


def _value(text: str) -> Any:
    if text in {"True", "False", "None"}:
        return {"True": True, "False": False, "None": None}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def parse_budgets(text: str) -> list[int | float]:
    """Read budgets: counts of cells, and shares of the prompt in (0, 1).

    Raises:
        EvalError: One is neither.
    """
    budgets: list[int | float] = []
    for part in _parts(text):
        value = _value(part)
        whole = isinstance(value, int) and not isinstance(value, bool) and value > 0
        share = isinstance(value, float) and 0 < value < 1
        if not (whole or share):
            msg = (
                f"--budgets: {part!r} is not a budget; write cells, as in 512, or a share of the "
                "prompt in (0, 1), as in 0.25"
            )
            raise EvalError(msg)
        budgets.append(value)
    return budgets


def parse_arms(policies: str, budgets: str) -> tuple[list[Arm], list[Refusal]]:
    """Return the arms, the full cache first, and those that cannot run.

    A policy that ends with `/query` has the question named before its prompt enters.

    Raises:
        EvalError: A name or a number cannot be read, or no arm but the full cache is left.
    """
    arms, refusals = [FULL_ARM], []
    sizes = parse_budgets(budgets)
    for name in _parts(policies):
        if name == FULL:
            continue
        text, query = name.removesuffix(QUERY), name.endswith(QUERY)
        for budget in sizes:
            try:
                policy = resolve_policy(parse_policy(text), budget)
                arms.append(Arm(name, budget, policy, query))
            except PolicyError as error:
                refusals.append(Refusal(f"{name} {budget}", str(error)))
    if len(arms) == 1:
        reason = refusals[0].reason if refusals else "--policies and --budgets name none"
        msg = f"there is nothing to compare with the full cache: {reason}"
        raise EvalError(msg)
    return arms, refusals


def _parts(text: str) -> list[str]:
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
