"""Teacher forcing: jobs whose answers are given, in a batch and alone."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field, replace

import numpy as np
from helpers import kl, logits, positions

from pyinertia import KVPolicy, Llama, _native
from pyinertia.batch.schedule import Job, Outcome, Schedule, Settings
from pyinertia.batch.slots import Slots


@dataclass
class Answer:
    """What a job is to answer, and what the model would have: takes the place of its sampler."""

    tokens: list[int]
    logits: list[np.ndarray] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def close(self) -> None: ...


class ForcedSlots(Slots):
    """Slots that give the answers of `self.answers[seed]` instead of sampling."""

    def __init__(self, *args, answers: list[Answer], **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.answers, self.left = answers, []

    def sampler(self, seed: int, **settings) -> Answer:
        return self.answers[seed]

    def draw(self, sampler: Answer, row: int) -> int:
        sampler.logits.append(self.logits(row).copy())
        return sampler.tokens[len(sampler.logits) - 1]

    def leave(self, slot: int) -> int:
        cells = _native.cells(self.ctx, slot)
        self.left.append([] if cells is None else cells["pos"].tolist())
        return super().leave(slot)


def together(
    path,
    prompts: list[list[int]],
    answers: list[list[int]],
    *,
    share: bool = False,
    stop: tuple[str, ...] = (),
    **kwargs,
) -> tuple[list[Answer], list[Outcome]]:
    """Run the prompts through slots with the given answers; by prompt."""
    forced = [Answer(list(tokens)) for tokens in answers]
    outcomes = []
    with closing(ForcedSlots(path, answers=forced, **kwargs)) as slots:
        jobs = iter([Job(key=i, tokens=ids, seed=i, stop=stop) for i, ids in enumerate(prompts)])
        schedule = Schedule(slots, Settings(max_tokens=max(map(len, answers))))
        for outcome in schedule.run(lambda: next(jobs, None), share=share):
            outcomes.append(outcome)
            if not outcome.error:
                forced[outcome.job.key].positions = slots.left[-1]
    return forced, sorted(outcomes, key=lambda outcome: outcome.job.key)


def alone(path, prompt: list[int], answer: list[int], policy: KVPolicy | None, **kwargs) -> Answer:
    """The same in a `Llama` of its own."""
    if policy is not None:
        policy = replace(policy, prefill="bounded")
    with closing(Llama(str(path), kv_policy=policy, verbose=False, **kwargs)) as llm:
        out = Answer(list(answer))
        llm.eval(prompt)
        out.logits.append(logits(llm))
        for token in answer[:-1]:
            llm.eval([token])
            out.logits.append(logits(llm))
        out.positions = positions(llm)
    return out


def mean_kl(answer: Answer, reference: Answer) -> float:
    assert len(answer.logits) == len(reference.logits)
    pairs = zip(reference.logits, answer.logits, strict=True)
    return float(np.mean([kl(p, q) for p, q in pairs]))
