"""Chats: a re-rendered conversation becomes the tokens that are cached; its system message stays.

A chat template renders the whole conversation anew at every turn. Tokenized afresh, the model's own
replies need not give the tokens it had chosen, and the cache would be of no use from there on. So
only the text beyond the last prompt and its reply is tokenized.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pyinertia import _native
from pyinertia.binding import llama_cpp
from pyinertia.calls import EngineCalls
from pyinertia.errors import PolicyError
from pyinertia.interrupts import deferred
from pyinertia.loading import choice, refuse_images
from pyinertia.policy import MAX_COUNT

PROTECTS = ("system", None)
SYSTEM_ROLES = ("system", "developer")


class Tokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def tokenize(self, text: bytes, add_bos: bool, special: bool) -> list[int]:
        """Return the tokens of a text."""
        ...

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None, special: bool) -> bytes:
        """Return the text of tokens."""
        ...


@dataclass
class Conversation:
    """The last prompt that a chat template rendered.

    Attributes:
        text: The prompt.
        tokens: Its tokens, as they went to the cache.
        n_system: How many of them hold the leading system messages, those before included.
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    n_system: int = 0

    def continued(
        self,
        text: str,
        history: list[int],
        replies: Collection[str],
        tokenizer: Tokenizer,
        is_end: Callable[[int], bool],
    ) -> list[int] | None:
        """Return the tokens of a text that continues this prompt and its cached reply, or None.

        Args:
            text: The conversation, rendered anew.
            history: The cached tokens.
            replies: What the assistant said so far, according to the caller.
            tokenizer: Of the model.
            is_end: Whether a token ends a turn.
        """
        n = len(self.tokens)
        if n and text == self.text:
            return list(self.tokens)
        if not n or history[:n] != self.tokens or not text.startswith(self.text):
            return None
        raw = tokenizer.detokenize(history[n:], history[:n], False)
        reply = raw.decode("utf-8", "ignore")
        if reply.encode() != raw:
            return None  # cut within a character
        for said in _as_rendered(reply, replies):
            if text.startswith(said, len(self.text)):
                rest = text[len(self.text) + len(said) :].encode()
                new = tokenizer.tokenize(rest, False, True)
                # some tokenizers put a space before what they take for the start of a text: what
                # follows the end of a turn is such a start in the whole conversation, too
                is_next_turn = bool(new) and is_end(new[0])
                if is_next_turn or tokenizer.detokenize(new, history, True) == rest:
                    return history + new
        return None


def _as_rendered(reply: str, replies: Collection[str]) -> list[str]:
    """The forms that a cached reply may have in a prompt: templates and callers trim it."""
    forms, bare = [reply], reply.strip()
    if bare and any(known.strip().startswith(bare) for known in replies):
        forms.append(reply.lstrip())
    if bare and any(known.strip() == bare for known in replies):
        forms += [reply.rstrip(), bare]
    return forms


@dataclass(frozen=True)
class Said:
    """What the messages of a chat say, as far as it matters here.

    Attributes:
        system: The texts of the leading system messages.
        after: The first text after them, "" if there is none.
        replies: The texts of the assistant.
    """

    system: list[str]
    after: str
    replies: list[str]


def said(messages: Iterable[Mapping[str, Any]]) -> Said:
    """Read the messages of a chat."""
    listed = list(messages)
    n = next((i for i, m in enumerate(listed) if m.get("role") not in SYSTEM_ROLES), len(listed))
    replies = [m for m in listed if m.get("role") == "assistant"]
    return Said(_texts(listed[:n]), "".join(_texts(listed[n : n + 1])[:1]), _texts(replies))


def _texts(messages: Iterable[Mapping[str, Any]]) -> list[str]:
    texts: list[str] = []
    for message in messages:
        content = message.get("content")
        parts = content if isinstance(content, list) else [content]
        found = [part.get("text") if isinstance(part, dict) else part for part in parts]
        texts += [text.strip() for text in found if isinstance(text, str) and text.strip()]
    return texts


def n_system(
    said: Said,
    prompt: str,
    tokens: list[int],
    tokenizer: Tokenizer,
    is_end: Callable[[int], bool],
    add_bos: bool = True,
) -> int | None:
    """Return how many tokens of the prompt hold its system messages, and all before them.

    Without system messages these are the tokens before the first other one: a template may say
    something of its own there.

    Args:
        said: What the messages say.
        prompt: The rendered conversation.
        tokens: Its tokens.
        tokenizer: Of the model.
        is_end: Whether a token ends a turn; the one behind the last text is counted in.
        add_bos: Whether the tokenizer may add a BOS to the prompt.

    Returns:
        The number of tokens, None if these texts do not all stand before the other messages.
    """
    end = 0
    for text in said.system:
        start = prompt.find(text, end)
        if start < 0:
            return None
        end = start + len(text)
    if not end:
        start = max(0, prompt.find(said.after)) if said.after else 0
        return _n_common(tokenizer.tokenize(prompt[:start].encode(), add_bos, True), tokens)
    # a short text may also stand in the template's own words, which come first
    if said.after:
        limit = prompt.find(said.after, end)
        if limit < 0:
            return None  # some templates put the system message into the last turn
        end = prompt.rfind(said.system[-1], 0, limit) + len(said.system[-1])
    head = tokenizer.tokenize(prompt[:end].encode(), add_bos, True)
    n = _n_common(head, tokens)
    # the last token of the text may hold the beginning of what follows
    n_bytes = len(tokenizer.detokenize(head[n:], None, True))
    while n < len(tokens) and n_bytes > 0:
        n_bytes -= len(tokenizer.detokenize([tokens[n]], None, True))
        n += 1
    return n + 1 if n < len(tokens) and is_end(tokens[n]) else n


def _n_common(a: list[int], b: list[int]) -> int:
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


class Chats(EngineCalls):
    """A model that is chatted with."""

    _kv_ranges: list[tuple[int, int]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Load a model, see `pyinertia.Llama`."""
        self._kv_chat = Conversation()
        self._kv_next_chat: Conversation | None = None
        self._kv_said: Said | None = None
        self._kv_protect_system = True
        self._kv_n_system = 0
        super().__init__(*args, **kwargs)

    def create_chat_completion(
        self, messages: Any, *args: Any, protect: str | None = "system", **kwargs: Any
    ) -> Any:
        """Answer a chat, as `llama_cpp.Llama.create_chat_completion` does.

        Args:
            messages: The whole conversation. If it continues the last one and its answer, only
                what is new is evaluated.
            *args: The arguments of `llama_cpp.Llama.create_chat_completion`.
            protect: "system": the leading system messages, or what the template says where there
                are none, and all before them, are never evicted. None: they are ranked like the
                rest.
            **kwargs: The keywords of `llama_cpp.Llama.create_chat_completion`.

        Returns:
            The completion in OpenAI's form, or an iterator of chunks with stream=True.

        Raises:
            PolicyError: The budget has no room for the system messages, or the chat handler is one
                for images, nothing is evaluated then; or protect is something else.
            ValueError: The chat is longer than n_ctx, or the model was closed.
        """
        self._check_open()
        choice("protect", protect, PROTECTS)
        if self.kv_policy.evicts:
            refuse_images(self.chat_handler, self._kv_named())
            messages = list(messages)
            self._kv_said = said(messages)
            self._kv_protect_system = protect == "system"
        try:
            return super().create_chat_completion(messages, *args, **kwargs)
        finally:
            self._kv_said = None

    def create_completion(self, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        """Continue a prompt, as `llama_cpp.Llama.create_completion` does."""
        if self._kv_said is not None and isinstance(prompt, str):
            # of a chat handler that leaves the tokenizing to the parent
            prompt = self.tokenize(prompt.encode(), True, True)
        return super().create_completion(prompt, *args, **kwargs)

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Return the tokens of a text, as `llama_cpp.Llama.tokenize` does."""
        # the first text that a chat handler tokenizes is the rendered conversation
        said, self._kv_said = self._kv_said, None
        if said is None:
            return super().tokenize(text, add_bos, special)
        prompt, tokenizer = text.decode("utf-8", "replace"), self.tokenizer_
        history = self._cached().tokens.tolist()
        tokens = self._kv_chat.continued(prompt, history, said.replies, tokenizer, self._is_end)
        if tokens is None:
            tokens = super().tokenize(text, add_bos, special)
        n: int | None = 0
        if self._kv_protect_system:
            n = n_system(said, prompt, tokens, tokenizer, self._is_end, add_bos)
        if n is None:
            warnings.warn(
                f"chat_format={self.chat_format!r} leaves the system message out of the prompt, or "
                "changes it: it is not protected. Use another chat_format, or protect=None",
                UserWarning,
                stacklevel=5,
            )
            n = 0
        if said.system:
            self._check_system(n)
        elif not self._has_room(n):
            n = 0  # the template's own words; nobody asked for them
        self._kv_next_chat = Conversation(prompt, tokens, n)
        return list(tokens)

    def kv_protect(self, p0: int, p1: int) -> None:
        """Never evict positions [p0, p1) from here on: those of an instruction, say.

        `KVPolicy(protect=...)` says the same before the model, and its tokenizer, are there.

        Args:
            p0: The first position.
            p1: The position after the last one.

        Raises:
            PolicyError: The range is empty, or the budget has no room for it, nothing changes then;
                or the cache of this model has no engine.
            ValueError: The model was closed.
        """
        self._kv_ctx()
        policy = replace(self.kv_policy, protect=(*self.kv_policy.protect, (p0, p1)))
        if policy.evicts:
            self._protect([*self._kv_ranges, (p0, p1)], self._kv_n_system)
        self.kv_policy = self._kv_arguments["kv_policy"] = policy

    def _is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def _n_least(self, n_system: int) -> int:
        """The smallest budget beside a system message of that many tokens."""
        ranges = (*self._kv_ranges, (0, n_system)) if n_system else tuple(self._kv_ranges)
        return replace(self.kv_policy, protect=ranges, n_budget=MAX_COUNT).n_least

    def _has_room(self, n_system: int) -> bool:
        n_budget = self.kv_policy.n_budget  # a share is never less than what must stay
        return isinstance(n_budget, float) or n_budget >= self._n_least(n_system)

    def _check_system(self, n_system: int) -> None:
        if not self._has_room(n_system):
            msg = (
                f"the system message takes {n_system} positions; with the recent ones the budget "
                f"must be at least {self._n_least(n_system)}, it is {self.kv_policy.n_budget}. "
                "Shorten the message, raise kv_budget, or pass protect=None"
            )
            raise PolicyError(msg)

    @deferred()
    def _protect(self, ranges: list[tuple[int, int]], n_system: int) -> None:
        if (ranges, n_system) == (self._kv_ranges, self._kv_n_system):
            return

        def try_to(ranges: list[tuple[int, int]], n_system: int) -> str:
            return _native.protect(self.ctx, [*ranges, (0, n_system)] if n_system else ranges)

        if reason := try_to(ranges, n_system):
            try_to(self._kv_ranges, self._kv_n_system)
            raise PolicyError(reason)
        self._kv_ranges, self._kv_n_system = ranges, n_system

    def _begin_prompt(self, prompt: list[int]) -> None:
        """The cache was cut down to what this prompt reuses: protect its system message."""
        chat = self._kv_next_chat
        if chat is not None and chat.tokens == prompt:
            self._kv_chat, self._kv_next_chat = chat, None
            self._protect(self._kv_ranges, chat.n_system)
        elif self.n_tokens < self._kv_n_system:
            self._protect(self._kv_ranges, 0)
