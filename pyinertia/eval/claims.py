"""What the abstract of InertiaKV (arXiv 2609.03515) claims, beside what is measured.

A claim is a range that a measured number should be in. It is confirmed if the number's whole 95 %
interval is inside, and refuted if all of it is outside. Otherwise, and where a task has fewer than
N_LEAST samples or they tell no interval, it is inconclusive: more samples may decide it. The
abstract gives few numbers; where it gives none, the range is ours and stands in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pyinertia.eval import overlap, report
from pyinertia.eval.perplexity import N_BEFORE
from pyinertia.eval.settings import Item
from pyinertia.eval.statistics import N_LEAST, Interval, score_interval, t_interval
from pyinertia.eval.store import Result

SAME = 0.8  # a Jaccard from which on cells are "nearly the same": each set has 89 % of the other

Results = Mapping[Item, Result]


@dataclass(frozen=True)
class Measure:
    """A number that compares policies on one sample.

    Attributes:
        evaluation: Which results it is of: "ruler", "ppl", "overlap" or "speed".
        title: What it is.
        value: The number, of one result of each policy.
        is_ratio: Whether its mean over samples is the geometric one.
        ties: What it is if the policies do not differ, for one that is within 1 of that.
    """

    evaluation: str
    title: str
    value: Callable[..., float]
    is_ratio: bool = False
    ties: float | None = None

    def counts(self, value: float) -> bool:
        """Whether a mean can have this value in it."""
        return math.isfinite(value) and (value > 0 or not self.is_ratio)

    def interval(self, by_task: Sequence[Sequence[float]]) -> Interval:
        """The mean of values, and its interval."""
        if self.ties is not None:
            return score_interval(by_task, self.ties)
        if self.is_ratio:
            logs = t_interval([list(map(math.log, values)) for values in by_task])
            return Interval(*map(math.exp, logs))
        return t_interval(by_task)


def _jaccard(a: Result, b: Result) -> float:
    step = max(a["cells"], key=int)
    return overlap.compare(a["cells"][step], b["cells"][step])[0]


def _jaccard_gain(a: Result, b: Result, other_a: Result, other_b: Result) -> float:
    return _jaccard(a, b) - _jaccard(other_a, other_b)


def _kl_ratio(a: Result, b: Result) -> float:
    ours, theirs = (float(np.mean(result["kl"][N_BEFORE:])) for result in (a, b))
    return ours / theirs if theirs > 0 else math.nan


def _ppl_difference(a: Result, b: Result) -> float:
    ours, theirs = (math.exp(np.mean(result["nll"][N_BEFORE:])) for result in (a, b))
    return ours - theirs


def _score_difference(a: Result, b: Result) -> float:
    return float(a["score"] - b["score"])


def _speed_ratio(a: Result, b: Result) -> float:
    pairs = zip(a["turns"], b["turns"], strict=True)
    return float(median(theirs / ours for ours, theirs in pairs))


JACCARD = Measure("overlap", "Jaccard of the kept cells", _jaccard, ties=1)
GAIN = Measure("overlap", "Jaccard under EMA minus under last", _jaccard_gain, ties=0)
KL = Measure("ppl", "KL to the full cache, ratio", _kl_ratio, is_ratio=True)
PPL = Measure("ppl", "perplexity, difference", _ppl_difference)
SCORE = Measure("ruler", "RULER score, difference", _score_difference, ties=0)
SPEED = Measure("speed", "tokens/s, ratio", _speed_ratio, is_ratio=True)


@dataclass(frozen=True)
class Claim:
    """A range that a measured number should be in, its ends excluded."""

    text: str
    measure: Measure
    policies: tuple[str, ...]
    low: float = -math.inf
    high: float = math.inf

    @property
    def range(self) -> str:
        """The range in words."""
        if math.isinf(self.low):
            return f"below {self.high:g}"
        return f"above {self.low:g}"


BASE = "inertiakv"


def _claims() -> Iterator[Claim]:
    for name in ("value-norm", "entropy"):
        yield Claim(f"{name} keeps nearly the same cells", JACCARD, (name, BASE), low=SAME)
    others = {"keydiff": "keydiff", "key-norm": "key-norm", "recency": "streaming-llm"}
    for text, name in others.items():
        yield Claim(f"{text} changes the ranking", JACCARD, (name, BASE), high=SAME)
    for text, name in others.items():
        yield Claim(f"{text} loses quality: prose", KL, (name, BASE), low=1)
        yield Claim(f"{text} loses quality: retrieval", SCORE, (name, BASE), high=0)
    yield Claim("EMA is better than the last step", KL, (f"{BASE}/last", BASE), low=1)
    yield Claim("so is EMA coupled to layers", KL, (f"{BASE}/last", "coupled"), low=1)
    for name in ("value-norm", "entropy"):
        yield Claim(
            f"EMA brings {name} nearer to attention",
            GAIN,
            (name, BASE, f"{name}/last", f"{BASE}/last"),
            low=0,
        )
    yield Claim("lazy decodes 1.34 to 1.46 x as fast", SPEED, ("inertiakv-lazy", BASE), low=1.34)
    yield Claim("score-free costs 0.03: retrieval", SCORE, (BASE, "score-free"), high=0.03)
    yield Claim("score-free costs 0.03: perplexity", PPL, ("score-free", BASE), high=0.03)


CLAIMS: Sequence[Claim] = tuple(_claims())

# the policies that some claim is about
POLICIES = tuple(dict.fromkeys(name for claim in CLAIMS for name in claim.policies))


def policies_of(evaluation: str, given: Collection[str]) -> list[str]:
    """Names of the policies that an evaluation has to run, to judge what those given allow."""
    of = [
        claim
        for claim in CLAIMS
        if claim.measure.evaluation == evaluation and set(claim.policies) <= set(given)
    ]
    return list(dict.fromkeys(name for claim in of for name in claim.policies))


def judge(
    results: Mapping[str, Mapping[tuple[str, int | float], Results]],
    budgets: Sequence[int | float],
) -> report.Rows:
    """Every claim at every budget: the number, its interval, and what follows.

    Args:
        results: By evaluation, then by policy and budget, then by sample.
        budgets: The budgets.
    """
    return [
        _row(claim, budget, results[claim.measure.evaluation])
        for budget in budgets
        for claim in CLAIMS
    ]


def _row(
    claim: Claim, budget: int | float, results: Mapping[tuple[str, int | float], Results]
) -> dict[str, Any]:
    of = [results.get((name, budget), {}) for name in claim.policies]
    by_task: dict[str, list[float]] = {}
    n_dropped = 0
    for item in sorted(set.intersection(*(set(part) for part in of))):
        value = claim.measure.value(*(part[item] for part in of))
        if claim.measure.counts(value):
            by_task.setdefault(item[0], []).append(value)
        else:
            n_dropped += 1
    measured = claim.measure.interval(list(by_task.values()))
    n_samples = [len(values) for values in by_task.values()]
    return {
        "claim": claim.text,
        "measure": claim.measure.title,
        "policies": list(claim.policies),
        "budget": budget,
        "range": claim.range,
        "measured": measured._asdict(),
        "n_samples": sum(n_samples),
        "n_dropped": n_dropped,
        "verdict": _verdict(claim, measured.low, measured.high, n_samples),
    }


def _verdict(claim: Claim, low: float, high: float, n_samples: Sequence[int]) -> str:
    if not n_samples:
        return "not measured"
    if min(n_samples) < N_LEAST:
        return "inconclusive"
    # ends that are not known compare as false
    if claim.low < low and high < claim.high:
        return "confirmed"
    if high < claim.low or claim.high < low:
        return "refuted"
    return "inconclusive"


def notes(rows: report.Rows) -> list[str]:
    """What the table leaves out."""
    return [
        f"{row['claim']}, budget {row['budget']}: {row['n_dropped']} samples are left out, whose "
        f"{row['measure']} is no number above 0 to take a mean of"
        for row in rows
        if row["n_dropped"]
    ]


def findings(rows: report.Rows) -> report.Findings:
    """The claims in a table for each budget, and their plot."""
    columns = ("measured", "mean [95 %]", "claimed", "samples", "verdict")
    tables = []
    for budget in dict.fromkeys(row["budget"] for row in rows):
        table = report.table(f"the abstract's claims, budget {budget}", "claim", columns)
        for row in (row for row in rows if row["budget"] == budget):
            table.add_row(
                row["claim"],
                row["measure"],
                report.within(row["measured"], ".3f"),
                row["range"],
                str(row["n_samples"]),
                row["verdict"],
            )
        tables.append(table)

    def draw(prefix: Path) -> list[Path]:
        from pyinertia.eval import plots

        return plots.claims(prefix, rows)

    return rows, tables, draw
