"""The model behind the plugin of `llm`: loaded as `pyinertia run` does, and counting."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from pyinertia.bench.machine import n_cpus
from pyinertia.cli.options import KVOptions
from pyinertia.errors import PolicyError
from pyinertia.llama import Llama

SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "repeat_penalty": 1.0}


class PromptedLlama(Llama):
    """A model that counts the tokens of its last prompt and answer.

    Attributes:
        n_prompt: Tokens of the prompt, those in the cache before included.
        n_answer: Tokens of the answer.
    """

    n_prompt = n_answer = 0

    def generate(
        self, tokens: Sequence[int], *args: Any, **kwargs: Any
    ) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens, see `pyinertia.Llama.generate`, and count them."""
        self.n_prompt, self.n_answer = len(tokens), 0
        with closing(super().generate(tokens, *args, **kwargs)) as stream:
            for token in stream:
                self.n_answer += not self._is_end(token)
                yield token

    def answer(
        self, messages: Sequence[Mapping[str, str]], **settings: Any
    ) -> Generator[str, None, None]:
        """Answer a chat in pieces of text.

        Args:
            messages: The whole chat, the new message last.
            **settings: Those of `create_chat_completion`, where they are not `SAMPLING`.
        """
        if self._kv_closes:  # without an end of positions an answer needs one of its own
            settings.setdefault("max_tokens", self.n_ctx())
        chunks = self.create_chat_completion(messages, stream=True, **{**SAMPLING, **settings})
        with closing(chunks):
            for chunk in chunks:
                yield chunk["choices"][0]["delta"].get("content") or ""

    def kept_and_evicted(self) -> dict[str, int]:
        """How many tokens of prompt and answer the cache has, and how many it no longer has."""
        cached = self._cached()
        n_kept = cached.positions.size
        return {"kv_tokens_kept": n_kept, "kv_tokens_evicted": cached.tokens.size - n_kept}


def load(
    path: str,
    *,
    kv_budget: int | float | None = None,
    kv_positions: str | None = None,
    n_threads: int | None = None,
    **options: Any,
) -> PromptedLlama:
    """Load a model as `pyinertia run` does.

    Args:
        path: Of the GGUF file.
        kv_budget: As in `Llama`.
        kv_positions: As in `Llama`. None: renumbered when they are used up, if the model can.
        n_threads: Threads. None: as many as CPUs.
        **options: Further keywords of `Llama`.

    Raises:
        PyInertiaError: They do not go together, or the model cannot be read.
    """
    of_kv = {name: options.pop(name) for name in list(options) if name.startswith("kv_")}
    budget = None if kv_budget is None else str(kv_budget)
    policy = KVOptions(kv_budget=budget, **of_kv).policy()
    threads = n_threads or n_cpus()
    defaults = {"n_ctx": 0, "flash_attn": True, "swa_full": False, "verbose": False}
    keywords = {**defaults, "n_threads": threads, "n_threads_batch": threads, **options}
    if kv_positions or not policy.evicts:
        kv_positions = kv_positions or "keep"
        return PromptedLlama(path, kv_policy=policy, kv_positions=kv_positions, **keywords)
    try:
        return PromptedLlama(path, kv_policy=policy, kv_positions="compact", **keywords)
    except PolicyError:  # this model cannot; another reason comes up again
        return PromptedLlama(path, kv_policy=policy, **keywords)
