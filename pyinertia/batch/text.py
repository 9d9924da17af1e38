"""Text work: prompts become tokens, long documents become parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import llama_cpp
from semantic_text_splitter import TextSplitter

N_BLOCK = 32  # characters per token, far more than a text has

Message = Mapping[str, Any]
Prompt = str | Sequence[Message]


@dataclass(frozen=True, slots=True)
class Tokens:
    """A prompt as the model takes it: token ids, and the stop strings of its chat format."""

    ids: list[int]
    stop: tuple[str, ...] = ()


def check_prompt(name: str, prompt: Any) -> None:
    """Raise TypeError if it is neither text nor a list of messages, ValueError if it is empty."""
    if not isinstance(prompt, str) and not _is_chat(prompt):
        text = repr(prompt)
        msg = (
            f"the {name} must be text, or a list of messages with 'role' and 'content'; this one "
            f"is {text if len(text) <= 60 else f'{text[:57]}...'}"
        )
        raise TypeError(msg)
    if not prompt:
        what = "text" if isinstance(prompt, str) else "list of messages"
        msg = f"the {name} is an empty {what}; give it at least one " + (
            "character" if isinstance(prompt, str) else "message"
        )
        raise ValueError(msg)


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, Sequence) and all(
        isinstance(message, Mapping) and "role" in message for message in prompt
    )


def encode(llm: llama_cpp.Llama, prompt: Prompt, prefix: Prompt | None = None) -> Tokens:
    """Return the tokens of a prompt as `Llama.create_completion` or chat completion makes them.

    Args:
        llm: The model.
        prompt: Text to be continued, or the messages of a chat that wants a reply.
        prefix: Text that stands before the text, or messages that stand before the messages.

    Raises:
        TypeError: The prompt is neither, or the prefix is of the other kind.
        ValueError: The prompt is empty, or the chat format does not take it.
    """
    check_prompt("prompt", prompt)
    if prefix is not None and isinstance(prefix, str) != isinstance(prompt, str):
        kinds = ("text", "a list of messages")
        ours, theirs = kinds if isinstance(prefix, str) else kinds[::-1]
        msg = f"the prefix is {ours}, so the prompts must be, too; this one is {theirs}"
        raise TypeError(msg)
    if isinstance(prompt, str):
        return Tokens(llm.tokenize(f"{prefix or ''}{prompt}".encode(), special=True))
    return _encode_chat(llm, [*(prefix or ()), *prompt])


class _Recorder:
    """Takes the place of the Llama that a chat handler formats for, and keeps what it is sent."""

    def __init__(self, llm: llama_cpp.Llama) -> None:
        self.llm, self.verbose = llm, False
        self.tokenize = llm.tokenize
        self.sent: Tokens | None = None

    def create_completion(self, prompt: list[int], stop: Any = None, **_: Any) -> dict[str, Any]:
        texts = [stop] if isinstance(stop, str) else list(stop or ())
        self.sent = Tokens(list(prompt), tuple(texts))
        choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": "stop"}
        usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
        return {"id": "", "created": 0, "model": "", "choices": [choice], "usage": usage}


def _encode_chat(llm: llama_cpp.Llama, messages: list[Message]) -> Tokens:
    # a handler is all that llama-cpp-python offers for every chat format: it formats, then calls
    recorder, name = _Recorder(llm), llm.chat_format or ""
    handler: Callable[..., Any] = (
        llm.chat_handler
        or llm._chat_handlers.get(name)
        or llama_cpp.llama_chat_format.get_chat_completion_handler(name)
    )
    try:
        handler(llama=recorder, messages=messages)
    except Exception as error:  # templates raise whatever they like
        msg = f"the chat format {name!r} does not take these messages: {error}"
        raise ValueError(msg) from error
    if recorder.sent is None:
        msg = f"the chat format {name!r} makes no single prompt of these messages"
        raise ValueError(msg)
    return recorder.sent


def common_prefix(prompts: Iterable[Sequence[int]]) -> list[int]:
    """Return the tokens that all prompts begin with."""
    columns = zip(*prompts, strict=False)
    return [column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns)]


def split(text: str, n_most: int, count: Callable[[str], int]) -> list[str]:
    """Split a text where paragraphs, sentences or words end; the parts together are the text.

    Args:
        text: The text.
        n_most: Most tokens of a part.
        count: Returns the number of tokens of a text.
    """
    n_tokens = count(text)
    if n_tokens <= n_most:
        return [text]
    # parts of about the same size: a rest of two sentences makes a poor summary
    n_slack = n_most // 10
    n_parts = -(-n_tokens // (n_most - n_slack))
    n_even = min(n_most, n_tokens // n_parts + n_slack + 1)
    splitter = TextSplitter.from_callback(count, n_even, trim=False)
    # on a word without end its work is quadratic, so it gets a block at a time
    return [part for block in _blocks(text, N_BLOCK * n_most) for part in splitter.chunks(block)]


def _blocks(text: str, n_most: int) -> Iterator[str]:
    """Cut a text into blocks of at most n_most characters, where it has an end of any kind."""
    start = 0
    while len(text) - start > n_most:
        half, last = start + n_most // 2, start + n_most
        ends = (text.rfind(end, half, last) + len(end) for end in ("\n\n", "\n", ". ", " "))
        start, before = next((end for end in ends if end > half), last), start
        yield text[before:start]
    yield text[start:]
