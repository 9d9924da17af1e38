"""README and the pages of docs/, as tests read them."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
README = "README.md"
PAGES = [README, *sorted(path.relative_to(ROOT).as_posix() for path in DOCS.rglob("*.md"))]

PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def section(page: str, title: str) -> str:
    """The text under a heading of the second level."""
    return read(page).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def anchors(path: Path) -> set[str]:
    """What a link to a page may name: its headings, as the site writes them, and its objects."""
    text = path.read_text(encoding="utf-8")
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    words = [re.sub(r"[^\w\s-]", "", title).strip().lower() for title in titles]
    return {re.sub(r"[\s-]+", "-", title) for title in words} | {*objects(text)}


def objects(text: str) -> list[str]:
    """The names whose docstrings a page shows."""
    return re.findall(r"^::: (\S+)$", text, re.M)


def table_rows(text: str) -> list[list[str]]:
    """The cells of all lines of tables, without backticks."""
    return [
        [cell.strip().strip("`") for cell in line.strip().strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def python(page: str) -> list[str]:
    """The blocks of Python, in their order."""
    return PYTHON.findall(read(page))


def commands(page: str) -> list[list[str]]:
    """The words of the command lines, which are indented by four."""
    text = read(page).replace("\\\n", " ")
    lines = re.findall(r"^ {4}(\S.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.M)
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def python_with(page: str, word: str) -> str:
    """The one block of Python that has this word."""
    (example,) = (block for block in python(page) if word in block)
    return example


def shell(page: str, command: str) -> list[list[str]]:
    """The words of the lines of the one indented block that begins with this command."""
    blocks = re.findall(r"(?:^    \S.*\n)+", read(page), re.M)
    (example,) = (one for one in map(textwrap.dedent, blocks) if one.startswith(command))
    return [shlex.split(line) for line in example.splitlines()]
