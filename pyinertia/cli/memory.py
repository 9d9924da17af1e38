"""What is still in the cache, in plain words; and what must stay there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from pyinertia.errors import CommandError, PolicyError
from pyinertia.policy import MAX_COUNT

if TYPE_CHECKING:
    from pyinertia.cli.template import ChatTemplate
    from pyinertia.llama import Llama


class Span(NamedTuple):
    """Tokens beside each other that share a fate."""

    kept: bool
    tokens: list[int]


def used(llm: Llama, n_gone: int = 0) -> str:
    """Cells, and what was dropped, n_gone whole messages among it."""
    n_tokens, budget = llm.n_tokens, llm.kv_policy.n_budget
    if not llm.kv_policy.evicts:
        return f"{n_tokens:,} of {llm._n_ctx:,} positions, {dropped(0, n_tokens, n_gone)}"
    n_cells = len(llm.kv_cells())
    if isinstance(budget, float):
        cells = f"{n_cells:,} cells (budget: {budget:.0%} of the prompt)"
    else:
        cells = f"{n_cells:,} of {budget:,} cells"
    return f"{cells}, {dropped(n_tokens - n_cells, n_tokens, n_gone)}"


def dropped(n_dropped: int, n_tokens: int, n_gone: int = 0) -> str:
    """How much the model no longer sees."""
    parts = [f"the first {n_gone} messages"] if n_gone else []
    if n_dropped:
        parts.append(f"{n_dropped:,} of {n_tokens:,} tokens")
    return f"{' and '.join(parts) or 'nothing'} dropped"


def spans(llm: Llama, tokens: Sequence[int]) -> Iterator[Span]:
    """Cut the tokens in the cache, [n] by position, into kept and dropped runs."""
    kept = {*range(len(tokens))}
    if llm.kv_policy.evicts:
        kept = {*llm.kv_cells()["pos"].tolist()}
    for stays, run in groupby(range(len(tokens)), kept.__contains__):
        yield Span(stays, [tokens[i] for i in run])


def protect(llm: Llama, template: ChatTemplate, system: str | None) -> None:
    """Keep the system prompt for good, or what the template says by itself if there is room.

    Raises:
        CommandError: The budget has no room for the system prompt.
    """
    n_system = template.n_system(system)
    if not llm.kv_policy.evicts or not n_system:
        return
    if system is None and not llm._has_room(n_system):
        return  # nobody asked for it
    try:
        llm.kv_protect(0, n_system)
    except PolicyError as error:
        protected = ((0, n_system),)
        least = replace(llm.kv_policy, n_budget=MAX_COUNT, protect=protected).n_least
        msg = (
            f"the system prompt has {n_system} tokens and is never dropped, --kv-budget "
            f"{llm.kv_policy.n_budget} has no room for it; pass at least {least}, better "
            f"{least + 256}, or shorten it"
        )
        raise CommandError(msg) from error
