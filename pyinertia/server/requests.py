"""What clients may send: llama_cpp.server's requests, and what OpenAI has beyond them."""

from __future__ import annotations

from typing import Any, Literal

from llama_cpp.server.types import CreateChatCompletionRequest, CreateCompletionRequest
from pydantic import BaseModel, Field, model_validator
from typing_extensions import TypedDict

from pyinertia.binding import llama_cpp

# of these the model knows nothing
OWN_FIELDS = {
    "n",
    "best_of",
    "logit_bias_type",
    "user",
    "min_tokens",
    "stream_options",
    "max_completion_tokens",
}
ONE = Field(default=1, ge=1, le=1, description="Answers; there is one.")


class StreamOptions(BaseModel):
    """What a stream has beside the answer."""

    include_usage: bool = Field(
        default=False, description="A last chunk without choices, but with the usage."
    )


class CompletionRequest(CreateCompletionRequest):
    """A text to be continued."""

    prompt: str | list[str] | list[int] | list[list[int]] = Field(  # type: ignore[assignment]
        default="", description="A text or its tokens, or a list of one of them."
    )
    stream_options: StreamOptions | None = None
    n: int | None = ONE
    best_of: int | None = ONE

    @model_validator(mode="after")
    def _one_prompt(self) -> CompletionRequest:
        prompt = self.prompt
        if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)):
            if len(prompt) != 1:
                msg = f"prompt is a list of {len(prompt)}; send a request for each"
                raise ValueError(msg)
            self.prompt = prompt[0]  # type: ignore[assignment]
        return self


class DeveloperMessage(TypedDict):
    """What newer clients call a system message."""

    role: Literal["developer"]
    content: str


class ChatRequest(CreateChatCompletionRequest):
    """A conversation to be continued."""

    messages: list[llama_cpp.ChatCompletionRequestMessage | DeveloperMessage] = Field(  # type: ignore[assignment]
        min_length=1, description="The conversation so far."
    )
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="The newer name of max_tokens."
    )
    stream_options: StreamOptions | None = None
    n: int | None = ONE

    @model_validator(mode="after")
    def _older_names(self) -> ChatRequest:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        messages: list[Any] = self.messages
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"  # templates know no other
        return self
