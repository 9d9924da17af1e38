"""Windows of a text, as prompts with a continuation."""

from __future__ import annotations

import random
from pathlib import Path

from pyinertia.errors import EvalError
from pyinertia.eval.sample import Sample
from pyinertia.eval.text import article
from pyinertia.eval.vocabulary import Vocabulary


class Passages:
    """Windows of a file, or of Python's own help, each from a random token on."""

    def __init__(
        self, vocabulary: Vocabulary, path: Path | None, *, length: int, n_tokens: int, seed: int
    ) -> None:
        """Tokenize the text.

        Raises:
            EvalError: The file cannot be read, or a window is longer than it.
        """
        if n_tokens >= length:
            msg = f"--tokens {n_tokens} leaves no prompt in --length {length}; use fewer tokens"
            raise EvalError(msg)
        try:
            text = article() if path is None else path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            msg = f"--text {path} cannot be read: {error}; pass a UTF-8 text file"
            raise EvalError(msg) from error
        self._start = vocabulary.encode("")
        self._tokens = vocabulary.encode(text)[len(self._start) :]
        self._n_prompt, self._n_tokens, self._seed = length - n_tokens, n_tokens, seed
        if len(self._tokens) < length:
            msg = (
                f"the text has {len(self._tokens)} tokens, --length {length} is more; pass a "
                "longer one with --text, or a smaller --length"
            )
            raise EvalError(msg)

    def sample(self, task: str, index: int) -> Sample:
        """Cut a window."""
        n_before = self._n_prompt - len(self._start)
        rng = random.Random(f"{self._seed}/{task}/{index}")
        start = rng.randrange(len(self._tokens) - n_before - self._n_tokens + 1)
        end = start + n_before
        return Sample(
            task=task,
            index=index,
            prompt=(*self._start, *self._tokens[start:end]),
            n_predict=self._n_tokens,
            continuation=tuple(self._tokens[end : end + self._n_tokens]),
        )
