"""The results of a run in a file of JSON lines: what is in it is never done again.

A result is one line, on the disk before the next one begins. A run that was killed while it wrote
leaves a line without its end, which the next run cuts off. PATH.lock is held as long as the journal
is open, so nobody else reads or writes PATH meanwhile.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from filelock import FileLock, Timeout

from pyinertia.cli.whole import write_whole
from pyinertia.errors import CommandError

Record = dict[str, Any]

BEGIN = b'{"path": '  # of every line


class Journal:
    """Records of documents; one is told by its path and the hash of its content.

    Attributes:
        path: The file, as it was named.
        records: Those in the file, but for failures that are being tried again.
        is_new: Whether the file had no record when it was opened.
        n_before: Documents that were done when the file was opened.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], flags: Mapping[str, str]) -> None:
        """Open a file; one that is not there is made by the first record.

        Args:
            path: The file.
            settings: What results depend on; every record holds it.
            flags: What a setting is called on the command line.

        Raises:
            CommandError: The file cannot be written, is in use, is damaged in the middle, or was
                made with other settings.
        """
        self.path, self._settings = path, dict(settings)
        self._real = Path(os.path.realpath(path))  # a link stays one when the file is replaced
        self._file: BinaryIO | None = None
        self.records: list[Record] = []
        self.is_new = True
        self._lock = self._locked()
        try:
            found = self._read()
            self.is_new = not found
            self._compare(found, flags)
        except BaseException:
            self._unlock()
            raise
        self.records = found
        self.n_before = sum(not record["error"] for record in found)
        self._left = Counter((record["path"], record["sha256"]) for record in found)
        self._again = False

    def _locked(self) -> FileLock:
        try:
            self._real.parent.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self._real}.lock", timeout=0)
            lock.acquire()
        except Timeout as error:
            msg = f"{self.path} is in use by another run; wait for it, or pass another -o"
            raise CommandError(msg) from error
        except NotImplementedError as error:
            msg = f"{self.path} is where files cannot be locked; pass an -o on another disk"
            raise CommandError(msg) from error
        except OSError as error:
            raise self._not_written(error) from error
        return lock

    def _unlock(self) -> None:
        if self.is_new and not self.records:  # a run that was refused leaves nothing behind
            with suppress(OSError):
                Path(self._lock.lock_file).unlink()
        self._lock.release()

    def _not_written(self, error: OSError) -> CommandError:
        return CommandError(f"{self.path} cannot be written ({error.strerror}); pass another -o")

    def _read(self) -> list[Record]:
        try:
            with self._real.open("r+b") as file:
                data = file.read()
                whole = data[: data.rfind(b"\n") + 1]
                torn = data[len(whole) :]
                if torn[: len(BEGIN)] != BEGIN[: len(torn)]:  # not ours: it must not lose a byte
                    msg = (
                        f"{self.path} ends in what no run wrote; is it a document? Pass another -o"
                    )
                    raise CommandError(msg)
                records = [self._record(*line) for line in enumerate(whole.splitlines(), 1)]
                if torn:
                    file.truncate(len(whole))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise self._not_written(error) from error
        return records

    def _record(self, number: int, line: bytes) -> Record:
        try:
            record: Record = json.loads(line)
            if not {"path", "line", "sha256", "error", "settings"} <= record.keys():
                raise ValueError
        except (ValueError, AttributeError) as error:
            msg = (
                f"{self.path}, line {number} is no result of an earlier run; delete the line, or "
                "pass another -o"
            )
            raise CommandError(msg) from error
        return record

    def _compare(self, records: list[Record], flags: Mapping[str, str]) -> None:
        for record in records[:1]:
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

    def try_again(self, paths: Collection[str]) -> None:
        """Leave out the failures of these paths; they stay in the file until `finish`."""
        again = [record for record in self.records if record["error"] and record["path"] in paths]
        self._left.subtract((record["path"], record["sha256"]) for record in again)
        self._again = bool(again)
        self.records = [
            record for record in self.records if not record["error"] or record["path"] not in paths
        ]

    def knows(self, path: str, sha256: str) -> bool:
        """Whether a document needs no more work; of equal ones each may be asked for once."""
        if self._left[path, sha256] < 1:
            return False
        self._left[path, sha256] -= 1
        return True

    def add(self, record: Record) -> None:
        """Keep a record.

        Raises:
            OSError: It cannot be written.
        """
        if self._file is None:
            self._file = self._real.open("ab")
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records.append(record)

    def finish(self) -> None:
        """Drop failures that were tried again, all documents having come up; nothing is added then.

        Raises:
            OSError: The file cannot be written; it is unchanged.
        """
        self._close_file()
        if self._again:
            write_whole(self._real, map(_line, self.records))
            self._again = False

    def _close_file(self) -> None:
        if self._file is not None:  # Windows replaces no open file
            self._file.close()
            self._file = None

    def close(self) -> None:
        """Close the file, and let others have it."""
        try:
            self._close_file()
        finally:
            self._unlock()


def _line(record: Record) -> bytes:
    # what is no text, as some file names, becomes \udc.., which JSON reads back as it was
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
