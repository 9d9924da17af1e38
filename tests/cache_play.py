"""Random calls of C on a context, and the model beside it."""

from __future__ import annotations

import copy
import ctypes
import random

import cache_state
import llama_cpp as lc
import numpy as np
from cache_model import PROMPT, Cut, Sequence
from first_layer import FirstLayer
from low_level import Context

from pyinertia import KVPolicy, _native

N_CELLS, N_OPS = 256, 14


class Play:
    """One sequence of calls on an empty context, and the model beside it."""

    def __init__(self, context: Context, rng: random.Random, first_layer: FirstLayer) -> None:
        self.context, self.rng, self.first_layer = context, rng, first_layer
        self.ctx, self.memory = context.ctx, lc.llama_get_memory(context.ctx)
        self.has_engine, self.n_seq = not context.refusal, len(context.n_past)
        self.calls: list[str] = []
        self.protected: list[tuple[int, int]] = []
        self.clear()

    def clear(self, data: bool = True) -> None:
        lc.llama_memory_clear(self.memory, data)
        _native.protect(self.ctx, [])
        self.protected.clear()
        policy = self.context.policy if self.has_engine else KVPolicy(scorer="none")
        n_cells = N_CELLS if self.has_engine else 10**6
        self.seqs = [Sequence(policy, n_cells, self.protected) for _ in range(self.n_seq)]
        for seq_id in range(self.n_seq):
            _native.prompt(self.ctx, seq_id, -1)
        self.saved: list[tuple[Sequence, bytes, bytes]] = []
        # llama.cpp applies these with the next batch
        self.has_shift = self.has_copy = self.is_shared = False

    def run(self) -> None:
        ops = [self.prompt] * 3 + [self.steps] * 6 + [self.abort] * 2 + [self.rm, self.cp] * 2
        ops += [self.keep_seq, self.shift, self.save, self.load, self.load, self.take_back]
        if self.has_engine:
            ops += [self.keep] * 2 + [self.protect, self.probe, self.close_gaps, self.look]
        for _ in range(N_OPS):
            self.rng.choice(ops)()
            self.check(self.rng.random() < 0.6)
        if self.rng.random() < 0.1:
            self.said("clear")
            self.clear(self.rng.random() < 0.5)
            self.prompt()
        self.steps()
        self.check(True)
        self.check_data()

    # what is there

    def said(self, call: str) -> None:
        self.calls.append(call)

    def pick(self) -> int:
        return self.rng.randrange(self.n_seq)

    def settle(self) -> None:
        for seq in self.seqs:
            seq.settle()

    def positions(self, seq_id: int) -> list[int]:
        if self.has_engine:
            self.settle()
            return self.context.positions(seq_id)
        return sorted(cache_state.parse(self.state(seq_id), seq_id)[0])

    def state(self, seq_id: int) -> bytes:
        size = lc.llama_state_seq_get_size(self.ctx, seq_id)
        data = (ctypes.c_uint8 * size)()
        assert lc.llama_state_seq_get_data(self.ctx, data, size, seq_id) == size
        return bytes(data)

    def scores(self, seq_id: int) -> dict[int, float] | None:
        if not self.has_engine or self.rng.random() < 0.3:
            return None
        self.settle()
        cells = self.context.cells(seq_id)
        assert np.isfinite(cells["score"]).all(), "a score is no number"
        return dict(zip(cells["pos"].tolist(), cells["score"].tolist(), strict=True))

    def check(self, fully: bool) -> None:
        """fully: the engine is asked, and takes in the last batch; else llama.cpp is."""
        for seq_id, seq in enumerate(self.seqs):
            ends = (
                lc.llama_memory_seq_pos_min(self.memory, seq_id),
                lc.llama_memory_seq_pos_max(self.memory, seq_id),
            )
            assert ends == (min(seq.tokens, default=-1), max(seq.tokens, default=-1)), seq_id
            if fully:
                assert self.positions(seq_id) == sorted(seq.tokens), f"cells of {seq_id}"
        if fully and self.has_engine:
            stats = self.context.stats()
            assert stats["n_used"] == sum(len(seq.tokens) for seq in self.seqs)
            assert stats["n_cells"] == self.n_seq * N_CELLS

    def check_data(self) -> None:
        """Whatever was moved, copied, rotated or loaded: K and V are still those of the token."""
        if self.has_shift or self.has_copy:
            return
        for seq_id, seq in enumerate(self.seqs):
            self.first_layer.check(seq.tokens, self.state(seq_id), seq_id)

    # batches

    def decode(self, sizes: dict[int, int], abort_at: int | None = None) -> None:
        """The tokens of one batch; abort_at: the call of the abort callback that says stop."""
        scores = {seq_id: self.scores(seq_id) for seq_id in sizes}
        self.settle()
        tokens = {s: [self.rng.randrange(256) for _ in range(n)] for s, n in sizes.items()}
        cuts = {s: self.seqs[s].begin(n, scores[s]) for s, n in sizes.items()}
        starts = {s: self.seqs[s].n_next for s in sizes}
        self.context.n_past[:] = [seq.n_next for seq in self.seqs]
        fits = all(
            len(self.seqs[s].tokens) - cuts[s].n + n <= self.seqs[s].n_cells
            for s, n in sizes.items()
        )
        n_calls = 0

        def stop(_) -> bool:
            nonlocal n_calls
            n_calls += 1
            return n_calls > (abort_at or 0)

        callback = lc.ggml_abort_callback(stop)
        if abort_at is not None:
            lc.llama_set_abort_callback(self.ctx, callback, None)
        code = self.context.try_decode(tokens)
        lc.llama_set_abort_callback(self.ctx, lc.ggml_abort_callback(), None)
        self.said(f"decode {sizes} abort {abort_at} -> {code}; cut {[c.n for c in cuts.values()]}")
        self.has_shift = self.has_copy = False
        allowed = {0} if abort_at is None else {0, 2}
        assert code in (allowed if fits else {1}), f"llama_decode returned {code}, fits: {fits}"
        for seq_id, cut in cuts.items():
            self.leave(seq_id, cut, starts[seq_id])
            new = dict(enumerate(tokens[seq_id], starts[seq_id]))
            if code == 2:  # micro-batches before the one that was aborted stay
                last = lc.llama_memory_seq_pos_max(self.memory, seq_id)
                new = {pos: token for pos, token in new.items() if pos <= last}
            self.seqs[seq_id].tokens |= new if code != 1 else {}
        if any(cut.n and cut.gone is None for cut in cuts.values()):
            self.settle()  # the engine was asked

    def leave(self, seq_id: int, cut: Cut, n_old: int) -> None:
        """Take a cut's cells out of the model; where the scores are unknown, look which left.

        n_old: where the positions of the batch begin.
        """
        seq = self.seqs[seq_id]
        gone = cut.gone
        if cut.n and gone is None:
            gone = seq.tokens.keys() - {p for p in self.context.positions(seq_id) if p < n_old}
            assert len(gone) == cut.n, f"{len(gone)} cells left sequence {seq_id}, not {cut.n}"
            assert gone <= cut.eligible, "a sink, recent or protected cell left"
        seq.remove(set(gone or ()))

    def prompt(self) -> None:
        seq_id, n = self.pick(), self.rng.randint(1, 100)
        if self.has_engine and self.rng.random() < 0.5:
            self.settle()
            self.seqs[seq_id].announce(n)
            _native.prompt(self.ctx, seq_id, n)
            self.said(f"prompt {seq_id} {n}")
            if n > 1 and self.rng.random() < 0.3:
                self.decode({seq_id: n // 2})
                n -= n // 2
        self.decode({seq_id: n})

    def steps(self) -> None:
        for _ in range(self.rng.randint(1, 6)):
            some = self.rng.sample(range(self.n_seq), self.rng.randint(1, self.n_seq))
            self.decode({seq_id: self.rng.choice([1, 1, 1, 2]) for seq_id in sorted(some)})

    def abort(self) -> None:
        if self.has_shift:
            return  # llama.cpp would rotate keys of some layers twice
        some = self.rng.sample(range(self.n_seq), self.rng.randint(1, self.n_seq))
        n = self.rng.choice([1, 1, 2, 90])
        self.decode(dict.fromkeys(sorted(some), n), abort_at=self.rng.randrange(80))

    def probe(self) -> None:
        seq_id, n = self.pick(), self.rng.randint(1, 8)
        expected = self.seqs[seq_id].probe(n)
        self.settle()
        assert _native.probe(self.ctx, seq_id, n) == expected
        self.said(f"probe {seq_id} {n} -> {expected}")
        if expected:
            at = self.seqs[seq_id].n_next
            self.decode({seq_id: n})
            self.settle()
            self.seqs[seq_id].probe(0)
            _native.probe(self.ctx, seq_id, 0)
            lc.llama_memory_seq_rm(self.memory, seq_id, at, -1)
            self.seqs[seq_id].remove({p for p in self.seqs[seq_id].tokens if p >= at})

    # llama.cpp's own calls

    def rm(self) -> None:
        seq_id = self.pick()
        p0 = self.rng.choice([-1, 0, self.rng.randrange(150)])
        p1 = self.rng.choice([-1, p0 + self.rng.randrange(40)])
        self.said(f"seq_rm {seq_id} {p0} {p1}")
        assert lc.llama_memory_seq_rm(self.memory, seq_id, p0, p1)
        end = p1 if p1 >= 0 else 10**9
        self.seqs[seq_id].remove({p for p in self.seqs[seq_id].tokens if p0 <= p < end})

    def take_back(self) -> None:
        """The newest tokens, as speculative decoding does."""
        seq_id = self.pick()
        at = max(0, self.seqs[seq_id].n_next - self.rng.randint(1, 3))
        self.said(f"seq_rm {seq_id} {at} -1")
        assert lc.llama_memory_seq_rm(self.memory, seq_id, at, -1)
        self.seqs[seq_id].remove({p for p in self.seqs[seq_id].tokens if p >= at})

    def cp(self) -> None:
        source, target = self.pick(), self.pick()
        if source == target:
            return
        if not self.has_engine:  # in one stream cells are shared; the target has none of its own
            lc.llama_memory_seq_rm(self.memory, target, -1, -1)
        self.said(f"seq_cp {source} {target}")
        lc.llama_memory_seq_cp(self.memory, source, target, -1, -1)
        before = self.seqs[target]
        self.seqs[target] = copy.deepcopy(self.seqs[source])
        self.seqs[target].protected = self.protected
        self.seqs[target].n_prompt, self.seqs[target].n_probe = before.n_prompt, before.n_probe
        self.has_copy |= self.has_engine
        self.is_shared |= not self.has_engine

    def keep_seq(self) -> None:
        """A stream has cells of one sequence: nothing to leave. Without streams, all others."""
        seq_id = self.pick()
        self.said(f"seq_keep {seq_id}")
        lc.llama_memory_seq_keep(self.memory, seq_id)
        if not self.has_engine:
            for other in self.seqs:
                if other is not self.seqs[seq_id]:
                    other.remove(set(other.tokens))

    def shift(self) -> None:
        """Drop some, move the rest down, as llama.cpp's servers do."""
        seq_id = self.pick()
        seq = self.seqs[seq_id]
        p0 = self.rng.randrange(100)
        p1 = p0 + self.rng.randint(1, 40)
        if self.is_shared or not any(p >= p1 for p in seq.tokens):
            return
        self.said(f"seq_rm and seq_add {seq_id} {p0} {p1}")
        assert lc.llama_memory_seq_rm(self.memory, seq_id, p0, p1)
        lc.llama_memory_seq_add(self.memory, seq_id, p1, -1, p0 - p1)
        seq.remove({p for p in seq.tokens if p0 <= p < p1})
        seq.renumber({p: p + p0 - p1 for p in {*seq.tokens, *seq.batch} if p >= p1})
        self.has_shift = True

    def save(self) -> None:
        if self.has_shift or self.has_copy:
            return  # llama.cpp would save K and V as they are before these are applied
        seq_id = self.pick()
        if not self.seqs[seq_id].tokens:
            return  # loading it would leave llama.cpp's cells as they are
        self.settle()
        self.said(f"save {seq_id}")
        engine = _native.get_state(self.ctx, seq_id)
        self.saved.append((copy.deepcopy(self.seqs[seq_id]), self.state(seq_id), engine))

    def load(self) -> None:
        if not self.saved or self.has_shift or self.has_copy:
            return
        seq_id, (seq, cells, engine) = self.pick(), self.rng.choice(self.saved)
        forgets = self.rng.random() < 0.3
        self.said(f"load {seq_id}" + (" without the engine" if forgets else ""))
        data = (ctypes.c_uint8 * len(cells)).from_buffer_copy(cells)
        assert lc.llama_state_seq_set_data(self.ctx, data, len(cells), seq_id) == len(cells)
        self.seqs[seq_id] = copy.deepcopy(seq)
        self.seqs[seq_id].protected = self.protected
        if self.has_engine:
            self.settle()
            reason = _native.set_state(self.ctx, seq_id, b"" if forgets else engine)
            assert reason == "", reason
            if forgets:
                fresh = self.seqs[seq_id]
                fresh.phase, fresh.n_prompt, fresh.n_spare = PROMPT, -1, 0
                fresh.generated = set()

    # the engine's calls

    def look(self) -> None:
        self.scores(self.pick())

    def keep(self) -> None:
        seq_id = self.pick()
        seq = self.seqs[seq_id]
        kept = {p for p in seq.tokens if self.rng.random() < 0.7}
        given = kept | ({10**6} if self.rng.random() < 0.1 else set())
        self.settle()
        n = _native.keep(self.ctx, seq_id, np.array(sorted(given), np.int32))
        self.said(f"keep {seq_id} {len(given)} -> {n}")
        if given - kept:
            assert n == -2
            return
        gone = seq.tokens.keys() - kept - {max(seq.tokens, default=-1)}
        assert n == len(gone)
        seq.remove(gone)
        seq.settle()

    def protect(self) -> None:
        if self.rng.random() < 0.3:
            self.protected.clear()
            _native.load().llama_kv_evict_unprotect(self.ctx)
            self.said("unprotect")
            return
        p0 = self.rng.randrange(80)
        p1 = p0 + self.rng.randint(1, 12)
        policy = self.context.policy
        ranges = [*self.protected, (p0, p1), (0, policy.n_sink)]
        n = len({p for a, b in ranges for p in range(a, b)})
        fits = n + max(1, policy.n_recent) + policy.n_refresh <= policy.n_budget
        assert _native.load().llama_kv_evict_protect(self.ctx, p0, p1) == fits
        self.said(f"protect {p0} {p1} -> {fits}")
        if fits:
            self.protected.append((p0, p1))

    def close_gaps(self) -> None:
        seq_id, n_new = self.pick(), self.rng.choice([0, 1, 1, 5])
        seq = self.seqs[seq_id]
        if self.has_copy or not seq.tokens or (self.n_seq > 1 and self.protected):
            return
        scores = self.scores(seq_id)
        self.settle()
        cut = seq.close_gaps(n_new, scores)
        old = _native.close_gaps(self.ctx, seq_id, n_new)
        self.said(f"close_gaps {seq_id} {n_new}; cut {cut.n}")
        if cut.n and cut.gone is None:
            assert len(old) == len(seq.tokens) - cut.n
            gone = seq.tokens.keys() - set(old.tolist())
            assert gone <= cut.eligible
            seq.remove(gone)
        else:
            seq.remove(set(cut.gone or ()))
            assert old.tolist() == sorted(seq.tokens)

        def moved(pos: int) -> int:
            return int(np.searchsorted(old, pos)) + max(0, pos - int(old[-1]) - 1)

        seq.renumber({int(p): i for i, p in enumerate(old)})
        ranges = [(moved(p0), moved(p1)) for p0, p1 in self.protected]
        self.protected[:] = [(p0, p1) for p0, p1 in ranges if p0 < p1]
        self.has_shift = False
