"""Measured samples in a file of JSON lines: what is in it is never measured again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyinertia.errors import EvalError

# everything that identifies a sample, and what was measured on it
Identity = Mapping[str, Any]
Result = dict[str, Any]


class Store:
    """Results by sample. Every one is on the disk before the next is measured."""

    def __init__(self, path: Path) -> None:
        """Open a file, or start one.

        Raises:
            EvalError: The file cannot be written, or a line other than the last is damaged.
        """
        self._path = path
        self._results: dict[str, Result] = {}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as error:
            msg = f"--out {path.parent}: {error.strerror}; choose a folder that can be written"
            raise EvalError(msg) from error
        try:
            self._read()
        except EvalError:
            self._file.close()
            raise

    def _read(self) -> None:
        self._file.seek(0)
        text = self._file.read()
        # a run that was killed while it wrote leaves a line without its end
        whole = text[: text.rfind(b"\n") + 1]
        if len(whole) < len(text):
            self._file.truncate(len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                record = json.loads(line)
                self._results[_key(record["sample"])] = record["result"]
            except (ValueError, KeyError, TypeError) as error:
                msg = f"{self._path}, line {number} is damaged; delete that line and run again"
                raise EvalError(msg) from error

    def get(self, sample: Identity) -> Result | None:
        """What was measured on a sample, None if nothing was."""
        return self._results.get(_key(sample))

    def add(self, sample: Identity, result: Result) -> None:
        """Keep a result."""
        line = json.dumps({"sample": dict(sample), "result": result}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._results[_key(sample)] = result

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _key(sample: Identity) -> str:
    return json.dumps(dict(sample), sort_keys=True)
