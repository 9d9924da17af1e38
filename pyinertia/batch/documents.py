"""`summarise`: documents of any length through one context."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from pyinertia.batch.arguments import (
    check_count,
    check_counts,
    check_items,
    check_policy,
    check_stop,
    split_keywords,
)
from pyinertia.batch.generate import share_prefix
from pyinertia.batch.schedule import Job, Outcome, Schedule
from pyinertia.batch.slots import Slots
from pyinertia.batch.text import Message, encode, split
from pyinertia.policy import KVPolicy

INSTRUCTION = (
    "Summarise this text in a few plain sentences. "
    "Keep the names, the numbers and what was decided."
)
GAP = "\n\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """What became of a document.

    Attributes:
        index: Which document, from 0.
        text: The summary.
        finish_reason: "stop" (the model ended it, or a stop string), "length" (max_tokens), or
            "error".
        n_tokens: Tokens of the document.
        n_parts: Parts that the document was read in; 1 is in one go.
        n_levels: How often summaries were summarised: 0 in one go, 1 for those of the parts, ...
        n_prompt: Tokens of all prompts it took, instructions and summaries of parts included.
        n_generated: Tokens of all answers it took.
        n_evicted: Tokens of prompts and answers that had left the cache when each of them ended.
        seconds: From reading the document to the summary, waiting for slots included.
        error: What went wrong, "" if nothing did.
    """

    index: int
    text: str
    finish_reason: str
    n_tokens: int
    n_parts: int
    n_levels: int
    n_prompt: int
    n_generated: int
    n_evicted: int
    seconds: float
    error: str


class Numbered(Iterator[tuple[int, Any]]):
    """Documents with numbers of their own, which give their indices and their seeds.

    `next` may raise StopIteration to say that there is none now, and give one later; a run ends
    when there is none and no document is being worked on.
    """


def summarise(
    documents: Iterable[str] | Numbered,
    *,
    model: str | os.PathLike[str],
    instruction: str = INSTRUCTION,
    n_part: int | None = None,
    n_parallel: int = 8,
    kv_policy: str | KVPolicy | None = "inertiakv",
    kv_budget: int | None = None,
    kv_refresh: int | None = None,
    n_ctx: int = 0,
    max_tokens: int = 256,
    stop: str | Sequence[str] = (),
    temperature: float = 0.2,
    seed: int = 0,
    **kwargs: Any,
) -> Iterator[Summary]:
    """Summarise documents, n_parallel of them (or of their parts) at a time in one context.

    The instruction stands before the document, where it is evaluated once for all and never
    evicted, and once more behind it. A document that fits n_ctx is read in one go. A longer one is
    split where paragraphs or sentences end; its parts are summarised, then the summaries together,
    as often as it takes.

    With a policy that evicts, reading in one go is a bounded prefill: a slot has n_budget + n_batch
    cells, and before each batch the cells that the text so far valued least leave. Memory does not
    grow, but details that seemed unimportant when they were read are lost, the more the longer
    the document is beside the budget. A larger `kv_budget`, or a smaller `n_part` (more summaries
    of less text), keeps more; `n_evicted` of the result says how much left.

    A document that cannot be summarised (empty, not a text) gives a summary with an error and
    disturbs no other. If `documents` raises, those read before are finished first.

    Args:
        documents: Texts, which count from 0 unless they are `Numbered`; read only as far as slots
            are free.
        model: Path to the GGUF file, a model with a chat format. It is loaded when the first
            result is asked for, and freed with the last one, or when the iterator is closed.
        instruction: What is wanted, in the language it is wanted in.
        n_part: Most tokens of a document, or a part of one, that is read in one go. None: as many
            as fit n_ctx.
        n_parallel: Most documents or parts at a time, in [1, 256].
        kv_policy: As in `pyinertia.Llama`. None keeps everything, in n_ctx cells per slot.
        kv_budget: Most cells of a prompt once it is in. Replaces the policy's n_budget.
        kv_refresh: As in `pyinertia.Llama`.
        n_ctx: Most tokens of a prompt and its answer, 0 for as many as the model was trained for.
        max_tokens: Most tokens of a summary, those of parts included.
        stop: Texts that end a summary; they are not part of it.
        temperature: 0 takes the likeliest token.
        seed: Document i is sampled with seed + i.
        **kwargs: As in `generate_many`; repeat_penalty is 1.1 unless it is given.

    Returns:
        An iterator of summaries, in the order in which they are done.

    Raises:
        TypeError: An argument is unknown, or of the wrong kind.
        ValueError: An argument is out of range, or n_ctx has no room for an instruction, two
            summaries of max_tokens and a third.
        PolicyError: The policy does not exist, cannot run on this model, or has no room for the
            instruction.
        ModelError: The model file is missing or cannot be read.
        RuntimeError: llama.cpp cannot evaluate what the prompts have in common.
    """
    check_policy(kv_policy, kv_budget, kv_refresh)
    n_most = check_counts(n_parallel, n_ctx, max_tokens, seed)
    settings, load = split_keywords(n_most, temperature, {"repeat_penalty": 1.1, **kwargs})
    stops = check_stop(stop)
    items = documents if isinstance(documents, Numbered) else check_items("documents", documents)
    if not isinstance(instruction, str) or not instruction.strip():
        msg = f"instruction={instruction!r} must be a text that is not empty"
        raise ValueError(msg)
    if n_part is not None and check_count("n_part", n_part, 1) < 2 * n_most:
        msg = (
            f"max_tokens={max_tokens}, n_part={n_part}: a part must have room for two summaries; "
            "pass a smaller max_tokens, or a larger n_part"
        )
        raise ValueError(msg)

    def run() -> Iterator[Summary]:
        with closing(
            Slots(
                model,
                n_parallel=n_parallel,
                kv_policy=kv_policy,
                kv_budget=kv_budget,
                kv_refresh=kv_refresh,
                n_ctx=n_ctx,
                **load,
            )
        ) as slots:
            desk = Desk(slots, items, instruction, n_part, n_most, stops, seed)
            for outcome in Schedule(slots, settings).run(desk.next_job):
                summary = desk.take(outcome)
                if summary is not None:
                    yield summary

    return run()


@dataclass(slots=True)
class Document:
    """A document on the way to its summary."""

    index: int
    n_tokens: int = 0
    n_parts: int = 0
    n_levels: int = 0
    n_prompt: int = 0
    n_generated: int = 0
    n_evicted: int = 0
    start: float = field(default_factory=time.perf_counter)
    answers: list[str | None] = field(default_factory=list)  # of the parts of this level
    is_done: bool = False


class Desk:
    """Hands out documents and parts as jobs, and puts their answers together."""

    def __init__(
        self,
        slots: Slots,
        documents: Iterable[str] | Numbered,
        instruction: str,
        n_part: int | None,
        max_tokens: int,
        stop: tuple[str, ...],
        seed: int,
    ) -> None:
        self.slots, self.instruction, self.stop, self.seed = slots, instruction, stop, seed
        self.documents = documents if isinstance(documents, Numbered) else enumerate(documents)
        self.queue: deque[Job] = deque()
        n_frame = len(encode(slots, self._chat("a")).ids)
        # a split may move the tokens at its ends
        n_room = slots.n_positions - n_frame - max_tokens - 8
        if n_room < 2 * max_tokens:
            msg = (
                f"n_ctx={slots.n_positions} has no room for an instruction of {n_frame} tokens, "
                f"two summaries to join and their summary, max_tokens={max_tokens} each; pass a "
                "smaller max_tokens, or a larger n_ctx"
            )
            raise ValueError(msg)
        self.n_part = min(n_room, n_part or n_room)
        share_prefix(slots, self._chat)

    def _chat(self, text: str) -> list[Message]:
        content = f"{self.instruction}{GAP}{text}{GAP}{self.instruction}"
        return [{"role": "user", "content": content}]

    def _count(self, text: str) -> int:
        return len(self.slots.tokenize(text.encode(), add_bos=False))

    def next_job(self) -> Job | None:
        """Return a part that waits, else the next document."""
        if not self.queue:
            index, text = next(self.documents, (-1, ""))
            if index < 0:
                return None
            self._open(index, text)
        return self.queue.popleft()

    def _open(self, index: int, text: Any) -> None:
        document = Document(index)
        if not isinstance(text, str) or not text.strip():
            what = "empty" if isinstance(text, str) else f"a {type(text).__name__}"
            error = f"the document is {what}; it must be a text"
            self.queue.append(Job(key=(document, 0), error=error))
            return
        error = self._read(document, text)
        document.n_parts = len(document.answers)
        if error:
            self._drop(document)
            self.queue.append(Job(key=(document, 0), error=error))

    def _read(self, document: Document, text: str) -> str:
        """Queue the parts of a text; returns why they cannot be read, "" if they can."""
        try:
            self._queue(document, text)
        except (TypeError, ValueError) as error:  # a lone surrogate, or the template refuses it
            return f"the document cannot be read: {error}"
        return ""

    def _drop(self, document: Document) -> None:
        self.queue = deque(job for job in self.queue if job.key[0] is not document)

    def _queue(self, document: Document, text: str) -> None:
        document.n_tokens = document.n_tokens or self._count(text)
        parts = [part for part in split(text, self.n_part, self._count) if part.strip()]
        document.answers = [None] * len(parts)
        seed = self.seed + document.index
        for i, part in enumerate(parts):
            tokens = encode(self.slots, self._chat(part.strip()))
            job = Job(key=(document, i), tokens=tokens.ids, stop=self.stop + tokens.stop, seed=seed)
            self.queue.append(job)

    def _read_answers(self, document: Document) -> str:
        """Queue what was said about the parts; returns why that leads nowhere, "" if it does."""
        n_before = len(document.answers)
        together = GAP.join(answer for answer in document.answers if answer)
        if not together:
            return "the model had nothing to say about any part of the document"
        document.n_levels += 1
        error = self._read(document, together)
        if not error and len(document.answers) >= n_before:
            return (
                f"the summaries of its {n_before} parts do not fit fewer parts; pass a smaller "
                "max_tokens, or a larger n_part"
            )
        return error

    def take(self, outcome: Outcome) -> Summary | None:
        """Take in an answer; returns the summary of a document that is done."""
        document, i = outcome.job.key
        document.n_prompt += outcome.n_prompt
        document.n_generated += outcome.n_generated
        document.n_evicted += outcome.n_evicted
        text, error = outcome.text.strip(), outcome.error
        if document.is_done:  # by the error of another part
            return None
        if not error and len(document.answers) > 1:
            document.answers[i] = text
            if None in document.answers:
                return None
            error = self._read_answers(document)
            if not error:
                return None
        document.is_done = True
        self._drop(document)
        return Summary(
            index=document.index,
            text="" if error else text,
            finish_reason="error" if error else outcome.finish_reason,
            n_tokens=document.n_tokens,
            n_parts=document.n_parts,
            n_levels=document.n_levels,
            n_prompt=document.n_prompt,
            n_generated=document.n_generated,
            n_evicted=document.n_evicted,
            seconds=time.perf_counter() - document.start,
            error=error,
        )
