"""The results of a run in a file of JSON lines: what is in it is never done again.

A result is one line, on the disk before the next one begins. A run that was killed while it wrote
leaves a line without its end, which the next run cuts off.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pyinertia.errors import CommandError

Record = dict[str, Any]

BEGIN = b'{"path": '  # of every line


class Journal:
    """Records of documents; one is told by its path and the hash of its content.

    Attributes:
        records: Those in the file, failures that will be tried again left out.
        n_before: Documents that were done when the file was opened.
    """

    def __init__(
        self, path: Path, settings: Mapping[str, Any], flags: Mapping[str, str], retry: bool
    ) -> None:
        """Open a file, or start one.

        Args:
            path: The file.
            settings: What results depend on; every record holds it.
            flags: What a setting is called on the command line.
            retry: Whether what failed is tried again.

        Raises:
            CommandError: The file cannot be written, is in use, is damaged in the middle, or was
                made with other settings.
        """
        self.path, self._settings = path, dict(settings)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            msg = f"{path} cannot be written ({error.strerror}); pass another -o"
            raise CommandError(msg) from error
        try:
            self._lock()
            self.records = self._read()
            self._compare(flags)
            if retry and any(record["error"] for record in self.records):
                self.records = [record for record in self.records if not record["error"]]
                self._rewrite()
        except BaseException:
            self._file.close()
            raise
        self._left = Counter((record["path"], record["sha256"]) for record in self.records)
        self.n_before = sum(not record["error"] for record in self.records)

    def _lock(self) -> None:
        with suppress(ImportError):  # Windows
            import fcntl

            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                msg = f"{self.path} is in use by another run; wait for it, or pass another -o"
                raise CommandError(msg) from error

    def _read(self) -> list[Record]:
        self._file.seek(0)
        data = self._file.read()
        whole = data[: data.rfind(b"\n") + 1]
        torn = data[len(whole) :]
        if torn[: len(BEGIN)] != BEGIN[: len(torn)]:  # no run of ours: it must not lose a byte
            msg = f"{self.path} ends in what no run wrote; is it a document? Pass another -o"
            raise CommandError(msg)
        records = []
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                if not {"path", "sha256", "error", "settings"} <= record.keys():
                    raise ValueError
            except (ValueError, AttributeError) as error:
                msg = (
                    f"{self.path}, line {number} is no result of an earlier run; delete the line, "
                    "or pass another -o"
                )
                raise CommandError(msg) from error
            records.append(record)
        if torn:
            self._file.truncate(len(whole))
        return records

    def _compare(self, flags: Mapping[str, str]) -> None:
        for record in self.records[:1]:
            before = record["settings"]
            different = [
                f"{flags.get(key, key)} {before.get(key)!r}, now {self._settings.get(key)!r}"
                for key in {**before, **self._settings}
                if before.get(key) != self._settings.get(key)
            ]
            if different:
                msg = (
                    f"{self.path} was made with {'; '.join(different)}. Pass the same to go on, or "
                    "another -o to start anew"
                )
                raise CommandError(msg)

    def _rewrite(self) -> None:
        # in place of the file under its lock: what is lost by a kill here are failures, which are
        # tried again anyway, so a copy that replaces the file must be whole before it does
        beside = self.path.with_name(self.path.name + ".part")
        with beside.open("wb") as file:
            for record in self.records:
                file.write(_line(record))
            file.flush()
            os.fsync(file.fileno())
        beside.replace(self.path)
        self._file.close()
        self._file = self.path.open("a+b")
        self._lock()

    def knows(self, path: str, sha256: str) -> bool:
        """Whether a document needs no more work; of equal ones each may be asked for once."""
        if self._left[path, sha256] < 1:
            return False
        self._left[path, sha256] -= 1
        return True

    def add(self, record: Record) -> None:
        """Keep a record."""
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _line(record: Record) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # a file name that is no text
        return json.dumps(record).encode() + b"\n"
