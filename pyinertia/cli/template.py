"""A model's chat template: messages in, tokens out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pyinertia.errors import CommandError

if TYPE_CHECKING:
    from pyinertia.llama import Llama

Message = dict[str, str]  # role and content

_MARK = "[0f7c2d9e4b]"  # stands where an answer or a system prompt would


class ChatTemplate:
    """The template of a model, ChatML if it has none."""

    def __init__(self, llm: Llama) -> None:
        """Compile the template that is in the model's file."""
        from llama_cpp.llama_chat_format import CHATML_CHAT_TEMPLATE, Jinja2ChatFormatter

        self._llm = llm
        model = llm._model
        own = llm.metadata.get("tokenizer.chat_template")
        eos = model.token_eos()
        self._formatter = Jinja2ChatFormatter(
            own or CHATML_CHAT_TEMPLATE,
            bos_token=bos_text(llm),
            eos_token=model.token_get_text(eos) if eos != -1 else "",
        )
        self.is_own = own is not None
        # a model that has no such token spells it out
        self.stop: tuple[str, ...] = () if own else ("<|im_end|>",)
        self._takes_system = self._knows_system()

    def tokens(self, messages: Sequence[Message]) -> list[int]:
        """The whole conversation and the start of the next answer.

        Raises:
            CommandError: The template refuses it.
        """
        return encode(self._llm, self._text(messages))

    def next_tokens(self, messages: Sequence[Message]) -> list[int] | None:
        """What follows the last answer: its end, the last message and the start of the next one.

        Args:
            messages: The conversation; the answer is the one before the last.

        Returns:
            Tokens, or None if the template changes what comes before the answer, too.
        """
        answer = {"role": "assistant", "content": _MARK}
        before, mark, after = self._text([*messages[:-2], answer, messages[-1]]).rpartition(_MARK)
        if not mark or not before or not after:
            return None
        return self._llm.tokenize(after.encode(), add_bos=False, special=True)

    def n_system(self, system: str | None) -> int:
        """The number of positions, from the first on, before the first message.

        The system prompt is in them, or what the template says where there is none.
        """
        before = [] if system is None else [{"role": "system", "content": system}]
        starts = [self.tokens([*before, {"role": "user", "content": user}]) for user in ("1", "a")]
        same = (a == b for a, b in zip(*starts, strict=False))
        return next((n for n, equal in enumerate(same) if not equal), min(map(len, starts)))

    def _text(self, messages: Sequence[Message]) -> str:
        if messages and messages[0]["role"] == "system" and not self._takes_system:
            messages = _folded(messages)
        return self._render(messages)

    def _render(self, messages: Sequence[Message]) -> str:
        given: Any = list(messages)
        try:
            prompt: str = self._formatter(messages=given).prompt
        except Exception as error:  # whatever a template of somebody else's does
            msg = f"the model's chat template refuses this: {error}"
            raise CommandError(msg) from error
        return prompt

    def _knows_system(self) -> bool:
        try:
            return _MARK in self._render(
                [{"role": "system", "content": _MARK}, {"role": "user", "content": "1"}]
            )
        except CommandError:
            return False


def encode(llm: Llama, text: str) -> list[int]:
    """Tokens of a whole prompt; one that spells out how it begins gets no second beginning."""
    bos = bos_text(llm)
    begun = bool(bos) and text.startswith(bos)
    return llm.tokenize(text.encode(), add_bos=not begun, special=True)


def bos_text(llm: Llama) -> str:
    """What the token that begins a text is written as, "" if the model has none."""
    bos = llm.token_bos()
    text: str = llm._model.token_get_text(bos) if bos != -1 else ""
    return text


def _folded(messages: Sequence[Message]) -> list[Message]:
    """The system prompt as the start of the first message, for templates that have no place."""
    system, first, *rest = messages
    return [{**first, "content": f"{system['content']}\n\n{first['content']}"}, *rest]
