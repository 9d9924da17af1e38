"""The evaluations that the claims are about, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace

from pyinertia.errors import EvalError, PyInertiaError
from pyinertia.eval import claims, overlap, perplexity, ruler, session, speed
from pyinertia.eval.arms import FULL, Refusal, parse_arms, parse_budgets
from pyinertia.eval.options import Options
from pyinertia.eval.passages import Passages
from pyinertia.eval.runner import Evaluation, Measured
from pyinertia.eval.scored import all_items
from pyinertia.eval.settings import Item, Settings
from pyinertia.eval.store import Result
from pyinertia.eval.vocabulary import Vocabulary
from pyinertia.policy_text import split_names

Make = Callable[[Vocabulary], Evaluation]
Key = tuple[str, int | float]  # policy and budget

# retrieval that a small model can do with the full cache
TASKS = ("niah_single_2", "niah_multikey_1", "niah_multiquery", "vt")


def perform(options: Options, n_tokens: int) -> None:
    """Measure, and hold the claims against it.

    Raises:
        EvalError: --policies has others than the claims are about, or not all of any claim's.
    """
    given = _policies(options)

    def passages(vocabulary: Vocabulary) -> Passages:
        return Passages(
            vocabulary,
            None,
            length=options.length,
            n_tokens=n_tokens,
            n_samples=options.samples,
            seed=options.seed,
        )

    def make_ppl(vocabulary: Vocabulary) -> Evaluation:
        return perplexity.Perplexity(passages(vocabulary), options.samples)

    def make_overlap(vocabulary: Vocabulary) -> Evaluation:
        return overlap.Overlap(passages(vocabulary), options.samples, n_tokens)

    def make_ruler(vocabulary: Vocabulary) -> Evaluation:
        items = all_items(TASKS, options.samples)
        return ruler.evaluation(vocabulary, items, length=options.length, seed=options.seed)

    makes: dict[str, Make] = {"ppl": make_ppl, "overlap": make_overlap, "ruler": make_ruler}
    results: dict[str, dict[Key, dict[Item, Result]]] = {}
    together = Measured()
    settings = session.settings_of(options, {"tokens": n_tokens})
    for name in (*makes, speed.NAME):
        wanted = claims.policies_of(name, given)
        results[name] = {}
        if not wanted or together.interrupted:
            continue
        sys.stderr.write(f"{name}\n")
        part = replace(options, policies=",".join(wanted))
        if name == speed.NAME:
            results[name] = _speeds(part, settings, together)
            continue
        done = session.measure(
            part, makes[name], vary=overlap.without_full if name == "overlap" else list
        )
        for arm in done.arms:
            if arm.budget is not None:
                results[name][arm.name, arm.budget] = done.measured.of(arm)
        together.refusals += done.measured.refusals
        together.notes += [n for n in done.measured.notes if n not in together.notes]
        together.interrupted = done.measured.interrupted
    rows = claims.judge(results, parse_budgets(options.budgets))
    together.notes += claims.notes(rows)
    about = session.about(options, "reproduce", settings)
    session.show(options, about, together, claims.findings(rows))


def _policies(options: Options) -> list[str]:
    given = [name for name in split_names(options.policies) if name != FULL]
    unknown = [name for name in given if name not in claims.POLICIES]
    if unknown:
        msg = (
            f"--policies: no claim is about {', '.join(unknown)}; known are "
            f"{', '.join(claims.POLICIES)}"
        )
        raise EvalError(msg)
    if not any(set(claim.policies) <= set(given) for claim in claims.CLAIMS):
        needed = dict.fromkeys(", ".join(claim.policies) for claim in claims.CLAIMS)
        msg = (
            f"--policies {options.policies}: no claim is about these alone; pass all of one "
            f"claim's: {'; '.join(needed)}"
        )
        raise EvalError(msg)
    return given


def _speeds(
    options: Options, settings: Settings, together: Measured
) -> dict[Key, dict[Item, Result]]:
    arms, refusals = parse_arms(options.policies, options.budgets)
    together.refusals += refusals
    try:
        return speed.measure(arms, options.samples, settings, options.out)
    except KeyboardInterrupt:
        together.interrupted = True
    except PyInertiaError as error:  # the other claims were measured and can be judged
        together.refusals.append(Refusal(speed.NAME, str(error)))
    return {}
