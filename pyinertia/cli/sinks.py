"""Where summaries go: JSON lines, one Markdown file, or a file per document."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import IO, Protocol

from pyinertia.cli.journal import Record
from pyinertia.documents import STDIN, shown
from pyinertia.errors import CommandError

JSONL, MARKDOWN, FILES = FORMATS = ("jsonl", "markdown", "files")
JOURNAL = "summaries.jsonl"  # in the folder of files


class Sink(Protocol):
    """Takes results as they come."""

    def put(self, record: Record) -> None:
        """Take a result, before it is in the journal; again if that run was killed meanwhile."""

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


def open_sink(form: str, out: Path | None, before: Iterable[Record]) -> Sink:
    """Open the output; what an earlier run did is in it.

    Raises:
        CommandError: It cannot be written.
    """
    if form == FILES and out is not None:
        return _Files(out)
    if form == JSONL:
        return _Lines() if out is None else _Nowhere()
    if out is None:
        return _Markdown(sys.stdout)
    records = list(before)
    if not records and out.exists() and out.stat().st_size:
        msg = f"-o {out} is there and no earlier run wrote it; delete it, or pass another -o"
        raise CommandError(msg)
    try:
        file = out.open("w", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        msg = f"-o {out} cannot be written ({error.strerror}); pass another one"
        raise CommandError(msg) from error
    sink = _Markdown(file)
    for record in records:
        sink.put(record)
    return sink


class _Nowhere:
    """The journal is the output."""

    def put(self, record: Record) -> None:
        pass

    def close(self) -> None:
        pass


class _Lines:
    """JSON lines on stdout."""

    def put(self, record: Record) -> None:
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        pass


class _Markdown:
    """A heading and a summary per document."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

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

    def put(self, record: Record) -> None:
        if record["error"]:
            return
        path = self._folder / file_name(record["path"], record["line"])
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(path.name + ".part")
        with closing(beside.open("w", encoding="utf-8", errors="backslashreplace")) as file:
            file.write(markdown(record))
        beside.replace(path)

    def close(self) -> None:
        pass


def markdown(record: Record) -> str:
    """A result for people."""
    title = "stdin" if record["path"] == STDIN else shown(record["path"])
    if record["line"]:
        title += f", line {record['line']}"
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


def file_name(path: str, line: int) -> str:
    """The file for a document, relative to the folder; no two documents have the same."""
    special = {"..": "__", Path(path).anchor: "_root"}
    name = "/".join(special.get(part, part) for part in Path(path).parts)
    if path == STDIN:
        name = "stdin"
    if line:
        name += f".{line}"
    if len(name.rpartition("/")[2].encode(errors="replace")) > 240:  # a name has at most 255 bytes
        digest = hashlib.sha256(path.encode(errors="surrogateescape")).hexdigest()[:16]
        folder, slash, last = name.rpartition("/")
        name = f"{folder}{slash}{last.encode()[:200].decode(errors='ignore')}.{digest}"
    return f"{name}.md"
