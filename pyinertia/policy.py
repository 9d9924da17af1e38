"""Eviction policies: which KV cells stay when a sequence outgrows its budget."""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

import numpy as np

from pyinertia import learned
from pyinertia.errors import PolicyError

# name -> value of enum llama_kv_scorer / _heads / _aggregation; another one is one line here
SCORERS: Mapping[str, int] = MappingProxyType(
    {
        "none": 0,
        "attention": 1,
        "recency": 2,
        "random": 3,
        "value-norm": 4,
        "entropy": 5,
        "keydiff": 6,
        "key-norm": 7,
        "learned": 8,
    }
)
HEADS: Mapping[str, int] = MappingProxyType({"mean": 0, "max": 1})
AGGREGATIONS: Mapping[str, int] = MappingProxyType(
    {"ema": 0, "coupled": 1, "sum": 2, "last": 3, "max": 4, "mean": 5}
)

QUERY_SCORERS = ("attention", "value-norm", "entropy", "learned")  # by what queries look at
KEY_SCORERS = ("keydiff", "key-norm")  # by what cells hold

PREFILLS = ("full", "bounded")

MAX_COUNT = 2**31 - 1

_COUNTS = {  # field -> least and most
    "n_sink": (0, MAX_COUNT),
    "n_recent": (0, MAX_COUNT),
    "n_window": (0, 512),
    "n_pool": (1, 255),
    "n_refresh": (1, MAX_COUNT),
    "seed": (0, MAX_COUNT),
}


@dataclass(frozen=True, kw_only=True)
class KVPolicy:
    """How KV cells are ranked, and how many of them stay.

    With p the probability that a head of query t puts on cell c in layer l, and a[l,t,c] its mean
    over query heads, a query's row over all L layers is m[t,c] = sum_l w_l a[l,t,c], with w_l
    proportional to lambda^(L-1-l). The first ranking is max(m), or sum(m) under "sum", over the
    last `n_window` prompt queries and the first decode query, averaged over `n_pool` neighbouring
    positions. From then on every scored query updates it by `aggregation`. The lowest cells leave,
    in all layers at once.

    Attributes:
        scorer: What a cell is ranked by.

            - "attention": the above.
            - "recency": the oldest leaves first (StreamingLLM, arXiv 2309.17453).
            - "random": by a seeded hash of the position, a control arm.
            - "none": nothing ever leaves.
            - "value-norm": `p |v|`, with the cell's value v.
            - "entropy": p weighted over heads by `(1 - H)/H`, H the entropy of p over the n cells
              that the query sees, divided by log(n) and kept in [0.001, 0.999]; sinks of the model
              do not count in H.
            - "keydiff": `1 - cos(k, k')`, with the cell's key k (as cached, after RoPE) and the
              mean k' of the normalised keys that the query sees (KeyDiff, arXiv 2504.15364).
            - "key-norm": `1/(1 + |k|)`, the order of -|k| in a layer.
            - "learned": the mass to come, which a small function predicts from a cell's mass, the
              EMA and the maximum of it, age, key norm, value norm and position. EMA and maximum
              begin with the first ranking above; a cell takes its first prediction whole.

            "keydiff" and "key-norm" depend on the cells, not on the query: n_window has no use, the
            first ranking is that of the first decode query ("bounded": and of each batch's last
            query). Under them and "learned" a new cell takes its first row whole, else it grows
            from 0.
        scorer_file: The .npz of numbers of the "learned" scorer, as scripts/train_scorer.py writes
            it. None is the one that ships.
        heads: How heads become one: "mean" or "max" over the query heads, of p, of p |v|, or
            of weighted p over that of the weights. Over KV heads for "keydiff" and "key-norm".
        aggregation: How successive rows m become the score s.

            - "ema": `s <- beta s + (1 - beta) m` (InertiaKV, arXiv 2609.03515).
            - "coupled": one EMA update per layer, which is "ema" with beta^L and lambda = beta.
            - "sum": `s <- s + m` (H2O, arXiv 2306.14048, over the window and the decode queries
              only).
            - "last": `s <- m` (TOVA, arXiv 2401.06104).
            - "max": `s <- max(s, m)`.
            - "mean": the mean of the cell's rows so far, the first ranking counts as one.
        beta: Memory of the EMA per decode step, in [0, 1). A row n steps after the last scored one
            is taken in with beta^n.
        lambda_: Tilt of the layer weights, in (0, 1]. 1 weighs all layers alike, less favours the
            late ones. None means 0.042^(1/L), which is 0.9 at 30 layers. Fixed by beta under
            "coupled".
        layer_weights: The w_l themselves in place of lambda_, one per scored layer, first layer
            first: not negative, not all 0. Their sum becomes 1.
        n_budget: Most cells a sequence holds while it decodes, once cut, the incoming included. A
            float in (0, 1) is a share of the prompt, but never less than what must stay and
            n_refresh. A multiple of 256 pays.
        n_sink: First positions, never evicted.
        n_recent: Newest positions, never evicted.
        n_window: Last prompt queries that take part in the first ranking (the observation window
            of SnapKV, arXiv 2404.14469), at most 512.
        n_pool: Neighbouring positions the first ranking is averaged over, odd, at most 255. 1 is
            none.
        n_refresh: Decode steps from one scored query, and cut, to the next. 1 is every step.
        frozen: Keep the first ranking for good. Generated tokens then outrank the prompt.
        prefill: What happens while a prompt enters.

            - "full": it enters whole, the first cut comes after it.
            - "bounded": the cache has only n_budget + n_batch cells, and a prompt that outgrows
              them is cut before each batch, ranked by the last n_window queries of the batches so
              far.
        protect: Half-open position ranges (p0, p1) that are never evicted.
        seed: Seed of the "random" scorer, in [0, 2^31).

    Raises:
        PolicyError: A field is out of range, or the budget has no room for what must stay.
    """

    scorer: str = "attention"
    scorer_file: str | None = None
    heads: str = "mean"
    aggregation: str = "ema"
    beta: float = 0.99
    lambda_: float | None = None
    layer_weights: tuple[float, ...] | None = None
    n_budget: int | float = 1024
    n_sink: int = 4
    n_recent: int = 32
    n_window: int = 16
    n_pool: int = 21
    n_refresh: int = 1
    frozen: bool = False
    prefill: str = "full"
    protect: tuple[tuple[int, int], ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Check every field, and that the budget has room for what must stay."""
        _choice("scorer", self.scorer, SCORERS)
        if self.scorer_file is not None:
            self._set("scorer_file", self._checked_file())
        _choice("heads", self.heads, HEADS)
        _choice("aggregation", self.aggregation, AGGREGATIONS)
        self._set("beta", _real("beta", self.beta, "in [0, 1)", lambda x: 0 <= x < 1))
        if self.lambda_ is not None:
            lambda_ = _real("lambda_", self.lambda_, "in (0, 1], or None", lambda x: 0 < x <= 1)
            self._set("lambda_", lambda_)
            if self.aggregation == "coupled":
                msg = (
                    f"KVPolicy(lambda_={lambda_}): aggregation='coupled' takes its layer weights "
                    "from beta; leave lambda_ out, or use aggregation='ema'"
                )
                raise PolicyError(msg)
        if self.layer_weights is not None:
            self._set("layer_weights", _weights(self.layer_weights))
            self._check_weights()
        for name, bounds in _COUNTS.items():
            self._set(name, _count(name, getattr(self, name), *bounds))
        if self.n_pool % 2 == 0:
            msg = f"KVPolicy(n_pool={self.n_pool}): n_pool must be odd; 1 is none"
            raise PolicyError(msg)
        if not isinstance(self.frozen, bool):
            msg = f"KVPolicy(frozen={self.frozen!r}): frozen must be True or False"
            raise PolicyError(msg)
        _choice("prefill", self.prefill, PREFILLS)
        self._set("protect", _ranges(self.protect))
        self._check_budget()
        self._check_bounded()

    @property
    def evicts(self) -> bool:
        """Whether cells ever leave under this policy."""
        return self.scorer != "none"

    @property
    def n_least(self) -> int:
        """The smallest budget that has room for what must stay and for the incoming tokens."""
        n_kept, end = self.n_sink, self.n_sink
        for p0, p1 in sorted(self.protect):
            n_kept += max(0, p1 - max(p0, end))
            end = max(end, p1)
        return n_kept + max(self.n_recent, 1) + self.n_refresh

    def _checked_file(self) -> str:
        if not isinstance(self.scorer_file, str | os.PathLike):
            msg = f"KVPolicy(scorer_file={self.scorer_file!r}): scorer_file must be a path, or None"
            raise PolicyError(msg)
        if self.scorer != "learned":
            msg = (
                f"KVPolicy(scorer_file={self.scorer_file!r}, scorer={self.scorer!r}): only the "
                "learned scorer has a file; use scorer='learned', or leave scorer_file out"
            )
            raise PolicyError(msg)
        return os.fspath(self.scorer_file)

    def _check_budget(self) -> None:
        if isinstance(self.n_budget, numbers.Real) and not isinstance(
            self.n_budget, numbers.Integral
        ):
            share = _real(
                "n_budget", self.n_budget, "a count, or a share in (0, 1)", lambda x: 0 < x < 1
            )
            self._set("n_budget", share)
            return
        self._set("n_budget", _count("n_budget", self.n_budget, 1))
        if self.evicts and self.n_budget < self.n_least:
            msg = (
                f"KVPolicy(n_budget={self.n_budget}, n_sink={self.n_sink}, "
                f"n_recent={self.n_recent}, n_refresh={self.n_refresh}, protect={self.protect}): "
                f"sinks, recent and protected positions leave no room; the budget must be at least "
                f"{self.n_least}"
            )
            raise PolicyError(msg)

    def _check_weights(self) -> None:
        reason = ""
        if self.lambda_ is not None:
            reason = f"lambda_={self.lambda_} weighs the layers, too; leave one of them out"
        elif self.aggregation == "coupled":
            reason = (
                "aggregation='coupled' takes its layer weights from beta; use aggregation='ema'"
            )
        elif self.scorer not in QUERY_SCORERS + KEY_SCORERS:
            reason = f"scorer={self.scorer!r} looks at no layer; leave layer_weights out"
        if reason:
            msg = f"KVPolicy(layer_weights={self.layer_weights}): {reason}"
            raise PolicyError(msg)

    def _check_bounded(self) -> None:
        if self.prefill != "bounded":
            return
        if not self.evicts:
            msg = "KVPolicy(prefill='bounded', scorer='none'): a bounded prefill needs a scorer"
            raise PolicyError(msg)
        if isinstance(self.n_budget, float):
            msg = (
                f"KVPolicy(prefill='bounded', n_budget={self.n_budget}): a share of a prompt that "
                "has not been read has no size; give n_budget as a count"
            )
            raise PolicyError(msg)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _choice(name: str, value: object, known: Iterable[str]) -> None:
    if value not in tuple(known):
        msg = f"KVPolicy({name}={value!r}): {name} must be one of {_listed(known)}"
        raise PolicyError(msg)


def _count(name: str, value: Any, least: int, most: int = MAX_COUNT) -> int:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not whole or not least <= value <= most:
        msg = f"KVPolicy({name}={value!r}): {name} must be a whole number in [{least}, {most}]"
        raise PolicyError(msg)
    return int(value)


def _real(name: str, value: Any, allowed: str, holds: Any) -> float:
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # the engine computes in float32, where a value may round out of the range
    with np.errstate(over="ignore"):
        allows = real and math.isfinite(value) and holds(float(np.float32(value)))
    if not allows:
        msg = f"KVPolicy({name}={value!r}): {name} must be {allowed}"
        raise PolicyError(msg)
    return float(value)


def _weights(weights: Any) -> tuple[float, ...]:
    allowed = "numbers, one per scored layer, not negative and not all 0"
    try:
        found = tuple(
            _real("layer_weights", w, allowed, lambda x: 0 <= x < math.inf) for w in weights
        )
    except TypeError as error:
        msg = f"KVPolicy(layer_weights={weights!r}): layer_weights must be {allowed}"
        raise PolicyError(msg) from error
    if not any(np.float32(weight) for weight in found):
        msg = f"KVPolicy(layer_weights={weights!r}): layer_weights must be {allowed}"
        raise PolicyError(msg)
    return found


def _ranges(protect: Any) -> tuple[tuple[int, int], ...]:
    try:
        ranges = tuple((_count("protect", p0, 0), _count("protect", p1, 0)) for p0, p1 in protect)
    except (TypeError, ValueError) as error:
        msg = f"KVPolicy(protect={protect!r}): protect must be pairs of positions, as in ((0, 64),)"
        raise PolicyError(msg) from error
    for p0, p1 in ranges:
        if p0 >= p1:
            msg = f"KVPolicy(protect={protect!r}): ({p0}, {p1}) is an empty range"
            raise PolicyError(msg)
    return ranges


def _listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


POLICIES: Mapping[str, KVPolicy] = MappingProxyType(
    {
        "full": KVPolicy(scorer="none"),
        "inertiakv": KVPolicy(),
        "inertiakv-lazy": KVPolicy(n_refresh=8),
        "score-free": KVPolicy(frozen=True),
        "coupled": KVPolicy(aggregation="coupled", beta=0.99),
        "streaming-llm": KVPolicy(scorer="recency"),
        "h2o": KVPolicy(aggregation="sum", lambda_=1.0),
        "tova": KVPolicy(aggregation="last", lambda_=1.0, n_window=0, n_pool=1),
        "snapkv": KVPolicy(lambda_=1.0, n_window=32, n_pool=7, frozen=True),
        "value-norm": KVPolicy(scorer="value-norm"),
        "entropy": KVPolicy(scorer="entropy"),
        "keydiff": KVPolicy(scorer="keydiff"),
        "key-norm": KVPolicy(scorer="key-norm"),
        "learned": KVPolicy(scorer="learned", aggregation="last"),
        "random": KVPolicy(scorer="random"),
    }
)

"""The presets, by name. Read-only."""

# what a table of policies shows; the rest is the same in all of them
_SAME = {"scorer_file", "heads", "layer_weights", "prefill", "protect", "seed"}
COLUMNS = tuple(f.name for f in fields(KVPolicy) if f.name not in _SAME)


def resolve_policy(
    kv_policy: str | KVPolicy | None,
    kv_budget: int | float | None = None,
    kv_refresh: int | None = None,
    kv_prefill: str | None = None,
) -> KVPolicy:
    """Return the policy that a `Llama` gets: a preset or the given one, with overrides.

    Args:
        kv_policy: A key of `POLICIES`, a policy, or None for "full".
        kv_budget: Replaces the policy's n_budget.
        kv_refresh: Replaces the policy's n_refresh.
        kv_prefill: Replaces the policy's prefill.

    Raises:
        PolicyError: The name is unknown, a value is out of range, or the scorer's file cannot be
            read.
        TypeError: kv_policy is something else, or an override is given where nothing is evicted.
    """
    if kv_policy is not None and not isinstance(kv_policy, str | KVPolicy):
        msg = f"kv_policy={kv_policy!r} is not a policy; pass a name, a KVPolicy, or None"
        raise TypeError(msg)
    name = "full" if kv_policy is None else kv_policy
    policy = name if isinstance(name, KVPolicy) else _preset(name)
    overrides = {"n_budget": kv_budget, "n_refresh": kv_refresh, "prefill": kv_prefill}
    changes: dict[str, Any] = {k: v for k, v in overrides.items() if v is not None}
    if changes and not policy.evicts:
        msg = (
            f"kv_budget={kv_budget!r}, kv_refresh={kv_refresh!r}, kv_prefill={kv_prefill!r} need a "
            f"policy that evicts, kv_policy={kv_policy!r} does not; pass kv_policy='inertiakv', or "
            "leave them out"
        )
        raise TypeError(msg)
    policy = replace(policy, **changes)
    if policy.scorer == "learned":
        learned.read(policy.scorer_file)  # before a model is loaded
    return policy


def _preset(name: str) -> KVPolicy:
    if name in POLICIES:
        return POLICIES[name]
    nearest = get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
    msg = (
        f"kv_policy={name!r} is not known; known policies: {_listed(POLICIES)}. "
        f"Did you mean {nearest!r}?"
    )
    raise PolicyError(msg)
