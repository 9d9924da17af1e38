"""A model's tokenizer, chat template and limits, without its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pyinertia.vocabulary import open_vocabulary  # first: it decides which library llama_cpp gets

# isort: split

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from pyinertia.errors import EvalError


class _Formatter(Jinja2ChatFormatter):
    @staticmethod
    def strftime_now(f: str) -> str:
        # templates that print today's date would make a prompt of every day
        return datetime(2026, 1, 1).strftime(f)


class Vocabulary:
    """What prompts are made with."""

    def __init__(self, path: Path) -> None:
        """Read the vocabulary and the metadata of a GGUF file.

        Raises:
            ModelError: The file is not a GGUF model.
        """
        self._model = open_vocabulary(path)
        self.path = path
        metadata = self._model.metadata()
        architecture = metadata.get("general.architecture", "unknown")
        self.name = metadata.get("general.name", path.stem)
        self.n_ctx_train = int(metadata.get(f"{architecture}.context_length", 0))
        template = metadata.get("tokenizer.chat_template")
        self._bos = self._special(self._model.token_bos())
        eos = self._special(self._model.token_eos())
        self._formatter = (
            _Formatter(template, eos_token=eos, bos_token=self._bos) if template else None
        )

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        return self._formatter is not None

    def encode(self, text: str) -> list[int]:
        """Tokens of a whole prompt; special tokens in the text count as such."""
        bos = not (self._bos and text.startswith(self._bos))
        return list(self._model.tokenize(text.encode(), add_bos=bos, special=True))

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens."""
        return bytes(self._model.detokenize(list(tokens))).decode(errors="replace")

    def chat(self, *messages: str, answer_prefix: str = "") -> str:
        """Messages in the model's chat template, if it has one, and the start of the answer.

        Args:
            messages: The user's, the model's, and so on by turns, up to one of the user.
            answer_prefix: What the answer starts with.
        """
        if self._formatter is None:
            return "\n".join((*messages, answer_prefix))
        turns: list[Any] = [
            {"role": ("user", "assistant")[i % 2], "content": message}
            for i, message in enumerate(messages)
        ]
        try:
            prompt = self._formatter(messages=turns).prompt
        except Exception as error:  # whatever a template of somebody else's does
            msg = f"the chat template of {self.path} fails: {error}; pass --no-chat"
            raise EvalError(msg) from error
        return f"{prompt}{answer_prefix}"

    def forget_chat(self) -> None:
        """Prompt without the chat template from now on, as for a base model."""
        self._formatter = None

    def check_length(self, length: int) -> None:
        """Refuse a context longer than the model was trained for."""
        if self.n_ctx_train and length > self.n_ctx_train:
            msg = (
                f"--length {length} is longer than the context of {self.n_ctx_train} tokens that "
                f"{self.path.name} was trained for; use at most {self.n_ctx_train}"
            )
            raise EvalError(msg)

    def _special(self, token: int) -> str:
        if token < 0:
            return ""
        return bytes(self._model.detokenize([token], special=True)).decode(errors="replace")


def file_sha256(path: Path) -> str:
    """Hash of a file, which tells models apart whatever they are called."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()
