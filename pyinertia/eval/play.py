"""What a model does with a prompt: answers it, or plays a given text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
from llama_cpp import llama_vocab_is_eog

from pyinertia.eval.sample import Sample
from pyinertia.llama import Llama

N_CUT = 2  # decode steps until the cache has its lasting size
N_TIMED = 8  # fewer steps than that tell no speed


def answer(
    llm: Llama, sample: Sample, done: Callable[[str], bool] = lambda text: False
) -> dict[str, Any]:
    """Answer greedily, until the model ends it, or `done` does.

    A continuation is played first, and the next prompt evaluated. The cache may have the start of
    the prompt.

    Returns:
        The answer (`tokens`, `text`), the mean of the seconds per token once cells were cut
        (`t_token`, None of too few), the cells in use at the end (`n_cells`), and the share of the
        facts' tokens among them (`kept`, None without facts).
    """
    tokens: list[int] = []
    steps: list[float] = []
    stream = _greedy(llm, sample)
    while True:
        start = time.perf_counter()
        token = next(stream, None)
        steps.append(time.perf_counter() - start)
        if token is None or llama_vocab_is_eog(llm._model.vocab, token):
            break
        tokens.append(token)
        if len(tokens) == sample.n_predict or done(text_of(llm, tokens)):
            break
    return {
        "tokens": tokens,
        "text": text_of(llm, tokens),
        "t_token": step_time(steps, llm.kv_policy.n_refresh),
        **cache(llm, sample),
    }


def _greedy(llm: Llama, sample: Sample) -> Iterator[int]:
    if not sample.continuation:
        yield from llm.generate(list(sample.prompt), temp=0.0)
        return
    for _ in teacher_forced(llm, sample):
        pass
    if sample.next_prompt:
        llm.eval(list(sample.next_prompt))
    while True:
        token = llm.sample(temp=0.0)
        yield token
        llm.eval([token])


def step_time(steps: Sequence[float], n_refresh: int) -> float | None:
    """Mean seconds of the decode steps after the cut, as many scored ones as belong to the others.

    Args:
        steps: Seconds to each token; the first is the prompt's.
        n_refresh: Steps of which one is scored.

    Returns:
        The mean over a multiple of n_refresh steps, None if there are fewer than N_TIMED.
    """
    # the first decode step sees the whole prompt, the second makes the cut
    later = steps[1 + N_CUT :]
    n = len(later) // n_refresh * n_refresh
    return round(fmean(later[:n]), 6) if n >= N_TIMED else None


def cache(llm: Llama, sample: Sample) -> dict[str, Any]:
    """The cells in use, and the share of the facts' tokens that are among them."""
    facts = [pos for start, end in sample.answer_spans for pos in range(start, end)]
    kept = float(np.isin(facts, llm.kv_cells()["pos"]).mean()) if facts else None
    return {"n_cells": llm.kv_stats().n_used, "kept": kept}


def text_of(llm: Llama, tokens: Sequence[int]) -> str:
    """Text of generated tokens."""
    return llm.detokenize(list(tokens)).decode(errors="replace")


def teacher_forced(llm: Llama, sample: Sample) -> Iterator[npt.NDArray[np.float32]]:
    """Play the prompt, whose start the cache may have, and its continuation token by token.

    Yields:
        Logits [n_vocab] for every token of the continuation, from all tokens before it.
    """
    with closing(llm.generate(list(sample.prompt), temp=0.0)) as stream:
        next(stream)
    for token in sample.continuation:
        yield np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).copy()
        llm.eval([token])
