"""The formats: a new one is a file beside this one, and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from pyinertia.documents import html, pdf, plain

# suffix of a file of one document -> (its bytes, encoding) -> its text; raises DocumentError
Reader = Callable[[bytes, str], str]
READERS: Mapping[str, Reader] = MappingProxyType(
    {
        ".txt": plain.text,
        ".md": plain.text,
        ".html": html.text,
        ".htm": html.text,
        ".pdf": pdf.text,
    }
)
JSONL = ".jsonl"  # a document per line: jsonl.py
FORMATS = (*READERS, JSONL)


def reader(path: str) -> Reader:
    """The reader of a file; what has no known suffix is taken for plain text."""
    return READERS.get(Path(path).suffix.lower(), plain.text)


def has_lines(path: str) -> bool:
    """Whether a file has a document per line."""
    return Path(path).suffix.lower() == JSONL


def suffixes() -> str:
    """All known suffixes in one line."""
    return " ".join(FORMATS)
