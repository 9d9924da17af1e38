"""LangChain's llama.cpp classes, with `pyinertia.Llama` as their model."""

from __future__ import annotations

import inspect
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, model_validator
from typing_extensions import Self

from pyinertia.binding import LlamaGrammar, llama_cpp
from pyinertia.llama import Llama
from pyinertia.policy import KVPolicy

try:
    from langchain_community.chat_models import llamacpp as chats
    from langchain_community.llms import llamacpp as texts
except ModuleNotFoundError as error:
    msg = f"LangChain's classes need {error.name}; pip install 'pyinertia[langchain]'"
    raise ModuleNotFoundError(msg, name=error.name) from error

OURS = [name for name in inspect.signature(Llama).parameters if name.startswith("kv_")]
KEYWORDS = {*inspect.signature(llama_cpp.Llama).parameters, *OURS} - {"model_path", "kwargs"}


class _Model(BaseModel):
    """What both classes have beside LangChain's fields, and where they make their model."""

    client: Any = None
    model_path: str = ""
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    grammar: Any = None
    grammar_path: Any = None

    kv_policy: str | InstanceOf[KVPolicy] | None = None
    kv_budget: int | float | None = None
    kv_refresh: int | None = None
    kv_prefill: str | None = None
    kv_reuse: str = "append"
    kv_positions: str = "keep"

    n_batch: int = 512  # LangChain's 8 are from days when a batch was never larger
    # 0 is what the model was trained with; LangChain's are what the first Llama was
    rope_freq_base: float = 0.0
    rope_freq_scale: float = 0.0

    def _opened(self) -> Self:
        if self.grammar and self.grammar_path:
            msg = "grammar and grammar_path say the same; pass one of them"
            raise ValueError(msg)
        if self.grammar_path:
            self.grammar = LlamaGrammar.from_file(self.grammar_path)
        elif isinstance(self.grammar, str):
            self.grammar = LlamaGrammar.from_string(self.grammar)
        if self.client is None:
            if not self.model_path:
                msg = "pass model_path=FILE, or a Llama that is open as client="
                raise ValueError(msg)
            self.client = Llama(self.model_path, **self._keywords())
        elif given := {*self.model_kwargs, *self.model_fields_set & {"model_path", *KEYWORDS}}:
            msg = f"{', '.join(sorted(given))}: the client is loaded already; pass them to it"
            raise ValueError(msg)
        return self

    def _keywords(self) -> dict[str, Any]:
        # None is LangChain's word for llama-cpp-python's own default
        values = {name: getattr(self, name) for name in KEYWORDS & type(self).model_fields.keys()}
        given = {name: value for name, value in values.items() if value is not None}
        return {**given, **self.model_kwargs}


class ChatLlamaCpp(_Model, chats.ChatLlamaCpp):
    """`langchain_community.chat_models.ChatLlamaCpp` on a cache that evicts.

    Its fields are those of the parent and kv_policy, kv_budget, kv_refresh, kv_prefill, kv_reuse
    and kv_positions of `pyinertia.Llama`; n_batch is 512, and the RoPE is the model's, unless they
    are given. Further keywords of `Llama` go to model_kwargs. `client` is the `Llama`; one that is
    open already may be passed in its place.
    """

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="after")
    def validate_environment(self) -> Self:
        """Load the model; the parent's validator of this name would load another."""
        return self._opened()


class LlamaCpp(_Model, texts.LlamaCpp):
    """`langchain_community.llms.LlamaCpp` on a cache that evicts; see `ChatLlamaCpp`."""

    @classmethod
    def validate_environment(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Load nothing yet, in place of the parent's validator, which comes before all fields."""
        return values

    @model_validator(mode="after")
    def load_model(self) -> Self:
        """Load the model."""
        return self._opened()
