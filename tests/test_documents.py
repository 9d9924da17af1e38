"""Reading documents: what is found, what it says, and one line about everything else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import make_documents
import pytest
from make_documents import GOOD, HOSTILE, STORY

from pyinertia.documents import Document, DocumentError, find, read, shown
from pyinertia.errors import CommandError


def only(found) -> Document | DocumentError:
    (one,) = found
    return one


@pytest.mark.parametrize("name", HOSTILE, ids=shown)
def test_what_is_no_document_gives_one_readable_line(name, tmp_path):
    make, says = HOSTILE[name]
    path = tmp_path / name
    make(path)
    start = time.monotonic()
    found = only(read(str(path)))
    assert isinstance(found, DocumentError)
    assert says in str(found)
    assert "\n" not in str(found)
    assert len(str(found)) < 400
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("name", GOOD)
def test_documents_are_their_text(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(GOOD[name])
    found = only(read(str(path)))
    assert isinstance(found, Document)
    assert STORY in found.text
    assert "\ufeff" not in found.text
    assert found.path == str(path)
    assert found.sha256 == hashlib.sha256(GOOD[name]).hexdigest()
    assert found.n_bytes == len(GOOD[name])


def test_html_is_what_a_reader_sees(tmp_path):
    path = tmp_path / "a.html"
    path.write_text(
        "<title>T</title><body><script>x</script><h1>One</h1><p>two <i>thr</i>ee<br>four</p>"
        "<ul><li>five</li><li>six &amp; seven</li></ul><!-- eight --></body>"
    )
    text = only(read(str(path))).text
    assert text.split("\n\n") == ["T", "One", "two three\nfour", "five", "six & seven"]


def test_a_page_says_its_own_encoding(tmp_path):
    path = tmp_path / "a.html"
    path.write_bytes('<meta charset="windows-1252"><p>Café</p>'.encode("windows-1252"))
    assert only(read(str(path))).text == "Café"


def test_another_encoding_may_be_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("Café".encode("latin-1"))
    assert only(read(str(path), encoding="latin-1")).text == "Café"


def test_a_pdf_is_all_its_pages(tmp_path):
    path = tmp_path / "a.pdf"
    path.write_bytes(make_documents.pdf(pages=2))
    assert only(read(str(path))).text == f"{STORY}\n\n{STORY}"


def test_jsonl_is_a_document_per_line_and_a_broken_line_spoils_no_other(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [{"text": "one"}, {"body": "two"}, {"text": "thr\ud800ee"}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n\n{"text": \n{"text": "last"}')
    one, two, three, torn, last = read(str(path))
    assert (one.text, one.line) == ("one", 1)
    assert isinstance(two, DocumentError)
    assert two.line == 2
    assert three.text == "thr\ufffdee"
    assert isinstance(torn, DocumentError)
    assert torn.line == 5
    assert (last.text, last.line) == ("last", 6)
    assert one.sha256 != last.sha256
    assert [d.text for d in read(str(path), field="body") if isinstance(d, Document)] == ["two"]


def test_what_is_too_large_is_not_read(tmp_path):
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_bytes(b"a" * 2000)
    lines.write_bytes(b'{"text": "' + b"a" * 2000 + b'"}\n{"text": "b"}\n')
    assert "more than 1,000 bytes" in str(only(read(str(text), n_most=1000)))
    long, short = read(str(lines), n_most=1000)
    assert "line 1 has 2,013 bytes" in str(long)
    assert short.text == "b"


def test_stdin_is_one_text():
    code = "from pyinertia.documents import read; [d] = read('-'); print(d.text, d.path)"
    done = subprocess.run([sys.executable, "-c", code], input=STORY, capture_output=True, text=True)
    assert done.stdout == f"{STORY} -\n"


def test_a_folder_gives_known_formats_by_the_alphabet(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.PDF", ".hidden.txt", "x.png", "y.png", ".git/d.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"12345")
    told: list[str] = []
    found = find([str(tmp_path)], told.append)
    names = [os.path.relpath(source.path, tmp_path) for source in found]
    assert names == ["a.md", "b.txt", "sub/c.PDF"]
    assert {source.n_bytes for source in found} == {5}
    assert told == [told[0]]
    assert "2 .png" in told[0]


def test_links_that_lead_in_circles_end(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_text(STORY)
    (tmp_path / "sub" / "up").symlink_to("..")
    (tmp_path / "other").symlink_to("sub")
    found = find([str(tmp_path)])
    assert [Path(source.path).name for source in found] == ["a.txt"]


def test_a_file_named_twice_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(STORY)
    (tmp_path / "[b].txt").write_text(STORY)
    found = find(["a.txt", "./a.txt", "*.txt", ".", "[b].txt"])
    assert sorted(source.path for source in found) == ["[b].txt", "a.txt"]


def test_nothing_to_read_is_said(tmp_path):
    with pytest.raises(CommandError, match="matches no file"):
        find([str(tmp_path / "*.txt")])
    with pytest.raises(CommandError, match="no document in"):
        find([str(tmp_path)])
    assert find([str(tmp_path / "gone.txt")])[0].n_bytes == 0  # reading it says why


def test_every_format_has_a_reader_and_is_in_the_help():
    from pyinertia.documents import FORMATS, suffixes

    assert {".txt", ".md", ".html", ".pdf", ".jsonl"} <= set(FORMATS)
    assert all(kind in suffixes() for kind in FORMATS)


def test_a_line_is_the_same_whatever_ends_it(tmp_path):
    path = tmp_path / "a.jsonl"
    line = b'{"text": "one"}'
    for data in (line, line + b"\n", line + b"\r\n", line + b"\r", line + b"\n" + line):
        path.write_bytes(data)
        found = [*read(str(path))]
        assert {one.sha256 for one in found} == {hashlib.sha256(line).hexdigest()}
        assert sum(one.n_bytes for one in found) == len(data)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"])
def test_a_line_that_is_too_long_is_told_by_all_of_it(end, tmp_path, monkeypatch):
    monkeypatch.setattr("pyinertia.documents.jsonl.CHUNK", 7)
    path = tmp_path / "a.jsonl"
    seen = set()
    for middle in (b"b", b"c", b"\r", b"\r\r"):
        for n in range(1000, 1010):  # all places of a chunk's end
            line = b"a" * n + middle + b"a" * 300
            path.write_bytes(line + end)
            found = only(read(str(path), n_most=1000))
            assert isinstance(found, DocumentError)
            assert found.sha256 == hashlib.sha256(line).hexdigest()
            assert found.n_bytes == len(line + end)
            seen.add(found.sha256)
    assert len(seen) == 40


@pytest.mark.parametrize("encoding", ["hex", "rot13", "utf-9", "undefined", "idna"])
def test_an_encoding_of_no_use_spoils_no_run(encoding, tmp_path):
    for name in ("a.txt", "a.jsonl"):
        (tmp_path / name).write_bytes(b'{"text": "\xff"}\n')
        found = only(read(str(tmp_path / name), encoding=encoding))
        assert f"not {encoding} text (" in str(found)


def test_what_a_line_holds_cannot_speak_to_the_terminal(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"\x1b[2J": 1, "\x07" * 999: 2}) + "\n")
    message = str(only(read(str(path))))
    assert message.isprintable()
    assert r"it has \x1b[2J, \x07" in message
    assert len(message) < 300
