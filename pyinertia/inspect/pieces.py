"""Tokens as text that can be shown: whole characters, and none that moves a terminal's cursor."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from pyinertia.vocabulary import token_bytes

if TYPE_CHECKING:
    from pyinertia.llama import Llama

_SHOWN = {  # control characters as their pictures; C1 has none
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: "\u2421",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


class Piece(NamedTuple):
    """Text of one token, or of several that only together are characters.

    Attributes:
        text: What to show.
        start: Position of its first token.
        n_tokens: How many they are.
        special: Whether it is a control token, such as the start of a turn.
    """

    text: str
    start: int
    n_tokens: int
    special: bool


def pieces(llm: Llama, tokens: Sequence[int], n_prompt: int) -> list[Piece]:
    """Cut tokens, [n] by position, into pieces; none spans the end of the prompt.

    Bytes that are no UTF-8 become U+FFFD, control characters their pictures.
    """
    import llama_cpp

    vocab = llm._model.vocab
    found: list[Piece] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    held, start = "", 0
    for at, token in enumerate(tokens):
        special = bool(llama_cpp.llama_vocab_is_control(vocab, token))
        if at and (special or at == n_prompt) and start < at:  # an open character ends here
            found.append(Piece(_shown(held + decoder.decode(b"", True)), start, at - start, False))
            held, start = "", at
            decoder.reset()
        held += decoder.decode(token_bytes(vocab, token, special=True))
        if special or not decoder.getstate()[0]:
            found.append(Piece(_shown(held), start, at + 1 - start, special))
            held, start = "", at + 1
    if start < len(tokens):
        rest = held + decoder.decode(b"", True)
        found.append(Piece(_shown(rest), start, len(tokens) - start, False))
    return found


def _shown(text: str) -> str:
    return text.translate(_SHOWN)
