"""Files that are whole or not there, whatever happens while they are written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a file; it is unchanged, and nothing is left beside it, if that does not work.

    Raises:
        OSError: It cannot be written.
    """
    beside = path.with_name(path.name + ".part")
    file = beside.open("wb")
    try:
        with file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
