"""What a cache with an engine holds, in plain Python: llama-kv-evict.h, written a second time.

`Sequence` is one sequence: its cells, how far it has come, and what a batch makes leave. It knows
nothing of cell indices, graphs or buffers. Which cells a cut takes is known as far as the scores
are: `Cut.gone` names them, or is None where only their number and the eligible ones are.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pyinertia import KVPolicy

PROMPT, FIRST, DECODE = "prompt", "first", "decode"


@dataclass
class Cut:
    """What leaves before a batch: n of the eligible positions, and which."""

    n: int = 0
    eligible: set[int] = field(default_factory=set)
    gone: set[int] | None = None


@dataclass
class Sequence:
    """One sequence of a cache with n_cells cells for each."""

    policy: KVPolicy
    n_cells: int
    protected: list[tuple[int, int]]  # shared by all sequences
    tokens: dict[int, int] = field(default_factory=dict)  # position -> token
    phase: str = PROMPT
    n_prompt: int = -1  # announced tokens of a prompt, -1: none were
    n_probe: int = 0  # announced tokens of a probe
    n_spare: int = 0  # cells that are left free for probes
    generated: set[int] = field(default_factory=set)  # positions that decode steps brought
    known: set[int] = field(default_factory=set)  # positions at the last settle()
    batch: set[int] = field(default_factory=set)  # positions of the batch since then
    before: tuple[str, int] = (PROMPT, 0)  # the phase and n_spare that it found

    @property
    def n_next(self) -> int:
        """Where the next token goes."""
        return max(self.tokens, default=-1) + 1

    def is_protected(self, pos: int) -> bool:
        ranges = [(0, self.policy.n_sink), *self.protected]
        return any(p0 <= pos < p1 for p0, p1 in ranges)

    def is_prompt(self, n_new: int) -> bool:
        if not self.tokens or self.n_probe:
            return True
        return self.n_prompt > 0 if self.n_prompt >= 0 else n_new > 1

    def begin(self, n_new: int, scores: dict[int, float] | None) -> Cut:
        """Begin a batch of n_new tokens; scores: those of all cells, None if not looked at."""
        self.before = self.phase, self.n_spare
        self.batch = set(range(self.n_next, self.n_next + n_new))
        if self.is_prompt(n_new):
            if self.phase != PROMPT or not (self.tokens or self.n_probe):
                self.n_spare = 0
            self.phase = PROMPT
        else:
            self.phase = FIRST if self.phase == PROMPT else DECODE
        if self.phase == FIRST:
            self.generated = set()
        return self.make_room(n_new, scores, self.phase == DECODE)

    def make_room(self, n_new: int, scores: dict[int, float] | None, is_decode: bool) -> Cut:
        if is_decode:
            n_budget = min(int(self.policy.n_budget), self.n_cells)
            most, target = n_budget - n_new, n_budget - max(n_new, self.policy.n_refresh)
            return self.cut(max(0, most), max(0, target), scores)
        if self.policy.prefill == "bounded" or self.phase == FIRST:
            n_spare = 0 if self.n_probe or self.phase == DECODE else self.n_spare
            n_room = max(0, self.n_cells - n_new - n_spare)
            return self.cut(n_room, n_room, scores)
        return Cut()

    def cut(self, most: int, target: int, scores: dict[int, float] | None) -> Cut:
        """Down to `target` cells if there are more than `most`."""
        n_used = len(self.tokens)
        recent = self.n_next - max(1, self.policy.n_recent)
        eligible = {p for p in self.tokens if p < recent and not self.is_protected(p)}
        if (
            not self.policy.evicts
            or n_used <= most
            or (self.phase != DECODE and n_used - len(eligible) > most)
        ):
            return Cut()
        n = min(len(eligible), n_used - target)
        # the ranking within a bounded prompt is not what the C interface shows
        has_ranks = self.phase == DECODE or self.policy.prefill == "full"
        if scores is None or not (has_ranks or self.policy.scorer in ("recency", "random")):
            return Cut(n, eligible)

        def rank(pos: int) -> tuple[bool, float, int]:
            outranks = self.policy.frozen and pos in self.generated
            return outranks, 0.0 if outranks else scores[pos], pos

        return Cut(n, eligible, set(sorted(eligible, key=rank)[:n]))

    def settle(self) -> None:
        """Take in the last batch: what the engine does first whenever it is called."""
        new = self.batch & self.tokens.keys()
        if self.batch and not new:
            self.phase, self.n_spare = self.before  # it failed, or was taken back: it has not been
        elif self.phase == PROMPT and self.n_prompt > 0 and not self.n_probe:
            self.n_prompt = max(0, self.n_prompt - len(new))
        if self.phase != PROMPT:
            self.generated |= new
        if not self.known & self.tokens.keys():
            self.phase = PROMPT  # other contents
        self.known, self.batch = set(self.tokens), set()

    def announce(self, n_tokens: int) -> None:
        """The next n_tokens are prompt."""
        self.settle()
        self.n_prompt, self.n_probe = n_tokens, 0

    def probe(self, n_tokens: int) -> bool:
        """The next n_tokens are a probe; 0 ends it."""
        self.settle()
        if self.policy.prefill != "bounded" or self.phase != PROMPT:
            return False
        self.n_probe = n_tokens
        self.n_spare = max(self.n_spare, n_tokens)
        return True

    def close_gaps(self, n_new: int, scores: dict[int, float] | None) -> Cut:
        """Make the room that n_new tokens need; the caller renumbers what is left."""
        self.settle()
        is_decode = self.phase != PROMPT and not self.is_prompt(n_new)
        if is_decode:
            self.phase = DECODE
        return self.make_room(n_new, scores, is_decode)

    def remove(self, positions: set[int]) -> None:
        for pos in positions & self.tokens.keys():
            del self.tokens[pos]
        self.generated -= positions
        self.known -= positions

    def renumber(self, new: dict[int, int]) -> None:
        """Position p becomes new[p], those that are not named stay."""
        self.tokens = {new.get(p, p): token for p, token in self.tokens.items()}
        for name in ("generated", "known", "batch"):
            setattr(self, name, {new.get(p, p) for p in getattr(self, name)})
