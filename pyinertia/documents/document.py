"""What reading gives: a document, or one reason why there is none."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from pyinertia.errors import PyInertiaError


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text, and what tells it apart from others.

    Attributes:
        path: The file, as it was named; "-" is stdin.
        line: The line of a JSONL file, from 1 on; 0 elsewhere.
        text: Without surrogates; empty only if the document is known already.
        sha256: Of the file, or of the line without its end, before it became text.
        n_bytes: Of the file, or of the line.
    """

    path: str
    line: int
    text: str
    sha256: str
    n_bytes: int


class DocumentError(PyInertiaError, ValueError):
    """A document cannot be read; the message does not name it.

    Attributes:
        line: The line of a JSONL file, from 1 on; 0 if it is about the file.
        sha256: Of what could not be read, "" if not even that was possible.
        n_bytes: Of the file or the line, 0 if unknown.
    """

    def __init__(self, reason: str, *, line: int = 0, sha256: str = "", n_bytes: int = 0) -> None:
        """Say why."""
        super().__init__(reason)
        self.line, self.sha256, self.n_bytes = line, sha256, n_bytes


def hash_of(data: bytes) -> str:
    """Hash of some bytes, in hex."""
    return hashlib.sha256(data).hexdigest()


def shown(path: str) -> str:
    """A path as one line of a message: line ends and what no terminal has are escaped."""
    return path if path.isprintable() else ascii(path)[1:-1]
