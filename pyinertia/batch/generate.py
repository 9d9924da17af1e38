"""`generate_many`: many prompts through one context."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from pyinertia.batch.arguments import (
    check_counts,
    check_items,
    check_policy,
    check_stop,
    split_keywords,
)
from pyinertia.batch.schedule import Job, Outcome, Schedule
from pyinertia.batch.slots import Slots
from pyinertia.batch.text import Prompt, check_prompt, common_prefix, encode
from pyinertia.policy import KVPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What became of a prompt.

    Attributes:
        index: Which prompt, from 0.
        text: The answer, as far as it got.
        finish_reason: "stop" (the model ended it, or a stop string), "length" (max_tokens, or the
            last position), or "error".
        n_prompt: Tokens of the prompt, a shared prefix included.
        n_generated: Tokens of the answer.
        n_kept: Cells that were there when it ended.
        n_evicted: Tokens of prompt and answer that had left the cache by then. The last token of
            an answer that was not ended by the model never enters.
        seconds: From entering a slot to the end.
        error: What went wrong, "" if nothing did.
    """

    index: int
    text: str
    finish_reason: str
    n_prompt: int
    n_generated: int
    n_kept: int
    n_evicted: int
    seconds: float
    error: str


def generate_many(
    prompts: Iterable[Prompt],
    *,
    model: str | os.PathLike[str],
    n_parallel: int = 8,
    kv_policy: str | KVPolicy | None = "inertiakv",
    kv_budget: int | None = None,
    kv_refresh: int | None = None,
    n_ctx: int = 0,
    prefix: Prompt | None = None,
    max_tokens: int | None = 256,
    stop: str | Sequence[str] = (),
    temperature: float = 0.8,
    seed: int = 0,
    **kwargs: Any,
) -> Iterator[Completion]:
    """Continue many prompts, n_parallel of them at a time in one context.

    A prompt that is done makes room for the next one at once; while that one enters, n_batch
    tokens a step, the others decode. With a policy that evicts, a slot has n_budget + n_batch cells
    and the prefill is bounded: memory does not depend on the prompts' lengths, but a prompt that
    outgrows the slot is cut while it enters, blind to what its end asks (see
    docs/how-to/long-prompt.md). With kv_policy=None every slot has n_ctx cells and nothing is ever
    evicted.

    What the prompts begin with in common is evaluated once and never evicted.

    A prompt that cannot be served (empty, too long, not a prompt) gives a completion with an error
    and disturbs no other. If `prompts` raises, the prompts read before are finished first.

    Args:
        prompts: Texts, or lists of chat messages in the format of the model; read only as far as
            slots are free.
        model: Path to the GGUF file. It is loaded when the first result is asked for, and freed
            with the last one, or when the iterator is closed.
        n_parallel: Most prompts at a time, in [1, 256].
        kv_policy: As in `pyinertia.Llama`. None keeps everything.
        kv_budget: Most cells of a prompt once it is in. Replaces the policy's n_budget.
        kv_refresh: As in `pyinertia.Llama`.
        n_ctx: Most tokens of a prompt and its answer, 0 for as many as the model was trained for.
        prefix: Text or messages that stand before every prompt. None: what the first n_parallel
            prompts have in common is shared, as far as it fits half of the budget.
        max_tokens: Most tokens of an answer. None: up to n_ctx.
        stop: Texts that end an answer; they are not part of it.
        temperature: 0 takes the likeliest token.
        seed: Prompt i is sampled with seed + i.
        **kwargs: Further sampling settings of `Llama.create_completion` (top_k, top_p, min_p,
            typical_p, repeat_penalty, frequency_penalty, presence_penalty, mirostat_mode,
            mirostat_tau, mirostat_eta, grammar), and further keywords of `pyinertia.Llama`
            (n_batch, n_threads, flash_attn, type_k, n_gpu_layers, chat_format, ...).

    Returns:
        An iterator of completions, in the order in which they end.

    Raises:
        TypeError: An argument is unknown, or of the wrong kind.
        ValueError: An argument is out of range.
        PolicyError: The policy does not exist, cannot run on this model, or has no room for the
            prefix.
        ModelError: The model file is missing or cannot be read.
        RuntimeError: llama.cpp cannot evaluate what the prompts have in common.
    """
    check_policy(kv_policy, kv_budget, kv_refresh)
    n_most = check_counts(n_parallel, n_ctx, max_tokens, seed)
    settings, load = split_keywords(n_most, temperature, kwargs)
    stops, items = check_stop(stop), check_items("prompts", prompts)
    if prefix is not None:
        check_prompt("prefix", prefix)

    def run() -> Iterator[Completion]:
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
            if prefix is not None:
                share_prefix(slots, partial(_probe, prefix), prefix)
            numbered = enumerate(items)

            def next_job() -> Job | None:
                index, prompt = next(numbered, (-1, None))
                return None if index < 0 else _make_job(slots, index, prompt, prefix, stops, seed)

            schedule = Schedule(slots, settings)
            for outcome in schedule.run(next_job, share=prefix is None):
                yield _completion(outcome)

    return run()


def _completion(outcome: Outcome) -> Completion:
    return Completion(
        index=outcome.job.key,
        **{
            name: getattr(outcome, name)
            for name in Completion.__dataclass_fields__
            if name != "index"
        },
    )


def _make_job(
    slots: Slots, index: int, prompt: Any, prefix: Prompt | None, stop: tuple[str, ...], seed: int
) -> Job:
    try:
        tokens = encode(slots, prompt, prefix)
    except (TypeError, ValueError) as error:
        return Job(key=index, error=str(error))
    return Job(key=index, tokens=tokens.ids, stop=stop + tokens.stop, seed=seed + index)


def _probe(prefix: Prompt, text: str) -> Prompt:
    return text if isinstance(prefix, str) else [{"role": "user", "content": text}]


def share_prefix(
    slots: Slots, make_prompt: Callable[[str], Prompt], prefix: Prompt | None = None
) -> None:
    """Evaluate once what prompts have in common, whatever their text is."""
    prompts = [encode(slots, make_prompt(text), prefix).ids for text in ("a", "\n", "1")]
    slots.share(common_prefix(prompts))
