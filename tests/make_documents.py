"""Documents of every kind, and files that only look like some: what people's folders hold."""

from __future__ import annotations

import io
import json
import os
import socket
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

STORY = "The board met on 14 March. It voted 7 to 2 for the merger."


def pdf(text: str = STORY, pages: int = 1, password: str = "", owner: str | None = None) -> bytes:
    """A PDF with a line of text on each page; no text gives blank pages."""
    writer = PdfWriter()
    for _ in range(pages):
        page = writer.add_blank_page(612, 792)
        if text:
            font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
            named = DictionaryObject({NameObject(k): NameObject(v) for k, v in font.items()})
            fonts = DictionaryObject({NameObject("/F1"): named})
            page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
            stream = DecodedStreamObject()
            stream.set_data(f"BT /F1 12 Tf 72 700 Td ({text}) Tj ET".encode())
            page[NameObject("/Contents")] = writer._add_object(stream)
    if password or owner:
        writer.encrypt(password, owner, algorithm="RC4-128")
    file = io.BytesIO()
    writer.write(file)
    return file.getvalue()


def zipped() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("report.txt", STORY)
    return file.getvalue()


def _bytes(data: bytes) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(data) and None


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(here)


def _unreadable(path: Path) -> None:
    if os.geteuid() == 0:  # whom permissions do not stop
        path.symlink_to("/proc/self/mem")
    else:
        path.write_text(STORY)
        path.chmod(0)


def _line(record: object) -> bytes:
    return json.dumps(record).encode() + b"\n"


# name of the file -> what makes it, and what is said about it
HOSTILE: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "empty.txt": (_bytes(b""), "empty"),
    "white.txt": (_bytes(b" \n\t\n"), "white space"),
    "binary.txt": (_bytes(bytes(range(256))), "not utf-8 text (byte 128)"),
    "nul.txt": (_bytes(b"abc\0def"), "NUL at character 3"),
    "latin1.txt": (_bytes("Café".encode("latin-1")), "--encoding"),
    "utf16-no-mark.txt": (_bytes(STORY.encode("utf-16-le")), "NUL"),
    "half.txt": (_bytes(b"\xff\xfea\0b"), "not utf-16-le text"),
    "broken-link.txt": (lambda path: path.symlink_to("nowhere"), "a link to a file that does not"),
    "itself.txt": (lambda path: path.symlink_to(path.name), "cannot be read"),
    "gone.txt": (lambda path: None, "no such file"),
    "folder.txt": (Path.mkdir, "a folder, not a file"),
    "pipe.txt": (_fifo, "a pipe, not a file"),
    "socket.txt": (_socket, "a socket, not a file"),
    "device.txt": (lambda path: path.symlink_to("/dev/zero"), "a device, not a file"),
    "unreadable.txt": (_unreadable, "read"),
    "name\nwith\nlines.txt": (_bytes(b""), "empty"),
    "zip.pdf": (_bytes(zipped()), "not a PDF"),
    "text.pdf": (_bytes(STORY.encode()), "not a PDF"),
    "no-pages.pdf": (_bytes(pdf(pages=0)), "without pages"),
    "scanned.pdf": (_bytes(pdf(text="", pages=3)), "3 pages without text"),
    "locked.pdf": (_bytes(pdf(password="secret")), "locked with a password"),
    "torn.pdf": (_bytes(pdf()[:300]), "damaged"),
    "header.pdf": (_bytes(b"%PDF-1.7\n" + os.urandom(999)), "damaged"),
    "script.html": (_bytes(b"<html><script>var text = 'none'</script></html>"), "without text"),
    "nul.html": (_bytes(b"<p>a\0b</p>"), "binary"),
    "deep.html": (_bytes(b"<div>" * 50_000 + b"</div>" * 50_000), "without text"),
    "tags.html": (_bytes(b"<a " * 100_000), "without text"),
    "broken.jsonl": (_bytes(b'{"text": "torn\n'), "line 1 is not JSON"),
    "no-field.jsonl": (_bytes(_line({"body": STORY})), "line 1 has no field 'text', it has body"),
    "number.jsonl": (_bytes(_line({"text": 7})), "'text' is a int, not a text"),
    "list.jsonl": (_bytes(_line([STORY])), "line 1 is no object"),
    "blank.jsonl": (_bytes(_line({"text": " "})), "'text' is empty"),
    "deep.jsonl": (_bytes(b"[" * 100_000 + b"\n"), "line 1 is not JSON"),
    "utf16.jsonl": (_bytes(json.dumps({"text": STORY}).encode("utf-16")), "UTF-16"),
}

# name of the file -> its bytes; all of them hold STORY or begin with it
GOOD: Mapping[str, bytes] = {
    "plain.txt": STORY.encode(),
    "mark.txt": b"\xef\xbb\xbf" + STORY.encode(),
    "utf16.txt": STORY.encode("utf-16"),
    "utf32.txt": STORY.encode("utf-32"),
    "notes.md": b"# Minutes\n\n" + STORY.encode(),
    "README": STORY.encode(),
    "page.html": b"<html><head><title>Minutes</title><style>p {}</style></head><body><p>The <b>"
    b"board</b> met\n on 14 March. It voted 7 to 2 for the merger.</p></body></html>",
    "report.pdf": pdf(),
    "OWNER.PDF": pdf(owner="secret"),  # encrypted, but anybody may read it
    "line.txt": (STORY + " ").encode() * 20_000,
    "word.txt": STORY.encode() + b"a" * 2**21,
}
