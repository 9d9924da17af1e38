"""A policy in one word, as the options of commands take it: `h2o/last/n_recent=64`."""

from __future__ import annotations

from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any

from pyinertia.errors import CommandError
from pyinertia.policy import AGGREGATIONS, KEY_SCORERS, POLICIES, PREFILLS, KVPolicy

# fields that have an option of their own, or no text of one word
_OTHERS = {"n_budget", "protect", "layer_weights"}
_FILE = "scorer_file"
_MAX_FIRST = {"ema", "last", "max", "mean"}  # whose first ranking is the same
FIELDS = tuple(f.name for f in fields(KVPolicy) if f.name not in _OTHERS)


def parse_policy(text: str, budget: int | float | None = None) -> KVPolicy:
    """Read a policy: a preset and changes of it.

    A change is a kind of prefill, an aggregation or any field: `inertiakv/bounded`, `h2o/last`,
    `tova/n_recent=64`. A path may have slashes and stands last: `learned/scorer_file=my/own.npz`.

    Args:
        text: The policy.
        budget: Its n_budget, in place of the preset's. "full" has none.

    Raises:
        CommandError: The preset or a field is unknown.
        PolicyError: A value is out of range, or values do not go together.
    """
    head, names_file, path = text.partition(f"/{_FILE}=")
    name, *parts = head.split("/")
    if name not in POLICIES:
        nearest = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        msg = (
            f"--policies: {name!r} is not known; known policies: {', '.join(POLICIES)}. "
            f"Did you mean {nearest!r}?"
        )
        raise CommandError(msg)
    # one change of all fields: on the way to a valid policy there may be none that is
    changes: dict[str, Any] = {_FILE: path} if names_file else {}
    for part in parts:
        field, equals, value = part.partition("=")
        if part in PREFILLS:
            field, found = "prefill", part
        elif part in AGGREGATIONS:
            field, found = "aggregation", part
        elif equals and field in FIELDS:
            found = parse_value(value)
        else:
            msg = (
                f"--policies: {text!r}: {part!r} changes nothing of a policy; write "
                f"{name}/bounded, or {name}/FIELD=VALUE with one of {', '.join(FIELDS)}"
            )
            raise CommandError(msg)
        if field in changes:
            msg = f"--policies: {text!r} changes {field} twice; leave one of them out"
            raise CommandError(msg)
        changes[field] = found
    if budget is not None and POLICIES[name].evicts:
        changes["n_budget"] = budget
    return replace(POLICIES[name], **changes)


def parse_value(text: str) -> Any:
    """Read a number, True, False or None; anything else stays a text."""
    if text in {"True", "False", "None"}:
        return {"True": True, "False": False, "None": None}[text]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def split_names(text: str) -> list[str]:
    """Read a list with commas between, each name once."""
    return list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def effective(policy: KVPolicy) -> KVPolicy:
    """The policy with each field that does nothing in it at its default.

    Policies that differ only in such fields keep the same cells.
    """
    if not policy.evicts:
        return POLICIES["full"]
    idle = set()
    if policy.scorer != "random":
        idle.add("seed")
    if policy.scorer in {"recency", "random"}:
        idle |= {"heads", "aggregation", "beta", "lambda_", "n_window", "n_pool"}
    elif policy.frozen and policy.prefill == "full" and policy.aggregation in _MAX_FIRST:
        idle |= {"aggregation", "beta"}  # the first ranking is the only one
    elif policy.aggregation not in {"ema", "coupled"}:
        idle.add("beta")
    if policy.scorer in KEY_SCORERS:
        idle.add("n_window")
    defaults: dict[str, Any] = {name: getattr(KVPolicy(), name) for name in idle}
    return replace(policy, **defaults)
