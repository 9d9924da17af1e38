"""Windows of a text, as prompts with a continuation."""

from __future__ import annotations

import random
from pathlib import Path

from pyinertia.errors import EvalError
from pyinertia.eval.sample import Sample
from pyinertia.eval.text import article
from pyinertia.eval.vocabulary import Vocabulary


class Passages:
    """Windows of a file, or of Python's own help; none has a token of another."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        path: Path | None,
        *,
        length: int,
        n_tokens: int,
        n_samples: int,
        seed: int,
    ) -> None:
        """Tokenize the text.

        Raises:
            EvalError: The file cannot be read, or it is too short for that many windows.
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
        self._n_before, self._n_tokens = length - n_tokens - len(self._start), n_tokens
        n_window = self._n_before + n_tokens
        n_windows = len(self._tokens) // n_window
        if n_windows < n_samples:
            msg = (
                f"the text has {len(self._tokens)} tokens, which are {n_windows} windows of "
                f"--length {length} that do not overlap; pass a longer one with --text, a smaller "
                f"--length, or --samples {max(n_windows, 1)}"
            )
            raise EvalError(msg)
        rng = random.Random(seed)
        first = rng.randint(0, len(self._tokens) - n_windows * n_window)
        self._starts = [first + place * n_window for place in range(n_windows)]
        rng.shuffle(self._starts)  # more samples of the same seed begin with the same ones

    def sample(self, task: str, index: int) -> Sample:
        """Cut a window."""
        start = self._starts[index]
        end = start + self._n_before
        return Sample(
            task=task,
            index=index,
            prompt=(*self._start, *self._tokens[start:end]),
            n_predict=self._n_tokens,
            continuation=tuple(self._tokens[end : end + self._n_tokens]),
        )
