"""One prompt with what a good answer says."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One prompt of a task.

    Attributes:
        task: Name of the task.
        index: Number of the sample in its task.
        prompt: Tokens of the prompt, the start of the answer included where the task gives one.
        n_predict: Most tokens the answer may have.
        answers: What is looked for in the answer.
        classes: All labels of a classification task.
        one_line: Whether the answer ends with its first line.
        context_span: Tokens [start, end) of the long text in the prompt.
        question_span: Tokens [start, end) of the question in the prompt.
        answer_spans: Tokens [start, end) of the facts behind the answers, in their order; empty
            where no one place holds them.
        continuation: Tokens that follow the prompt in the text, where text is played and not
            generated.
        next_prompt: Tokens of a further prompt after them.
    """

    task: str
    index: int
    prompt: tuple[int, ...]
    n_predict: int
    answers: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    one_line: bool = False
    context_span: tuple[int, int] = (0, 0)
    question_span: tuple[int, int] = (0, 0)
    answer_spans: tuple[tuple[int, int], ...] = ()
    continuation: tuple[int, ...] = field(default=(), repr=False)
    next_prompt: tuple[int, ...] = ()

    @property
    def sha256(self) -> str:
        """Hash of all of it: results compare only where the samples are the same."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]

    @property
    def depths(self) -> list[float]:
        """Where the answers stand, 0 at the start of the long text and 1 at its end."""
        first, last = self.context_span
        return [(start - first) / (last - first) for start, _ in self.answer_spans]
