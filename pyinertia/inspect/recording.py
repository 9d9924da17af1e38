"""One run of a model, and the cells that were resident after its decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pyinertia.inspect.pieces import Piece, pieces

if TYPE_CHECKING:
    from pyinertia.llama import Llama

N_STEPS = 256  # most steps that a recording shows
N_CELLS = 2_000_000  # most cells in all of them together: a page has a byte for each


@dataclass(frozen=True, kw_only=True)
class Step:
    """The cache after a decode step.

    Attributes:
        n_decoded: Generated tokens that the model has read; 0 after the prompt alone.
        n_tokens: Tokens that it has read, the prompt's included: positions 0 ... n_tokens - 1.
        cells: [n_resident], pos (int32) and score (float32), by position.
        t_decode: Seconds that all decode steps took so far.
    """

    n_decoded: int
    n_tokens: int
    cells: npt.NDArray[np.void]
    t_decode: float


@dataclass(frozen=True, kw_only=True)
class Recording:
    """A prompt, its answer and what stayed of both.

    Attributes:
        model: The model's name.
        policy: The policy's name.
        budget: Most cells that stay, or a share of the prompt; None if nothing leaves.
        n_sink: First positions, which never leave.
        n_recent: Newest positions, which never leave.
        protected: Half-open ranges of positions that never leave: those of a system prompt, say.
        prefill: "full" or "bounded".
        tokens: All that the model has read; the answer begins at n_prompt.
        pieces: The same as text, a piece for one token or several.
        steps: The first is that after the prompt, then every `every`-th one, and the last.
        t_prompt: Seconds until the first token of the answer.
        end: "stop" (the model was done), "length" (n_predict), "context" (no position was left) or
            "interrupted".
    """

    model: str
    policy: str
    budget: int | float | None
    n_sink: int
    n_recent: int
    protected: Sequence[tuple[int, int]]
    prefill: str
    n_prompt: int
    tokens: Sequence[int]
    pieces: Sequence[Piece]
    steps: Sequence[Step]
    every: int
    t_prompt: float
    end: str

    def lost_at(self) -> npt.NDArray[np.int32]:
        """The index of the first step that lacks a position, -1 for those that stay: [n_tokens]."""
        lost = np.full(len(self.tokens), -1, np.int32)
        for i, step in enumerate(self.steps):
            gone = lost[: step.n_tokens] < 0
            gone[step.cells["pos"]] = False
            lost[: step.n_tokens][gone] = i
        return lost

    def speeds(self) -> list[float]:
        """Tokens per second from the step before to this one; NaN for the first: [n_steps]."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [
            float("nan"),
            *((b.n_decoded - a.n_decoded) / max(b.t_decode - a.t_decode, 1e-9) for a, b in pairs),
        ]


@dataclass
class _Film:
    """Steps; where they would become too many, every other one is left out from then on."""

    every: int = 1
    steps: list[Step] = field(default_factory=list)
    _n_cells: int = 0

    def take(self, step: Step, last: bool = False) -> None:
        if step.n_decoded % self.every and not last:
            return
        self.steps.append(step)
        self._n_cells += len(step.cells)
        while len(self.steps) > 2 and (len(self.steps) > N_STEPS or self._n_cells > N_CELLS):
            self.every *= 2
            self.steps = [
                s for s in self.steps if s.n_decoded % self.every == 0 or (last and s is step)
            ]
            self._n_cells = sum(len(s.cells) for s in self.steps)


def record(
    llm: Llama,
    prompt: Sequence[int],
    n_predict: int,
    *,
    model: str,
    policy: str,
    told: Callable[[int], None] = lambda n_decoded: None,
    **sampling: Any,
) -> Recording:
    """Run a prompt, decode, and look at the cache after each step.

    Args:
        llm: The model, with its policy.
        prompt: Tokens, at least one, fewer than n_ctx.
        n_predict: Most decode steps, -1 for as many as the model wants.
        model: Its name.
        policy: The name of its policy.
        told: Called after every step.
        **sampling: As for `Llama.generate`.

    Raises:
        ValueError: The prompt is empty or longer than n_ctx.
        KeyboardInterrupt: It came before the first step; later ones end the recording.
    """
    import llama_cpp

    film, answer, end = _Film(), list[int](), ""
    t_prompt = t_decode = 0.0
    step: Step | None = None
    start = perf_counter()
    try:
        with closing(llm.generate(prompt, **sampling)) as stream:
            for token in stream:
                # the token is chosen, and not in the cache yet
                seconds = perf_counter() - start
                if step is None:
                    t_prompt = seconds
                else:
                    t_decode += seconds
                if llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
                    end = "stop"
                elif len(answer) == n_predict:
                    end = "length"
                elif llm.n_tokens >= llm._n_ctx - 1:
                    end = "context"
                step = Step(
                    n_decoded=len(answer),
                    n_tokens=llm.n_tokens,
                    cells=_cells(llm),
                    t_decode=t_decode,
                )
                film.take(step, last=bool(end))
                told(len(answer))
                if end:
                    break
                answer.append(token)
                start = perf_counter()
    except KeyboardInterrupt:
        if step is None:
            raise
        end = "interrupted"
        if film.steps[-1] is not step:
            film.take(step, last=True)
    if not film.steps or step is None:
        msg = "the model ended before it said a token"
        raise ValueError(msg)
    tokens = [*prompt, *answer][: step.n_tokens]
    kept = llm.kv_policy
    return Recording(
        model=model,
        policy=policy,
        budget=kept.n_budget if kept.evicts else None,
        n_sink=kept.n_sink,
        n_recent=kept.n_recent,
        protected=list(llm._kv_ranges),
        prefill=kept.prefill,
        n_prompt=len(prompt),
        tokens=tokens,
        pieces=pieces(llm, tokens, len(prompt)),
        steps=film.steps,
        every=film.every,
        t_prompt=t_prompt,
        end=end,
    )


def _cells(llm: Llama) -> npt.NDArray[np.void]:
    """The resident cells; all of them where there is no engine, without scores."""
    if not llm._kv_refusal:
        return llm.kv_cells()
    cells = np.zeros(llm.n_tokens, [("pos", np.int32), ("score", np.float32)])
    cells["pos"] = np.arange(llm.n_tokens)
    return cells
