"""From raw repeats to numbers: a value per repeat, and per cell their median and range."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from statistics import mean, median
from typing import Any

from pyinertia.bench.settings import N_SETTLE
from pyinertia.bench.sides import STOCK, Repeat, Side


def summarise(
    sides: Sequence[Side], weight_bytes: int, bandwidth: float | None
) -> list[dict[str, Any]]:
    """Return what is known of every side of a group, in the form of the JSON file."""
    return [
        {
            **asdict(side.spec),
            "failed": side.failed,
            "summary": _cells(side, sides, weight_bytes, bandwidth),
            "repeats": [asdict(repeat) for repeat in side.repeats],
        }
        for side in sides
    ]


def _cells(
    side: Side, sides: Sequence[Side], weight_bytes: int, bandwidth: float | None
) -> dict[str, dict[str, float] | None]:
    cells = {
        name: _cell(value(repeat, side.spec.n_prompt) for repeat in side.repeats)
        for name, value in METRICS.items()
    }
    for name, ratio in RATIOS.items():
        rivals = (other.repeats for other in sides if _is_rival(name, side, other))
        pairs = zip(side.repeats, next(rivals, []), strict=False)
        cells[name] = _cell(ratio(ours, theirs) for ours, theirs in pairs)
    memory = next((repeat.stats for repeat in reversed(side.repeats) if repeat.stats), {})
    for name in ("rss_peak", "kv_bytes", "kv_bytes_resident", "kv_bytes_used"):
        cells[name] = _cell([memory.get(name)])
    decode, cells["bandwidth_share"] = cells["decode_ms"], None
    # how OpenVINO stores the weights is not known
    if bandwidth and decode and "kv_bytes_used" in memory and side.spec.kind != "openvino":
        least_ms = 1e3 * (weight_bytes + memory["kv_bytes_used"]) / bandwidth
        cells["bandwidth_share"] = _cell([least_ms / ms for ms in decode.values()])
    return cells


def turn_ms(turn: list[float]) -> float:
    """Milliseconds per token of a turn; its first token pays for the side before it."""
    return mean(turn[1:])


def decode_ms(repeat: Repeat, _: int) -> float | None:
    """Milliseconds per token: the median over turns."""
    return median(map(turn_ms, repeat.turns)) if repeat.turns else None


def decode_per_second(repeat: Repeat, n_prompt: int) -> float | None:
    """Tokens per second."""
    ms = decode_ms(repeat, n_prompt)
    return 1e3 / ms if ms else None


def first_token_s(repeat: Repeat, _: int) -> float | None:
    """Seconds from the first batch of the prompt to the logits behind the last."""
    # once the prompt is through, its statistics were asked for
    return sum(repeat.prefill) / 1e3 if repeat.prompt_stats else None


def prefill_per_second(repeat: Repeat, n_prompt: int) -> float | None:
    """Tokens of the prompt per second."""
    seconds = first_token_s(repeat, n_prompt)
    return n_prompt / seconds if seconds else None


def cut_ms(repeat: Repeat, n_prompt: int) -> float | None:
    """What the step with the first cut takes beyond an ordinary one.

    The first decode query still sees every cell; the cut is made before the second.
    """
    ms = decode_ms(repeat, n_prompt)
    first = repeat.prompt_stats.get("n_evicted") == 0 and repeat.stats.get("n_evicted", 1) > 0
    return repeat.settle[1] - ms if first and ms and len(repeat.settle) == N_SETTLE else None


def _decode_ratio(ours: Repeat, theirs: Repeat) -> float | None:
    pairs = list(zip(ours.turns, theirs.turns, strict=False))
    return median(turn_ms(b) / turn_ms(a) for a, b in pairs) if pairs else None


def _prefill_ratio(ours: Repeat, theirs: Repeat) -> float | None:
    if not ours.prompt_stats or len(ours.prefill) != len(theirs.prefill):
        return None
    return median(b / a for a, b in zip(ours.prefill, theirs.prefill, strict=True))


METRICS: dict[str, Callable[[Repeat, int], float | None]] = {
    "decode_ms": decode_ms,
    "decode_per_second": decode_per_second,
    "prefill_per_second": prefill_per_second,
    "first_token_s": first_token_s,
    "cut_ms": cut_ms,
}
RATIOS: dict[str, Callable[[Repeat, Repeat], float | None]] = {
    "x_stock": _decode_ratio,
    "x_stock_at_budget": _decode_ratio,
    "x_stock_prefill": _prefill_ratio,
}


def _is_rival(ratio: str, side: Side, other: Side) -> bool:
    if ratio == "x_stock_at_budget":
        budget = other.spec.budget
        return other.spec.kind == "stock" and budget is not None and budget == side.spec.budget
    same_prompt = other.spec.n_prompt == side.spec.n_prompt
    return other.spec.name == STOCK and (same_prompt or ratio != "x_stock_prefill")


def _cell(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"median": median(known), "min": min(known), "max": max(known)} if known else None
