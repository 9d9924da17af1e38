"""A conversation that has no end: the cache forgets by rank, and the positions start anew.

The tokens of past messages stay as they entered; only what is new is added. So nothing that the
cache still has is ever computed again. When no position is left, the system prompt and the newest
messages enter an empty cache, and whoever talks is told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pyinertia.cli import memory
from pyinertia.cli.generation import Generation
from pyinertia.cli.options import SamplingOptions
from pyinertia.cli.template import ChatTemplate, Message
from pyinertia.cli.whole import write_whole
from pyinertia.errors import CommandError

if TYPE_CHECKING:
    from pyinertia.llama import Llama

ROOM = 1024  # positions that an answer should find free; a quarter of a small context


class Conversation:
    """Messages, and the tokens of them that were shown to the model.

    Attributes:
        messages: The whole conversation, without the system prompt.
        n_forgotten: Messages, from the first on, that are in no position any more.
        tokens: Tokens by position.
        answer: The last answer.
    """

    def __init__(
        self,
        llm: Llama,
        sampling: SamplingOptions,
        system: str | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Start with a system prompt, which never leaves the cache.

        Args:
            llm: The model; its cache is used from now on.
            sampling: Of all answers.
            system: The system prompt, if there is one.
            notice: Takes what whoever talks should know.

        Raises:
            CommandError: The budget has no room for the system prompt.
        """
        self._llm, self._sampling, self._notice = llm, sampling, notice
        self.template = ChatTemplate(llm)
        self._system = [] if system is None else [{"role": "system", "content": system}]
        memory.protect(llm, self.template, system)
        self.answer: Generation | None = None
        self.messages: list[Message] = []
        self.n_forgotten = 0
        self.tokens: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system prompt."""
        self.messages = []
        self.n_forgotten = 0
        self._start_over()

    def ask(self, text: str) -> Iterator[str]:
        """Say something; yields the answer in pieces.

        A caller that stops iterating keeps what came until then. If not even the prompt was read,
        the message is as if it had never been said.

        Raises:
            CommandError: The message is longer than all positions; nothing changes then.
        """
        message = {"role": "user", "content": text}
        prompt = self._prompt(message)
        answer = self.answer = Generation(self._llm, prompt, self._sampling, self.template.stop)
        self.tokens = []  # not known while the cache is being filled
        spoken: list[str] = []
        try:
            for piece in answer:
                spoken.append(piece)
                yield piece
        finally:
            if answer.tokens or answer.end:
                self.tokens = prompt + answer.tokens
                self.messages += [message, {"role": "assistant", "content": "".join(spoken)}]
            else:
                self._start_over()

    def _prompt(self, message: Message) -> list[int]:
        llm, known = self._llm, self.messages[self.n_forgotten :]
        n_room = self._sampling.n_predict
        if n_room < 0:
            n_room = min(ROOM, llm._n_ctx // 4)
        n_most = llm._n_ctx - n_room
        if self.tokens:
            added = self.template.next_tokens([*self._system, *known, message])
            if added is not None and len(self.tokens) + len(added) <= n_most:
                return [*self.tokens, *added]
        prompt = self.template.tokens([*self._system, *known, message])
        if len(prompt) <= n_most:
            return prompt
        return self._restart(message, n_most)

    def _restart(self, message: Message, n_most: int) -> list[int]:
        """The newest messages that fit half of the positions, and at least the message itself."""
        best = self.template.tokens([*self._system, message])
        if len(best) > n_most:
            msg = (
                f"this message and the system prompt have {len(best):,} tokens, there are "
                f"{n_most:,} positions for them; shorten it, or pass a larger -c or a smaller -n"
            )
            raise CommandError(msg)
        first = len(self.messages)
        while first - 2 >= self.n_forgotten:
            longer = self.template.tokens([*self._system, *self.messages[first - 2 :], message])
            if len(longer) > n_most // 2:
                break
            best, first = longer, first - 2
        self._start_over()
        self.n_forgotten = first
        n_kept = len(self.messages) - first
        self._notice(
            f"the {self._llm._n_ctx:,} positions have no room for more, so the model starts anew: "
            f"it sees the {'system prompt, the ' if self._system else ''}newest {n_kept} of "
            f"{len(self.messages)} messages and yours, and no longer the older ones"
        )
        return best

    def _start_over(self) -> None:
        self._llm.reset()
        self.tokens = []

    def kept(self) -> Iterator[memory.Span]:
        """What the model was shown, in runs that it still sees and runs that it does not."""
        yield from memory.spans(self._llm, self.tokens[: self._llm.n_tokens])

    def save(self, path: Path) -> None:
        """Write the conversation as JSON; the file is whole or unchanged.

        Raises:
            CommandError: It cannot be written.
        """
        record = {"messages": [*self._system, *self.messages]}
        text = json.dumps(record, ensure_ascii=False, indent=1) + "\n"
        try:
            write_whole(path, [text.encode(errors="backslashreplace")])
        except (OSError, ValueError) as error:  # some paths are none: ".", one with a NUL
            msg = f"{path} cannot be written: {getattr(error, 'strerror', None) or error}"
            raise CommandError(msg) from error

    def load(self, path: Path) -> None:
        """Continue a saved conversation; the model reads it with the next message.

        Raises:
            CommandError: The file is not one that `save` wrote; nothing changes then.
        """
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            spoken = [{"role": str(m["role"]), "content": str(m["content"])} for m in messages]
        except OSError as error:
            msg = f"{path} cannot be read: {error.strerror}"
            raise CommandError(msg) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            msg = f"{path} holds no conversation; /save writes one"
            raise CommandError(msg) from error
        system = [m for m in spoken[:1] if m["role"] == "system"]
        rest = spoken[len(system) :]
        roles = [m["role"] for m in rest]
        if len(rest) % 2 or roles != ["user", "assistant"] * (len(rest) // 2):
            msg = f"{path}: user and assistant must take turns, after the system prompt"
            raise CommandError(msg)
        if system != self._system:
            text = system[0]["content"] if system else None
            has = f"the system prompt {text!r}" if text is not None else "no system prompt"
            msg = f"{path} was saved with {has}; start the chat with the same --system"
            raise CommandError(msg)
        self.reset()
        self.messages = rest
