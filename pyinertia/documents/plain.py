"""Plain text and Markdown, which a model reads as it is."""

from __future__ import annotations

import codecs

from pyinertia.documents.document import DocumentError

# a byte order mark says more than anybody else; UTF-32's begins with that of UTF-16
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)


def text(data: bytes, encoding: str) -> str:
    """Decode bytes.

    Raises:
        DocumentError: They are no text in this encoding.
    """
    mark, encoding = next(
        ((mark, name) for mark, name in MARKS if data.startswith(mark)), (b"", encoding)
    )
    try:
        decoded = data[len(mark) :].decode(encoding)
    except (UnicodeError, LookupError) as error:
        start = getattr(error, "start", None)
        where = error if start is None else f"byte {start + len(mark)}"
        msg = f"not {encoding} text ({where}); convert it, or say what it is with --encoding"
        raise DocumentError(msg) from error
    if "\0" in decoded:
        msg = f"binary, not text (a NUL at character {decoded.index(chr(0))}); leave it out"
        raise DocumentError(msg)
    return decoded
