"""llama.cpp's own calls on a context with an engine: what a user of the C interface does."""

from __future__ import annotations

from collections.abc import Callable

import llama_cpp as lc
import numpy as np

from pyinertia import KVPolicy, _native


class Context:
    """A context for n_seq sequences with an engine attached."""

    def __init__(
        self,
        model,
        policy: KVPolicy,
        n_seq: int = 1,
        unified: bool = False,
        compact: bool = True,
        n_ctx: int = 512,
        n_ubatch: int = 512,
        n_threads: int = 1,
        type_k: int = 0,
        watch: Callable[[int], None] | None = None,
    ) -> None:
        """n_ctx: per sequence; watch(tensor) is called for every node that is computed."""
        self.policy = policy
        params = lc.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = n_ctx * n_seq, n_seq, unified
        params.n_threads = params.n_threads_batch = n_threads
        params.n_ubatch = n_ubatch
        # f32: batched and alone agree but for rounding
        params.type_k, params.type_v = type_k, 0
        if watch:
            self.watch = lc.ggml_backend_sched_eval_callback(lambda t, ask, _: watch(t) or not ask)
            params.cb_eval = self.watch
        self.ctx = lc.llama_init_from_model(model, params)
        self.n_past = [0] * n_seq
        self.refusal = _native.attach(self.ctx, policy, compact)

    def announce(self, seq_id: int, n_tokens: int) -> None:
        _native.prompt(self.ctx, seq_id, n_tokens)

    def decode(self, ids: dict[int, list[int]], expected: int = 0) -> None:
        code = self.try_decode(ids)
        assert code == expected

    def try_decode(self, ids: dict[int, list[int]]) -> int:
        """Decode tokens of some sequences; returns llama.cpp's code, 0 if it went well."""
        n = sum(map(len, ids.values()))
        batch = lc.llama_batch_init(n, 0, 1)
        for seq_id, values in ids.items():
            for token in values:
                i = batch.n_tokens
                batch.token[i], batch.pos[i] = token, self.n_past[seq_id]
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
                batch.logits[i] = True
                batch.n_tokens += 1
                self.n_past[seq_id] += 1
        code = lc.llama_decode(self.ctx, batch)
        lc.llama_batch_free(batch)
        if code:
            for seq_id, values in ids.items():
                self.n_past[seq_id] -= len(values)
        return code

    def cells(self, seq_id: int) -> np.ndarray:
        return _native.cells(self.ctx, seq_id)

    def positions(self, seq_id: int = 0) -> list[int]:
        return self.cells(seq_id)["pos"].tolist()

    def stats(self) -> dict:
        return _native.stats(self.ctx)
