"""The evaluations that the claims are about, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pyinertia.eval import claims, overlap, perplexity, ruler, session
from pyinertia.eval.arms import FULL
from pyinertia.eval.options import Options
from pyinertia.eval.passages import Passages
from pyinertia.eval.runner import Evaluation, Measured
from pyinertia.eval.scored import all_items
from pyinertia.eval.settings import Item
from pyinertia.eval.store import Result
from pyinertia.eval.vocabulary import Vocabulary

Make = Callable[[Vocabulary], Evaluation]

# retrieval that a small model can do with the full cache
TASKS = ("niah_single_2", "niah_multikey_1", "niah_multiquery", "vt")


def perform(options: Options, n_tokens: int) -> None:
    """Measure, and hold the claims against it."""

    def passages(vocabulary: Vocabulary) -> Passages:
        return Passages(
            vocabulary, None, length=options.length, n_tokens=n_tokens, seed=options.seed
        )

    def make_ppl(vocabulary: Vocabulary) -> Evaluation:
        return perplexity.Perplexity(passages(vocabulary), options.samples)

    def make_overlap(vocabulary: Vocabulary) -> Evaluation:
        return overlap.Overlap(passages(vocabulary), options.samples, n_tokens)

    def make_ruler(vocabulary: Vocabulary) -> Evaluation:
        items = all_items(TASKS, options.samples)
        return ruler.evaluation(vocabulary, items, length=options.length, seed=options.seed)

    text = {"tokens": n_tokens, "text": None}
    parts: dict[str, tuple[Make, dict[str, Any]]] = {
        "ppl": (make_ppl, text),
        "overlap": (make_overlap, text),
        "ruler": (make_ruler, {"answer_prefix": True}),
    }
    results: dict[str, dict[tuple[str, int | float], dict[Item, Result]]] = {}
    together, about = Measured(), dict[str, Any]()
    for name, (make, extra) in parts.items():
        wanted = claims.policies_of(name)
        given = [policy for policy in options.policies.split(",") if policy.strip() in wanted]
        results[name] = {}
        if not given or together.interrupted:
            continue
        sys.stderr.write(f"{name}\n")
        done = session.measure(
            replace(options, policies=",".join(given)),
            make,
            extra,
            # the cells of the full cache are all of them
            lambda arms: [arm for arm in arms if arm.name != FULL or name != "overlap"],  # noqa: B023
        )
        for arm in done.arms:
            if arm.budget is not None:
                results[name][arm.name, arm.budget] = done.measured.of(arm)
        together.refusals += done.measured.refusals
        together.notes += [n for n in done.measured.notes if n not in together.notes]
        together.interrupted = done.measured.interrupted
        about = done.about
    budgets = list(dict.fromkeys(budget for part in results.values() for _, budget in part))
    about = {**about, "evaluation": "reproduce"}
    session.show(options, about, together, claims.findings(claims.judge(results, budgets)))
