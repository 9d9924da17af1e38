"""llama-index's `LlamaCPP`, with `pyinertia.Llama` as its model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pyinertia.llama import Llama
from pyinertia.policy import KVPolicy

try:
    from llama_index.core.base.llms import types
    from llama_index.core.bridge.pydantic import PrivateAttr
    from llama_index.core.constants import (
        DEFAULT_CONTEXT_WINDOW,
        DEFAULT_NUM_OUTPUTS,
        DEFAULT_TEMPERATURE,
    )
    from llama_index.core.llms.callbacks import llm_chat_callback
    from llama_index.core.utils import get_cache_dir
    from llama_index.llms.llama_cpp import LlamaCPP as Parent
except ModuleNotFoundError as error:
    msg = f"llama-index's class needs {error.name}; pip install 'pyinertia[llama-index]'"
    raise ModuleNotFoundError(msg, name=error.name) from error


class LlamaCPP(Parent):
    """`llama_index.llms.llama_cpp.LlamaCPP` on a cache that evicts.

    Chats are rendered by the model's own template, unless messages_to_prompt is given: then the
    system message never leaves, and a turn is appended to those before it.
    """

    _renders: bool = PrivateAttr(default=False)

    def __init__(
        self,
        *,
        model_path: str | None = None,
        model_url: str | None = None,
        temperature: float = DEFAULT_TEMPERATURE,
        max_new_tokens: int = DEFAULT_NUM_OUTPUTS,
        context_window: int = DEFAULT_CONTEXT_WINDOW,
        generate_kwargs: dict[str, Any] | None = None,
        model_kwargs: dict[str, Any] | None = None,
        verbose: bool = True,
        messages_to_prompt: Callable[[Sequence[types.ChatMessage]], str] | None = None,
        kv_policy: str | KVPolicy | None = None,
        kv_budget: int | float | None = None,
        kv_refresh: int | None = None,
        kv_prefill: str | None = None,
        kv_reuse: str = "append",
        kv_positions: str = "keep",
        **kwargs: Any,
    ) -> None:
        """Load a model.

        Args:
            model_path: Path to the GGUF file.
            model_url: Where to fetch it from, once, if there is no model_path.
            temperature: 0 takes the likeliest token.
            max_new_tokens: Most tokens of an answer.
            context_window: n_ctx of `Llama`.
            generate_kwargs: Further keywords of its completions.
            model_kwargs: Further keywords of `Llama`.
            verbose: Show llama.cpp's own log.
            messages_to_prompt: Renders chats in place of the model's template.
            kv_policy: This and the following as in `pyinertia.Llama`.
            kv_budget: ...
            kv_refresh: ...
            kv_prefill: ...
            kv_reuse: ...
            kv_positions: ...
            **kwargs: Further fields of llama-index's class, such as system_prompt.

        Raises:
            ValueError: There is no model_path and no model_url.
            PolicyError, ModelError, TypeError: As in `pyinertia.Llama`.
        """
        if model_path is None and model_url is None:
            msg = "name the model: model_path=FILE, or model_url=URL"
            raise ValueError(msg)
        llama_keywords = {
            "n_ctx": context_window,
            "verbose": verbose,
            "kv_policy": kv_policy,
            "kv_budget": kv_budget,
            "kv_refresh": kv_refresh,
            "kv_prefill": kv_prefill,
            "kv_reuse": kv_reuse,
            "kv_positions": kv_positions,
            **(model_kwargs or {}),
        }
        path = model_path or self._fetched(str(model_url))
        model = Llama(path, **llama_keywords)
        # the parent's constructor would load llama-cpp-python's class
        super(Parent, self).__init__(
            model_path=path,
            model_url=model_url,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            context_window=model.n_ctx(),
            generate_kwargs={
                "temperature": temperature,
                "max_tokens": max_new_tokens,
                **(generate_kwargs or {}),
            },
            model_kwargs=llama_keywords,
            verbose=verbose,
            messages_to_prompt=messages_to_prompt,
            **kwargs,
        )
        self._model = model
        self._renders = messages_to_prompt is not None

    def _fetched(self, url: str) -> str:
        path = Path(get_cache_dir()) / "models" / Path(url).name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._download_url(url, str(path))
        return str(path)

    @property
    def llama(self) -> Llama:
        """The model, which tells `kv_stats()` and `kv_cells()`."""
        model: Llama = self._model
        return model

    def chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        """Answer a chat; keywords go to `Llama.create_chat_completion`."""
        if self._renders:
            return super().chat(messages, **kwargs)
        return self._chat(messages, **kwargs)

    def stream_chat(
        self, messages: Sequence[types.ChatMessage], **kwargs: Any
    ) -> types.ChatResponseGen:
        """Answer a chat piece by piece; keywords go to `Llama.create_chat_completion`."""
        if self._renders:
            return super().stream_chat(messages, **kwargs)
        return self._stream_chat(messages, **kwargs)

    @llm_chat_callback()
    def _chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> types.ChatResponse:
        raw = self._complete_chat(messages, stream=False, **kwargs)
        return _response(raw["choices"][0]["message"]["content"] or "", raw)

    @llm_chat_callback()
    def _stream_chat(
        self, messages: Sequence[types.ChatMessage], **kwargs: Any
    ) -> types.ChatResponseGen:
        chunks = self._complete_chat(messages, stream=True, **kwargs)

        def responses() -> Iterator[types.ChatResponse]:
            text = ""
            for raw in chunks:
                delta = raw["choices"][0]["delta"].get("content") or ""
                text += delta
                yield _response(text, raw, delta=delta)

        return responses()

    def _complete_chat(self, messages: Sequence[types.ChatMessage], **kwargs: Any) -> Any:
        settings = {**self.generate_kwargs, **kwargs}
        return self.llama.create_chat_completion([*map(_spoken, messages)], **settings)


def _spoken(message: types.ChatMessage) -> dict[str, str]:
    others = [one for one in message.blocks if not isinstance(one, types.TextBlock)]
    if others:
        msg = f"a message has a {type(others[0]).__name__}; this model reads text only"
        raise ValueError(msg)
    return {"role": message.role.value, "content": message.content or ""}


def _response(text: str, raw: Any, **rest: Any) -> types.ChatResponse:
    message = types.ChatMessage(role=types.MessageRole.ASSISTANT, content=text)
    return types.ChatResponse(message=message, raw=raw, **rest)
