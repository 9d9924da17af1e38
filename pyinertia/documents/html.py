"""HTML: what a reader would see, by paragraphs."""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from contextlib import suppress

from pyinertia.documents import plain
from pyinertia.documents.document import DocumentError

HIDDEN = frozenset({"head", "script", "style", "template", "noscript", "svg"})
BLOCKS = frozenset(
    {
        *("address", "article", "aside", "blockquote", "body", "caption", "dd", "div", "dl", "dt"),
        *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header"),
        *("hr", "li", "main", "nav", "ol", "p", "pre", "section", "table", "td", "th", "tr", "ul"),
    }
)
BREAK = "\0"  # of a line; those of the source are mere white space
_CHARSET = re.compile(rb"""<meta[^>]{0,200}charset\s*=\s*["']?([\w.:-]{1,40})""", re.IGNORECASE)


def text(data: bytes, encoding: str) -> str:
    """Return the title and the visible text; the page's own encoding wins over the given one.

    Raises:
        DocumentError: lxml is not installed, it is binary, in another encoding, or has no text.
    """
    try:
        from lxml import etree
    except ImportError as error:
        msg = "HTML needs lxml; pip install 'pyinertia[documents]'"
        raise DocumentError(msg) from error
    page = _Page()
    parser = etree.HTMLParser(target=page, encoding="utf-8", huge_tree=True)
    with suppress(etree.XMLSyntaxError):  # there is not even a tag; the text is empty then
        etree.fromstring(_decoded(data, encoding).encode(), parser)
    lines = (" ".join(line.split()) for line in "".join(page.seen).split(BREAK))
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()
    if not body:
        msg = "a page without text (is it made by a script?); save it as the browser shows it"
        raise DocumentError(msg)
    title = " ".join("".join(page.title).split())
    return body if body.startswith(title) else f"{title}\n\n{body}"


def _decoded(data: bytes, encoding: str) -> str:
    if data.startswith(tuple(mark for mark, _ in plain.MARKS)):
        return plain.text(data, encoding)
    if found := _CHARSET.search(data[:4096]):
        with suppress(LookupError):
            named = codecs.lookup(found[1].decode()).name
            if not named.startswith(("utf-16", "utf-32")):  # it could be read, so it is neither
                encoding = named
    page = data.decode(encoding, "replace")
    if "\0" in page:
        msg = "binary, not HTML (a NUL in it); leave it out"
        raise DocumentError(msg)
    # a browser shows a page with a stray byte; one of another encoding is full of them
    if page.count("\ufffd") > 1 + len(page) // 1000:
        msg = f"not {encoding} text; convert it, or say what it is with --encoding"
        raise DocumentError(msg)
    return page


class _Page:
    """Collects text as the parser meets it; no tree, so that no nesting is too deep."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.title: list[str] = []
        self._in_title = False
        self._hidden: list[str] = []

    def start(self, tag: str, attributes: Mapping[str, str]) -> None:
        if tag == "body":  # whatever was left open before
            self._hidden.clear()
        if tag == "title" and "svg" not in self._hidden:
            self._in_title = True
        elif tag in HIDDEN:
            self._hidden.append(tag)
        elif tag == "br":
            self.seen.append(BREAK)
        elif tag in BLOCKS:
            self.seen.append(BREAK * 2)

    def end(self, tag: str) -> None:
        if tag == "title":
            self._in_title = False
        elif tag in self._hidden:
            while self._hidden.pop() != tag:
                pass
        elif tag in BLOCKS:
            self.seen.append(BREAK * 2)

    def data(self, text: str) -> None:
        if self._in_title:
            self.title.append(text)
        elif not self._hidden:
            self.seen.append(text)

    def close(self) -> None:
        """What the parser calls last."""
