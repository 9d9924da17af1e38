"""The model behind the plugin of `llm`: loaded as `pyinertia run` does, and counting."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import Any

from pyinertia.bench.machine import n_cpus
from pyinertia.cli import memory
from pyinertia.cli.options import KVOptions
from pyinertia.errors import PolicyError
from pyinertia.llama import Llama


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
        """Answer a chat in pieces of text; settings are those of `create_chat_completion`."""
        unread = messages[-1:] if self.n_tokens else messages
        n_new = sum(len(self.tokenize(one["content"].encode())) for one in unread)
        memory.name_question(self, messages[-1]["content"], n_new)
        if self._kv_closes and settings.get("max_tokens") is None:
            settings["max_tokens"] = self.n_ctx()  # without an end of positions it needs its own
        chunks = self.create_chat_completion(messages, stream=True, **settings)
        with closing(chunks):
            for chunk in chunks:
                yield chunk["choices"][0]["delta"].get("content") or ""

    def kept_and_evicted(self) -> dict[str, int]:
        """How many tokens of prompt and answer the cache has, and how many it no longer has."""
        cached = self._cached()
        n_kept = cached.positions.size
        return {"kv_tokens_kept": n_kept, "kv_tokens_evicted": cached.tokens.size - n_kept}


def load(path: str, keywords: Mapping[str, Any]) -> PromptedLlama:
    """Load a model; positions are renumbered when they are used up, where it can.

    Args:
        path: Of the GGUF file.
        keywords: The plugin's options.

    Raises:
        PyInertiaError: They do not go together, or the model cannot be read.
    """
    others = {name: value for name, value in keywords.items() if not name.startswith("kv_")}
    threads = others.pop("n_threads") or n_cpus()
    others |= {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    budget = keywords["kv_budget"]
    policy = KVOptions(
        kv_policy=keywords["kv_policy"],
        kv_budget=None if budget is None else str(budget),
        kv_refresh=keywords["kv_refresh"],
        kv_prefill=keywords["kv_prefill"],
    ).policy()
    positions = keywords["kv_positions"]
    if positions or not policy.evicts:
        return PromptedLlama(path, kv_policy=policy, kv_positions=positions or "keep", **others)
    try:
        return PromptedLlama(path, kv_policy=policy, kv_positions="compact", **others)
    except PolicyError:  # this model cannot; another reason comes up again
        return PromptedLlama(path, kv_policy=policy, **others)
