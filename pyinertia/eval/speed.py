"""How fast policies decode beside each other: sides of a benchmark, which take turns.

Times of one arm after the other are those of other moments of the machine.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pyinertia.bench.run import Run
from pyinertia.bench.settings import N_SETTLE
from pyinertia.bench.settings import Settings as BenchSettings
from pyinertia.bench.summary import turn_ms
from pyinertia.errors import EvalError
from pyinertia.eval.arms import Arm
from pyinertia.eval.settings import Item, Settings
from pyinertia.eval.store import Result, Store

NAME = "speed"
N_TURNS = 8  # of a repeat


def measure(
    arms: Sequence[Arm], n_repeats: int, settings: Settings, out: Path
) -> dict[tuple[str, int | float], dict[Item, Result]]:
    """Decode the same text under all arms of a budget, several times; what is stored is kept.

    A repeat is a sample: `turns` are the mean milliseconds per token of each of its turns, which
    hold as many scored steps as belong to the others.

    Raises:
        EvalError: A side failed, or the samples have no room for the budget and the turns.
    """
    items = [(NAME, i) for i in range(n_repeats)]
    found: dict[tuple[str, int | float], dict[Item, Result]] = {}
    store = Store(out / f"{NAME}.jsonl")
    try:
        for budget in dict.fromkeys(arm.budget for arm in arms if arm.budget is not None):
            of = [arm for arm in arms if arm.budget == budget]
            asked = _asked(of, n_repeats, settings)
            # the model is known by its own hash, wherever it is
            about = json.dumps({**asked.as_dict(), "model": ""})
            digest = hashlib.sha256(about.encode()).hexdigest()
            keys = {
                (arm, item): settings.identity(NAME, arm, item, digest[:16])
                for arm in of
                for item in items
            }
            # sides that did not take turns do not compare: all of them, or none
            if any(store.get(key) is None for key in keys.values()):
                for (arm, item), result in _turns(of, items, asked).items():
                    store.add(keys[arm, item], result)
            for (arm, item), key in keys.items():
                found.setdefault((arm.name, budget), {})[item] = store.get(key) or {}
    finally:
        store.close()
    return found


def _asked(arms: Sequence[Arm], n_repeats: int, settings: Settings) -> BenchSettings:
    n_block = max(arm.policy.n_refresh for arm in arms)
    n_tokens = N_SETTLE + N_TURNS * (n_block + 1)
    n_prompt, budget = settings.length - n_tokens, arms[0].budget or 0
    n_budget = int(budget * n_prompt) if isinstance(budget, float) else budget
    if n_prompt <= n_budget:
        msg = (
            f"--length {settings.length} leaves {n_prompt} tokens of prompt beside the {n_tokens} "
            f"that are timed, the budget of {n_budget} would cut nothing; pass a greater --length"
        )
        raise EvalError(msg)
    return BenchSettings(
        model=settings.model,
        prompts=(n_prompt,),
        budgets=(n_budget,),
        policies=tuple(arm.name for arm in arms),
        threads=(settings.n_threads,),
        types_k=(settings.type_k,),
        types_v=(settings.type_v,),
        flash_attn=settings.flash_attn,
        n_tokens=n_tokens,
        n_block=n_block,
        repeats=n_repeats,
        full_cache=False,
        stock_lib=None,
        openvino=None,
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{NAME}: {text}\n")


def _turns(
    arms: Sequence[Arm], items: Sequence[Item], asked: BenchSettings
) -> dict[tuple[Arm, Item], Result]:
    asked.check()
    benchmark = Run(asked)
    benchmark.measure(lambda _: None, _say)
    ((_, sides),) = benchmark.measured
    results = {}
    for arm, side in zip(arms, sides, strict=True):
        if side.failed:
            msg = f"{arm.label}: {side.failed}"
            raise EvalError(msg)
        for item, repeat in zip(items, side.repeats, strict=True):
            results[arm, item] = {"turns": [round(turn_ms(turn), 4) for turn in repeat.turns]}
    return results
