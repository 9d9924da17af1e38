"""A pile of documents on its way through a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyinertia.cli.journal import Journal, Record
from pyinertia.cli.progress import Meter
from pyinertia.cli.sinks import NotWrittenError, Sink, name_of
from pyinertia.documents import Document, DocumentError, Source, read, shown

if TYPE_CHECKING:
    from pyinertia.batch import Summary

# texts in, summaries in any order out, told by the number of the text
Summarise = Callable[[Iterator[str]], Iterator["Summary"]]
COUNTS = ("n_tokens", "n_parts", "n_levels", "n_prompt", "n_generated", "n_evicted")


class Pile:
    """Reads documents when the model has room for them, and keeps what becomes of each."""

    def __init__(
        self,
        sources: Iterable[Source],
        sink: Sink,
        meter: Meter,
        journal: Journal | None,
        settings: Mapping[str, Any],
    ) -> None:
        """Read nothing yet."""
        self._sources, self._sink, self._meter = sources, sink, meter
        self._journal, self._settings = journal, dict(settings)
        self._reading: dict[int, Document] = {}  # by number, without their texts

    def work(self, summarise: Summarise) -> None:
        """Do all documents that are not done yet; a stop in between loses none that is done."""
        for record in self._sink.missing(self._journal.records if self._journal else ()):
            if why := self._put(record):
                self._meter.failed(name_of(record), 0, why)
        texts = self._texts()
        for first in texts:  # without one, no model is loaded
            with closing(summarise(chain([first], texts))) as summaries:  # type: ignore[type-var]
                for summary in summaries:
                    self._take(summary)

    def _texts(self) -> Iterator[str]:
        number = 0
        for source in self._sources:
            path = source.path
            for found in read(
                path,
                field=str(self._settings["field"]),
                encoding=str(self._settings["encoding"]),
                known=partial(self._knows, path),
            ):
                if isinstance(found, DocumentError):
                    self._fail(path, found)
                elif not found.text:
                    self._meter.skip(found.n_bytes)
                else:
                    self._reading[number] = Document(
                        path=path,
                        line=found.line,
                        text="",
                        sha256=found.sha256,
                        n_bytes=found.n_bytes,
                    )
                    number += 1
                    yield found.text

    def _knows(self, path: str, sha256: str) -> bool:
        return self._journal is not None and self._journal.knows(path, sha256)

    def _fail(self, path: str, error: DocumentError) -> None:
        if not error.sha256 and self._knows(path, ""):
            return
        self._keep(path, error.line, error.sha256, error=str(error))
        self._meter.failed(shown(path), error.n_bytes, str(error))

    def _take(self, summary: Summary) -> None:
        document = self._reading.pop(summary.index)
        facts = {count: getattr(summary, count) for count in COUNTS}
        facts["seconds"] = round(summary.seconds, 3)
        record, why = self._keep(
            document.path,
            document.line,
            document.sha256,
            summary=summary.text,
            finish_reason=summary.finish_reason,
            error=summary.error,
            **facts,
        )
        name = name_of(record)
        if summary.error or why:
            self._meter.failed(name, document.n_bytes, summary.error or why)
        else:
            dropped = f", {summary.n_evicted:,} dropped" if summary.n_evicted else ""
            what = f"{summary.n_tokens:,} tokens{dropped}"
            self._meter.done(name, document.n_bytes, what)

    def _keep(self, path: str, line: int, sha256: str, **rest: Any) -> tuple[Record, str]:
        record: Record = {"path": path, "line": line, "sha256": sha256, **rest}
        record["settings"] = self._settings
        if self._journal is not None:  # first, for the output can be made from it
            self._journal.add(record)
        return record, self._put(record)

    def _put(self, record: Record) -> str:
        try:
            self._sink.put(record)
        except NotWrittenError as error:
            return str(error)
        return ""
