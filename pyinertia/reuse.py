"""Which part of the cache a new prompt reuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

KV_REUSES = ("append", "strict", "lossy")


@dataclass
class Closed:
    """The tokens behind positions that were renumbered: more of them than positions.

    Attributes:
        tokens: Every token up to the last renumbering, evicted ones included.
        n_pos: Positions that stand for them now.
        n_whole: Leading tokens of which nothing had been evicted then.
    """

    tokens: list[int] = field(default_factory=list)
    n_pos: int = 0
    n_whole: int = 0


@dataclass(frozen=True)
class Cached:
    """What a cache holds.

    Attributes:
        tokens: int [n]. Every token it stands for, evicted ones included.
        positions: int32 [n_resident]. The resident positions, ascending.
        n_tokens: The next position.
        closed: The tokens of renumbered positions.
        pos_min: The first position that the sliding window's own cache still holds.
        n_swa: Size of the sliding window, 0 if there is none.
    """

    tokens: npt.NDArray[np.intc]
    positions: npt.NDArray[np.int32]
    n_tokens: int
    closed: Closed
    pos_min: int = 0
    n_swa: int = 0

    @property
    def n_whole(self) -> int:
        """Leading tokens of which nothing was evicted."""
        n = n_in_place(self.positions)
        return min(n, self.closed.n_whole) if self.closed.tokens else n

    def position(self, n: int) -> int:
        """The position after the first n tokens."""
        n_closed = len(self.closed.tokens)
        return n if n < n_closed else n - n_closed + self.closed.n_pos

    def n_resumable(self, n: int) -> int:
        """The most of the first n tokens whose last one is resident, whatever else is missing."""
        pos = self.position(n)
        before = self.positions[self.positions < pos]
        n_last = n - (pos - int(before[-1]) - 1) if before.size else 0
        return n_last if n_last > len(self.closed.tokens) else min(n, self.n_whole)

    def can_continue(self, n: int) -> bool:
        """Whether the cache can go on after its first n tokens, all later ones removed."""
        pos = self.position(n)
        if self.n_whole < n < len(self.closed.tokens):
            return False
        # llama.cpp wants the next position to follow the newest one
        if pos == 0 or pos - 1 not in self.positions:
            return False
        return pos == self.n_tokens or self.pos_min <= max(0, pos - self.n_swa)


def n_in_place(positions: npt.NDArray[np.int32]) -> int:
    """Return how many of the leading positions are 0, 1, ..."""
    return n_shared(positions, np.arange(positions.size, dtype=np.int32))


def n_shared(a: npt.NDArray[np.intc], b: npt.NDArray[np.intc]) -> int:
    """Return the length of the common prefix."""
    n = min(a.size, b.size)
    return int(np.argmin(np.append(a[:n] == b[:n], False)))


def n_reused(
    cached: Cached, prompt: Sequence[int], kv_reuse: str = "append", has_logits: bool = False
) -> int:
    """Return how many leading tokens of the prompt need no evaluation.

    Args:
        cached: What the cache holds.
        prompt: The whole prompt.
        kv_reuse: "append": all tokens if the prompt continues them, else those before the departure
            that are whole. "strict": nothing once anything was evicted. "lossy": all before the
            departure, whatever was evicted of them.
        has_logits: Whether the logits of the newest cached token can be sampled from.
    """
    n_cached, n_whole = cached.tokens.size, cached.n_whole
    n = n_shared(cached.tokens, np.asarray(prompt, np.intc))
    if n == len(prompt) and not (n == n_cached and has_logits):
        n -= 1  # the last token is due again, for its logits
    # a restored prompt: its last token sees again what it saw
    is_again = n == n_cached - 1 == len(prompt) - 1 and cached.can_continue(n)
    if n_whole < n_cached:
        if kv_reuse == "strict":
            return 0
        if kv_reuse == "lossy":
            n = cached.n_resumable(n)
        elif n < n_cached and not is_again:
            n = min(n, n_whole)
    return n if cached.can_continue(n) else 0
