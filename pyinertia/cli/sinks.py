"""Where summaries go: JSON lines, one Markdown file, or a file per document.

The journal has every result first. What it has and the output lacks is put there when the output is
opened, so nothing that happens to the output loses a result.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Protocol

from pyinertia.cli.journal import Journal, Record
from pyinertia.cli.whole import write_whole
from pyinertia.documents import STDIN, has_lines, shown
from pyinertia.errors import CommandError, PyInertiaError

JSONL, MARKDOWN, FILES = FORMATS = ("jsonl", "markdown", "files")
JOURNAL = "summaries.jsonl"  # in the folder of files

# a folder of documents that is called as a file of ours could be
_LIKE_OURS = re.compile(r"\.(md|jsonl)(\.part|\.lock)?$", re.IGNORECASE)
# the end of a name that holds a hash
_HASHED = re.compile(r"\.([0-9a-f]{8}|[0-9a-f]{16})$")


class NotWrittenError(PyInertiaError):
    """One result has no place in the output, others may have."""


class Sink(Protocol):
    """Takes results as they come."""

    def missing(self, records: Iterable[Record]) -> Iterable[Record]:
        """Those of earlier runs that the output lacks, oldest first."""

    def put(self, record: Record) -> None:
        """Take a result that the journal has.

        Raises:
            NotWrittenError: There is no place for it.
            OSError: There is no place for any.
        """

    def close(self) -> None:
        """Take no more."""


def journal_path(form: str, out: Path | None) -> Path | None:
    """Where the journal of an output is; None if it goes to stdout.

    Raises:
        CommandError: The format is unknown, or needs a place.
    """
    if form not in FORMATS:
        msg = f"--format {form}: must be one of {', '.join(FORMATS)}"
        raise CommandError(msg)
    if out is None:
        if form == FILES:
            msg = "--format files needs a folder; pass it with -o"
            raise CommandError(msg)
        return None
    if form == FILES:
        if out.exists() and not out.is_dir():
            msg = f"-o {out} is a file, --format files needs a folder"
            raise CommandError(msg)
        return out / JOURNAL
    if out.is_dir():
        msg = f"-o {out} is a folder; pass a file, or --format files"
        raise CommandError(msg)
    return out if form == JSONL else out.with_name(out.name + ".jsonl")


def written(form: str, out: Path, records: Iterable[Record]) -> Iterator[Path]:
    """The files that a run with these records writes, or has written."""
    yield journal_path(form, out) or out
    if form == MARKDOWN:
        yield out
    if form == FILES:
        yield from (out / file_name(record) for record in records if not record["error"])


def open_sink(form: str, out: Path | None, journal: Journal | None, paths: Iterable[str]) -> Sink:
    """Open the output for the results of some documents.

    Raises:
        CommandError: It cannot be written, or holds what no earlier run wrote.
    """
    if out is None or journal is None:
        return _Markdown(sys.stdout) if form == MARKDOWN else _Lines()
    if form == JSONL:
        return _Nowhere()
    if form == FILES:
        ours = {*written(form, out, journal.records)}
        for path in paths:
            if has_lines(path):  # nobody else calls a file as those of lines are
                continue
            file = out / file_name({"path": path, "line": 0})
            if file not in ours and os.path.lexists(file):
                raise _foreign(file)
        return _Files(out)
    if journal.is_new and out.exists() and out.stat().st_size:
        raise _foreign(out)
    try:
        return _Markdown(out.open("w", encoding="utf-8", errors="backslashreplace"))
    except OSError as error:
        msg = f"-o {out} cannot be written ({error.strerror}); pass another one"
        raise CommandError(msg) from error


def _foreign(path: Path) -> CommandError:
    msg = f"{path} is there and no earlier run wrote it; move or delete it, or pass another -o"
    return CommandError(msg)


class _Nowhere:
    """The journal is the output."""

    def missing(self, records: Iterable[Record]) -> Iterable[Record]:
        return ()

    def put(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """JSON lines on stdout."""

    def missing(self, records: Iterable[Record]) -> Iterable[Record]:
        return ()

    def put(self, record: Record) -> None:
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        pass


class _Markdown:
    """A heading and a summary per document, in a file that is made anew each time."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def missing(self, records: Iterable[Record]) -> Iterable[Record]:
        return records

    def put(self, record: Record) -> None:
        self._file.write(markdown(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        if self._file is not sys.stdout:
            self._file.close()


class _Files:
    """A Markdown file per document, in folders as the documents are."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def missing(self, records: Iterable[Record]) -> Iterable[Record]:
        """Those without a file, or whose file is of an older content; what was edited stays."""
        results: dict[str, list[Record]] = {}
        for record in records:
            if not record["error"]:
                results.setdefault(file_name(record), []).append(record)
        for name, (*older, newest) in results.items():
            try:
                there = (self._folder / name).read_bytes()
            except OSError:
                yield newest
            else:
                if there in map(_encoded, older):
                    yield newest

    def put(self, record: Record) -> None:
        if record["error"]:
            return
        path = self._folder / file_name(record)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, [_encoded(record)])
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            msg = f"{shown(str(path))} cannot be written ({error.strerror}); the journal has it"
            raise NotWrittenError(msg) from error

    def close(self) -> None:
        pass


def _encoded(record: Record) -> bytes:
    return markdown(record).encode(errors="backslashreplace")


def markdown(record: Record) -> str:
    """A result for people."""
    title = name_of(record)
    if record["error"]:
        return f"## {title}\n\nNot summarised: {record['error']}\n"
    how = f"{record['n_tokens']:,} tokens"
    if record["n_parts"] > 1:
        how += f", read in {record['n_parts']} parts"
    if record["n_evicted"]:
        how += f"; {record['n_evicted']:,} left the cache while it was read"
    if record["finish_reason"] == "length":
        how += "; the summary was cut off"
    return f"## {title}\n\n{record['summary']}\n\n*{how}.*\n"


def name_of(record: Record) -> str:
    """What people call a document, in one line."""
    name = "stdin" if record["path"] == STDIN else shown(record["path"])
    return f"{name}, line {record['line']}" if record["line"] else name


def file_name(record: Record) -> str:
    """The file for a result, relative to the folder.

    It is the document's path. A line of a JSONL file is told by its number and its content, for the
    next edit may move it. A path that has no place in the folder as it is, or that could be
    another's, has its hash in the name. So no two documents have the same file.
    """
    path, line = record["path"], record["line"]
    *folders, last = [_inside(part, path) for part in Path(path).parts]
    folders = [_LIKE_OURS.sub("_", part) for part in folders]
    if path == STDIN:
        last = "stdin"
    tail = f".{line}.{record['sha256'][:8]}" if line else ""
    other = "/".join([*folders, last]) != Path(path).as_posix() or _HASHED.search(last)
    if other or len(last.encode(errors="replace")) + len(tail) > 240:  # of the 255 a name has
        last = f"{last.encode(errors='ignore')[:200].decode(errors='ignore')}.{_hash(path)}"
    return "/".join([*folders, f"{last}{tail}.md"])


def _inside(part: str, path: str) -> str:
    """A part of a path that leads nowhere else."""
    return {"..": "__", Path(path).anchor: "_root"}.get(part, part)


def _hash(path: str) -> str:
    return hashlib.sha256(path.encode(errors="surrogatepass")).hexdigest()[:16]
