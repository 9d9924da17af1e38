"""Which files there are: files, folders, globs and stdin."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pyinertia.documents.document import shown
from pyinertia.documents.formats import FORMATS
from pyinertia.errors import CommandError

STDIN = "-"


@dataclass(frozen=True, slots=True)
class Source:
    """A file that will be read; n_bytes is 0 where nobody knows yet."""

    path: str
    n_bytes: int


def find(names: Iterable[str], notice: Callable[[str], None] = lambda text: None) -> list[Source]:
    """List what is named, each file once, folders by the alphabet.

    A file that is named is taken whatever it is called, and even if it is not there: reading it
    says why not. A folder gives its files of known formats, those of folders in it too, but for
    names that start with a dot; links to folders are followed, never in circles.

    Args:
        names: Paths of files and folders, globs that no shell has expanded, or "-" for stdin.
        notice: Is told what was left out.

    Raises:
        CommandError: There is nothing, or a glob matches nothing.
    """
    found: dict[str, Source] = {}
    left_out: Counter[str] = Counter()
    for name in names:
        for path in _named(name):
            if path != STDIN and os.path.isdir(path):  # noqa: PTH112 - paths stay text
                for file in _walk(path, left_out, notice):
                    found.setdefault(file, Source(file, _size(file)))
            else:
                found.setdefault(path, Source(path, _size(path)))
    if left_out:
        kinds = ", ".join(f"{n} {kind}" for kind, n in sorted(left_out.items()))
        notice(f"left out, as of no known format: {kinds}; name a file to read it as text")
    if not found:
        msg = f"no document in {', '.join(map(shown, names))}; known are {', '.join(FORMATS)}"
        raise CommandError(msg)
    return list(found.values())


def _named(name: str) -> list[str]:
    if name == STDIN:
        return [STDIN]
    if not os.path.lexists(name) and glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207 - paths stay text
        if not matches:
            msg = f"{shown(name)} matches no file"
            raise CommandError(msg)
        return [os.path.normpath(match) for match in matches]
    return [os.path.normpath(name)]


def _walk(folder: str, left_out: Counter[str], notice: Callable[[str], None]) -> Iterator[str]:
    def unreadable(error: OSError) -> None:
        notice(f"{shown(str(error.filename))}: {error.strerror}, the folder is left out")

    entered: set[tuple[int, int]] = set()
    for parent, folders, files in os.walk(folder, followlinks=True, onerror=unreadable):
        status = os.stat(parent)  # noqa: PTH116
        key = (status.st_dev, status.st_ino)
        if key in entered:  # a link led back here
            folders.clear()
            continue
        entered.add(key)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            kind = Path(name).suffix.lower()
            if name.startswith("."):
                continue
            if kind in FORMATS:
                yield os.path.normpath(os.path.join(parent, name))  # noqa: PTH118
            else:
                left_out[kind or "without a suffix"] += 1


def _size(path: str) -> int:
    try:
        return 0 if path == STDIN else os.stat(path).st_size  # noqa: PTH116
    except OSError:
        return 0
