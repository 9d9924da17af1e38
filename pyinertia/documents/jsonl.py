"""JSON lines: a document in each, in a field of an object."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from pyinertia.documents import plain
from pyinertia.documents.document import Document, DocumentError, shown

CHUNK = 2**20  # bytes of a line that is too long


def documents(
    file: BinaryIO,
    path: str,
    field: str,
    encoding: str,
    n_most: int,
    known: Callable[[str], bool],
) -> Iterator[Document | DocumentError]:
    """Yield what each line is, a document or the reason why it is none; empty lines do not count.

    Args:
        file: Is read line by line.
        path: Of the file.
        field: The field with the text.
        encoding: Of the file, if it has no byte order mark of UTF-8.
        n_most: Most bytes of a line.
        known: Whether a line with this hash, its end left out, is known; its text is then left
            empty.
    """
    number = 0
    while line := file.readline(n_most + 1):
        number += 1
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            yield DocumentError("UTF-16, JSON lines are UTF-8; convert it", n_bytes=len(line))
            return
        sha256, n_bytes = _identity(file, line)
        whole = n_bytes <= n_most
        if whole and not line.strip():
            continue
        if known(sha256):
            yield Document(path=path, line=number, text="", sha256=sha256, n_bytes=n_bytes)
            continue
        try:
            if not whole:
                msg = f"line {number} has {n_bytes:,} bytes, at most {n_most:,} are read; split it"
                raise DocumentError(msg)
            text = _text(plain.text(line, encoding), number, field)
        except DocumentError as error:
            yield DocumentError(str(error), line=number, sha256=sha256, n_bytes=n_bytes)
        else:
            yield Document(path=path, line=number, text=text, sha256=sha256, n_bytes=n_bytes)


def _identity(file: BinaryIO, line: bytes) -> tuple[str, int]:
    """Hash and bytes of a line, of which the rest is still in the file; its end does not count."""
    hashed, kept, n_bytes = hashlib.sha256(), b"", 0
    while line:
        n_bytes += len(line)
        line = kept + line
        hashed.update(line[:-2])
        kept = line[-2:]
        line = b"" if kept.endswith(b"\n") else file.readline(CHUNK)
    hashed.update(kept.removesuffix(b"\n").removesuffix(b"\r"))
    return hashed.hexdigest(), n_bytes


def _text(line: str, number: int, field: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        msg = f"line {number} is not JSON ({error}); mend it"
        raise DocumentError(msg) from error
    if not isinstance(record, dict):
        msg = f"line {number} is no object; each must be one, as in {{{json.dumps(field)}: ...}}"
        raise DocumentError(msg)
    if field not in record:
        there = shown(", ".join(record)[:200])[:200] or "none"
        msg = f"line {number} has no field {field!r}, it has {there}; name one with --field"
        raise DocumentError(msg)
    text = record[field]
    if not isinstance(text, str):
        msg = f"line {number}: the field {field!r} is a {type(text).__name__}, not a text"
        raise DocumentError(msg)
    if not text.strip():
        msg = f"line {number}: the field {field!r} is empty; leave the line out"
        raise DocumentError(msg)
    # JSON can spell half a surrogate pair, which is no character
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
