"""The examples of README.md, to be run as they stand."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def python_example(word: str) -> str:
    """The one block of Python that has this word."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    (example,) = (block for block in blocks if word in block)
    return example


def shell_example(command: str) -> list[str]:
    """The lines of the one indented block that begins with this command."""
    blocks = re.findall(r"(?:^    \S.*\n)+", README, re.MULTILINE)
    (example,) = (one for one in map(textwrap.dedent, blocks) if one.startswith(command))
    return example.splitlines()
