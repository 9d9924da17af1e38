"""Opens a file so that nothing can hang or fill the memory, and reads its documents."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from pyinertia.documents import jsonl, plain
from pyinertia.documents.document import Document, DocumentError, hash_of
from pyinertia.documents.find import STDIN
from pyinertia.documents.formats import has_lines, reader

N_BYTES = 256 * 2**20  # most of a document; a long novel has 3 MB

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def read(
    path: str,
    *,
    field: str = "text",
    encoding: str = "utf-8",
    n_most: int = N_BYTES,
    known: Callable[[str], bool] = lambda sha256: False,
) -> Iterator[Document | DocumentError]:
    """Yield the documents of a file; one, or one per line of a JSONL file.

    What cannot be read is yielded as an error, never raised, and the rest goes on.

    Args:
        path: The file, "-" for stdin, which is plain text.
        field: The field of a JSON line that holds the text.
        encoding: Of text without a byte order mark.
        n_most: Most bytes of a document.
        known: Whether a document with this hash is known; its text is then left empty.
    """
    try:
        with _opened(path) as file:
            if has_lines(path):
                yield from jsonl.documents(file, path, field, encoding, n_most, known)
            else:
                yield _whole(file, path, encoding, n_most, known)
    except OSError as error:
        yield DocumentError(_why(path, error))


def _whole(
    file: BinaryIO, path: str, encoding: str, n_most: int, known: Callable[[str], bool]
) -> Document | DocumentError:
    data = file.read(n_most + 1)
    facts: dict[str, Any] = {"sha256": hash_of(data), "n_bytes": len(data)}
    if known(facts["sha256"]):
        return Document(path=path, line=0, text="", **facts)
    convert = plain.text if path == STDIN else reader(path)
    try:
        if len(data) > n_most:
            msg = f"more than {n_most:,} bytes; split it"
            raise DocumentError(msg)
        if not data:
            msg = "empty; leave it out"
            raise DocumentError(msg)
        text = convert(data, encoding)
        if not text.strip():
            msg = "nothing but white space; leave it out"
            raise DocumentError(msg)
    except DocumentError as error:
        return DocumentError(str(error), **facts)
    except RecursionError:
        return DocumentError("nested too deeply to be read", **facts)
    except Exception as error:  # parsers of files from everywhere fail in every way
        reason = f"damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        return DocumentError(reason, **facts)
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Document(path=path, line=0, text=text, **facts)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    """Open a regular file for reading, and nothing else.

    Raises:
        OSError: It cannot be opened, or it is something else.
    """
    if path == STDIN:
        yield sys.stdin.buffer
        return
    # opening a pipe would wait for its other end
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(0, f"{_KINDS.get(stat.S_IFMT(mode), 'no file')}, not a file")
        yield file


def _why(path: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        if os.path.lexists(path):
            return "a link to a file that does not exist"
        return "there is no such file, or no longer"
    if isinstance(error, PermissionError):
        return "you may not read it; check its permissions"
    try:
        kind = _KINDS.get(stat.S_IFMT(os.stat(path).st_mode))  # noqa: PTH116
    except OSError:
        kind = None
    return f"{kind}, not a file" if kind else f"it cannot be read ({error.strerror})"
