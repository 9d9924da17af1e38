"""Text that every Python installation has: the topics of its own help."""

from __future__ import annotations

import functools
import pydoc_data.topics
import re


@functools.cache
def article() -> str:
    """All topics in one text, markup included."""
    topics = (text.strip() for _, text in sorted(pydoc_data.topics.topics.items()))
    return "\n\n".join(topics)


@functools.cache
def sentences() -> tuple[str, ...]:
    """Sentences without digits, so that no number in them is mistaken for an answer."""
    found: dict[str, None] = {}
    for paragraph in re.split(r"\n\s*\n", article()):
        text = re.sub(r"(?<=\w)- (?=\w)", "-", " ".join(paragraph.split()))
        for sentence in re.split(r"(?<=[.!?]) ", text):
            if re.fullmatch(r"[A-Z][^\W\d_][^\d_<>|{}\[\]=]{40,240}\.", sentence):
                found[sentence] = None
    return tuple(found)


@functools.cache
def words() -> tuple[str, ...]:
    """Lower-case words of 4 to 10 letters, by the alphabet."""
    found = re.findall(r"(?<![\w.`*:'-])[a-z]{4,10}(?![\w`*:'(-])", article())
    return tuple(sorted(set(found)))
