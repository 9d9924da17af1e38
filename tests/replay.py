"""The same cells without an engine: what a `Llama` under a policy evaluated, in its parent."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

import llama_cpp
from helpers import HolesLlama, positions


class Step(NamedTuple):
    """One call of eval: the position of its first token, its tokens, the positions they saw."""

    n_past: int
    tokens: list[int]
    resident: list[int]


class Recording(HolesLlama):
    """Remembers its steps. Its cells stay where they are, so a replay is the same, bit for bit."""

    def __init__(self, *args, **kwargs) -> None:
        self.steps: list[Step] = []
        super().__init__(*args, **kwargs)

    def eval(self, tokens) -> None:
        n_past = self.n_tokens
        super().eval(tokens)
        seen = self.input_ids[n_past : self.n_tokens].tolist()
        self.steps.append(Step(n_past, seen, positions(self)))


def replay(path, steps: list[Step], **kwargs) -> Iterator[llama_cpp.Llama]:
    """Evaluate the steps in a `llama_cpp.Llama` from which the same positions are removed.

    Yields it after every step.
    """
    with closing(llama_cpp.Llama(str(path), verbose=False, **kwargs)) as llm:
        held: set[int] = set()
        for n_past, tokens, resident in steps:
            for pos in held - set(resident):
                llama_cpp.llama_memory_seq_rm(llm._ctx.memory, 0, pos, pos + 1)
            llm.n_tokens = n_past  # what is beyond leaves when it evaluates
            llm.eval(tokens)
            held = set(resident)
            yield llm
