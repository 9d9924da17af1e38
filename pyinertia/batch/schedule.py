"""What runs when: jobs enter slots, their prompts go in by chunks, all others decode meanwhile.

A step is: free slots take new jobs; each prompt that is not in yet enters by one chunk of at most
n_batch tokens; all sequences whose prompts are in decode one token in one call; those that are
done leave.

When llama_decode fails (no free cells, or an error), nothing is lost: a chunk is halved and tried
again, a decode call is halved by sequences. What fails alone ends with an error of its own, the
others go on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from pyinertia.batch.slots import Slots, explain
from pyinertia.batch.text import common_prefix

SEED_END = 2**32 - 1  # llama.cpp takes this one for "a random seed"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A prompt to be continued.

    Attributes:
        key: Returned with the outcome.
        tokens: The prompt.
        stop: Texts that end the answer.
        seed: Seed of its sampler.
        error: Why there is no prompt; the job then ends at once.
    """

    key: Any
    tokens: list[int] = field(default_factory=list)
    stop: tuple[str, ...] = ()
    seed: int = 0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a job ended; see `pyinertia.batch.Completion` for the fields."""

    job: Job
    text: str = ""
    finish_reason: str = "error"
    n_prompt: int = 0
    n_generated: int = 0
    n_kept: int = 0
    n_evicted: int = 0
    seconds: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all jobs of a run share: most tokens of an answer, and the sampler's settings."""

    max_tokens: int
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Clock:
    """Where the time of a run went: tokens and seconds of the calls, sampling included."""

    n_prompt: int = 0
    t_prompt: float = 0.0
    n_decode: int = 0
    t_decode: float = 0.0


class _Sequence:
    """A job in a slot."""

    def __init__(self, job: Job, slot: int, slots: Slots, settings: Settings) -> None:
        self.job, self.slot = job, slot
        self.start = time.perf_counter()
        self.n_past = slots.enter(slot, job.tokens)
        self.n_most = min(settings.max_tokens, slots.n_positions - len(job.tokens))
        self.sampler = slots.sampler(job.seed % SEED_END, **settings.sampling)
        self.stop = [text.encode() for text in job.stop]
        self.generated: list[int] = []
        self.answer = b""
        self.finish_reason = ""
        self.error = ""

    @property
    def in_prompt(self) -> bool:
        return self.n_past < len(self.job.tokens)

    def take(self, token: int, is_end: bool, piece: bytes) -> None:
        """Take in a sampled token."""
        if is_end:
            self.finish_reason = "stop"
            return
        self.generated.append(token)
        n_old = len(self.answer)
        self.answer += piece
        found = [self.answer.find(text, max(0, n_old - len(text))) for text in self.stop]
        if any(i >= 0 for i in found):
            self.answer = self.answer[: min(i for i in found if i >= 0)]
            self.finish_reason = "stop"
        elif len(self.generated) >= self.n_most:
            self.finish_reason = "length"

    def close(self) -> None:
        self.sampler.close()  # type: ignore[no-untyped-call]

    def fail(self, code: int) -> None:
        self.finish_reason = "error"
        self.error = f"token {self.n_past + 1} cannot be evaluated: {explain(code)}"

    def outcome(self, n_kept: int) -> Outcome:
        return Outcome(
            job=self.job,
            text=self.answer.decode("utf-8", errors="ignore"),
            finish_reason=self.finish_reason,
            n_prompt=len(self.job.tokens),
            n_generated=len(self.generated),
            n_kept=n_kept,
            n_evicted=self.n_past - n_kept,
            seconds=time.perf_counter() - self.start,
            error=self.error,
        )


class _Source:
    """Where jobs come from; after an exception there are no more."""

    def __init__(self, next_job: Callable[[], Job | None]) -> None:
        self.next_job = next_job
        self.failure: Exception | None = None

    def next(self) -> Job | None:
        if self.failure is not None:
            return None
        try:
            return self.next_job()
        except Exception as error:  # raised again when what runs is done
            self.failure = error
            return None


class Schedule:
    """Runs jobs through the slots of a context."""

    def __init__(self, slots: Slots, settings: Settings) -> None:
        """Raises ValueError if the sampler cannot be made of the settings."""
        self.slots, self.settings = slots, settings
        slots.sampler(0, **settings.sampling).close()  # type: ignore[no-untyped-call]
        self.clock = Clock()
        self._running: list[_Sequence] = []
        self._pieces: dict[int, bytes] = {}

    def run(self, next_job: Callable[[], Job | None], share: bool = False) -> Iterator[Outcome]:
        """Yield the outcomes in the order in which jobs end.

        Args:
            next_job: Called when a slot is free; None is "none now". The run ends when there is
                none and all slots are empty. If it raises, those that run are finished first.
            share: Evaluate once what the first jobs have in common.
        """
        source = _Source(next_job)
        try:
            while True:
                jobs: list[Job] = []
                while len(self._running) + len(jobs) < self.slots.n_parallel:
                    job = source.next()
                    if job is None:
                        break
                    if error := job.error or self._refusal(job):
                        yield Outcome(job=job, n_prompt=len(job.tokens), error=error)
                    else:
                        jobs.append(job)
                if share and len(jobs) > 1:
                    self._share(jobs)
                share = False
                for job in jobs:
                    self._enter(job)
                if not self._running:
                    break
                self._close_gaps()
                self._step()
                for sequence in [one for one in self._running if one.finish_reason]:
                    yield self._leave(sequence)
        finally:
            for sequence in self._running:
                sequence.close()
        if source.failure is not None:
            raise source.failure

    def _refusal(self, job: Job) -> str:
        n_tokens, n_positions = len(job.tokens), self.slots.n_positions
        if not n_tokens:
            return "the prompt has no tokens"
        if n_tokens < n_positions:
            return ""
        return (
            f"the prompt has {n_tokens} tokens, which leaves no room for an answer in n_ctx="
            f"{n_positions} positions; shorten it, or pass a larger n_ctx if the model allows it"
        )

    def _share(self, jobs: list[Job]) -> None:
        tokens = common_prefix(job.tokens for job in jobs)
        policy = self.slots.kv_policy
        # what nobody named must not crowd out the prompts themselves
        n_room = (int(policy.n_budget) - policy.n_least) // 2 if policy.evicts else len(tokens)
        self.slots.share(tokens, max(0, n_room))

    def _enter(self, job: Job) -> None:
        taken = {sequence.slot for sequence in self._running}
        slot = next(slot for slot in range(self.slots.n_parallel) if slot not in taken)
        self._running.append(_Sequence(job, slot, self.slots, self.settings))

    def _close_gaps(self) -> None:
        # llama.cpp evaluates a gap between slots as two batches, at the price of two
        free = set(range(self.slots.n_parallel)) - {one.slot for one in self._running}
        for sequence in sorted(self._running, key=lambda one: -one.slot):
            target = min(free, default=sequence.slot)
            n_left = len(sequence.job.tokens) - sequence.n_past
            if target >= sequence.slot or not self.slots.move(sequence.slot, target, n_left):
                return
            free ^= {sequence.slot, target}
            sequence.slot = target

    def _leave(self, sequence: _Sequence) -> Outcome:
        self._running.remove(sequence)
        sequence.close()
        return sequence.outcome(self.slots.leave(sequence.slot))

    def _step(self) -> None:
        for sequence in [one for one in self._running if one.in_prompt]:
            start = time.perf_counter()
            self.clock.n_prompt += self._prefill(sequence)
            self.clock.t_prompt += time.perf_counter() - start
        start = time.perf_counter()
        ready = [one for one in self._running if not one.in_prompt and not one.finish_reason]
        self.clock.n_decode += self._decode(ready)
        self.clock.t_decode += time.perf_counter() - start

    def _prefill(self, sequence: _Sequence) -> int:
        tokens, slot, n_past = sequence.job.tokens, sequence.slot, sequence.n_past
        # up to where the chunk would end without a shared prefix, so that the cuts are the same
        n_batch = self.slots.n_batch
        n_tokens = min(n_batch - n_past % n_batch, len(tokens) - n_past)
        while code := self.slots.evaluate(
            {slot: tokens[n_past : n_past + n_tokens]}, {slot: n_past}
        ):
            if n_tokens == 1:
                sequence.fail(code)
                return 0
            n_tokens //= 2
        sequence.n_past += n_tokens
        if not sequence.in_prompt:
            self._sample(sequence, n_tokens - 1)
        return n_tokens

    def _decode(self, sequences: list[_Sequence]) -> int:
        if not sequences:
            return 0
        sequences = sorted(sequences, key=lambda sequence: sequence.slot)
        tokens = {one.slot: one.generated[-1:] for one in sequences}
        code = self.slots.evaluate(tokens, {one.slot: one.n_past for one in sequences})
        if code and len(sequences) == 1:
            sequences[0].fail(code)
            return 0
        if code:
            half = len(sequences) // 2
            return self._decode(sequences[:half]) + self._decode(sequences[half:])
        for row, sequence in enumerate(sequences):
            sequence.n_past += 1
            self._sample(sequence, row)
        return len(sequences)

    def _sample(self, sequence: _Sequence, row: int) -> None:
        token = self.slots.draw(sequence.sampler, row)
        is_end = self.slots.is_end(token)
        sequence.take(token, is_end, b"" if is_end else self._piece(token))

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            self._pieces[token] = self.slots.piece(token)
        return self._pieces[token]
