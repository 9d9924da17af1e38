"""The vocabulary of a model: opened without the weights, and the text of its tokens."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from pyinertia.binding import LlamaTokenizer, llama_cpp
from pyinertia.errors import ModelError


def open_vocabulary(path: str | os.PathLike[str]) -> llama_cpp._internals.LlamaModel:
    """Open the vocabulary and the metadata of a model.

    Raises:
        ModelError: There is no such file, or it is not a GGUF model.
    """
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        return llama_cpp._internals.LlamaModel(
            path_model=os.fspath(path), params=params, verbose=False
        )
    except ValueError as error:
        msg = f"{path} is not a GGUF model that this llama.cpp can read; download it again"
        raise ModelError(msg) from error


def token_bytes(vocab: Any, token: int, special: bool = False) -> bytes:
    """Return the text of a token, however long it is.

    Args:
        vocab: llama.cpp's vocabulary.
        token: The token.
        special: Whether control tokens have a text.
    """
    size = 32
    while True:
        buffer = ctypes.create_string_buffer(size)
        n: int = llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, special)
        if n >= 0:
            return buffer.raw[:n]
        size = -n


class Tokenizer(LlamaTokenizer):
    """The tokenizer of llama-cpp-python, which gives tokens of more than 32 bytes no text."""

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens, as `LlamaTokenizer.detokenize` does.

        Raises:
            ValueError: The model does not have one of them.
        """
        model = self._model
        n_vocab = llama_cpp.llama_vocab_n_tokens(model.vocab)
        if tokens and not 0 <= min(tokens) <= max(tokens) < n_vocab:  # llama.cpp would abort
            given = f"{min(tokens)} to {max(tokens)}"
            msg = f"tokens must be from 0 to {n_vocab - 1}, these are from {given}"
            raise ValueError(msg)
        text = b"".join(token_bytes(model.vocab, token, special) for token in tokens)
        is_start = bool(tokens) and tokens[0] == model.token_bos()
        return text[1:] if is_start and text[:1] == b" " else text
