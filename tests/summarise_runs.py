"""What the tests of `summarise` share: a pile of documents, and a run over them."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from pyinertia.cli import app

# -c has room for the instruction in bytes, two summaries and some text
ARGUMENTS = [
    "-t",
    "1",
    "-np",
    "3",
    "-c",
    "768",
    "--temp",
    "0",
    "-n",
    "8",
    "--instruction",
    "Sum up",
]


def make_pile(folder: Path) -> Path:
    """Ten texts and a file of three lines."""
    docs = folder / "docs"
    (docs / "sub").mkdir(parents=True)
    for i in range(10):
        (docs / f"{i}.txt").write_text(f"This is document {i}. " * (i + 1))
    lines = [json.dumps({"text": text}) for text in ("first line", "same", "same")]
    (docs / "sub" / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return docs


def run(tiny: Path, *args: str | Path, code: int = 0, stdin: str = "") -> Any:
    """Run the command in this process."""
    given = [str(arg) for arg in ("summarise", *args, "-m", tiny, *ARGUMENTS)]
    done = CliRunner().invoke(app, given, input=stdin)
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def records(path: Path | str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def identities(found: list[dict]) -> Counter:
    return Counter((record["path"], record["sha256"]) for record in found)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def expected(folder: Path) -> Counter:
    """What there is, hashed here."""
    found: Counter = Counter()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        parts = [path.read_bytes()]
        if path.suffix == ".jsonl":
            parts = path.read_bytes().splitlines()
        found.update((os.path.relpath(path), sha256(part)) for part in parts)
    return found
