"""What the eviction engine did so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class KVStats:
    """A snapshot of the engine's counters. Counters start again when the cache is empty.

    Attributes:
        n_cells: Cells allocated, all streams.
        n_used: Cells in use.
        n_tokens: Tokens that were sent to the cache.
        n_evicted: Cells that were evicted.
        n_evictions: Cuts that evicted at least one cell.
        n_refreshes: Decode queries that were scored.
        n_moved: Cells that were moved by compaction.
        n_reused: Graphs that were reused, since the context was created.
        kv_bytes: Bytes allocated for K and V, a sliding window's cache included.
        kv_bytes_used: Bytes of the cells in use.
        kv_bytes_resident: Bytes in physical memory, whole pages. After the first cut the pages
            above the budget go back to the system. Equals kv_bytes where this cannot be told
            (other systems than Linux, other devices than the CPU).
        t_score_ms: Scoring, in milliseconds: the op on the CPU plus the time rules; under
            scorer="attention" and heads="mean" the rules alone once a sequence was cut, the op is
            part of attention then. NaN where the op cannot be timed.
        t_evict_ms: Choosing and removing cells, in milliseconds.
        t_move_ms: Compaction, in milliseconds.
    """

    n_cells: int
    n_used: int
    n_tokens: int
    n_evicted: int
    n_evictions: int
    n_refreshes: int
    n_moved: int
    n_reused: int
    kv_bytes: int
    kv_bytes_used: int
    kv_bytes_resident: int
    t_score_ms: float
    t_evict_ms: float
    t_move_ms: float
