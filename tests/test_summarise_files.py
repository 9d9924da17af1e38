"""What `summarise` writes: nothing is lost, nothing is read again, nothing of others is touched."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from functools import partial
from itertools import combinations
from pathlib import Path

import pytest
import tiny_models
from command_line import call, start
from filelock import FileLock
from summarise_runs import ARGUMENTS, expected, identities, make_pile, records, run, sha256

from pyinertia.cli.journal import Journal
from pyinertia.cli.sinks import file_name
from pyinertia.errors import CommandError

FILES, MARKDOWN = ("--format", "files"), ("--format", "markdown")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture
def pile(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return make_pile(tmp_path)


@pytest.fixture
def summarise(tiny):
    return partial(run, tiny)


@pytest.fixture
def no_model(monkeypatch):
    """From the call on, a run that loads a model fails."""

    def loads(*_, **__):
        raise AssertionError("a model is loaded")

    return lambda: monkeypatch.setattr("pyinertia.batch.summarise", loads)


def texts(folder: Path | str) -> dict[str, str]:
    """Markdown files by name."""
    return {os.path.relpath(p, folder): p.read_text() for p in sorted(Path(folder).rglob("*.md"))}


def line_file(path: str, line: int, text: str) -> str:
    digest = sha256(json.dumps({"text": text}).encode())[:8]
    return f"{path}.{line}.{digest}.md"


# a run that is killed


@pytest.mark.parametrize("form", ["jsonl", "markdown", "files"])
def test_a_run_that_is_killed_goes_on_where_it_was(form, pile, summarise, tiny):
    out = Path({"jsonl": "out.jsonl", "markdown": "out.md", "files": "out"}[form])
    journal = {"jsonl": out, "markdown": Path("out.md.jsonl"), "files": out / "summaries.jsonl"}
    journal = journal[form]
    watched, mark = (out, b"## ") if form == "markdown" else (journal, b"\n")
    arguments = ["summarise", "docs", "-o", out, "--format", form, "-m", tiny, *ARGUMENTS]
    seen = []
    for n_done in (1, 5, 9):  # the moments
        with start(*arguments) as process:
            while process.poll() is None:
                if watched.exists() and watched.read_bytes().count(mark) >= n_done:
                    process.send_signal(signal.SIGKILL)
                    break
                time.sleep(0.001)
            process.communicate()
            assert process.returncode == -signal.SIGKILL
        seen.append(journal.read_bytes().count(b"\n"))
        with journal.open("ab") as file:  # as if it had been writing
            file.write(b'{"path": "docs/torn')
    assert seen == sorted(seen)
    summarise("docs", "-o", out, "--format", form)
    assert identities(records(journal)) == expected(pile)
    if form == "files":
        lines = enumerate(("first line", "same", "same"), 1)
        names = {line_file("docs/sub/lines.jsonl", *line) for line in lines}
        assert texts(out).keys() == {f"docs/{i}.txt.md" for i in range(10)} | names
    if form == "markdown":
        assert out.read_text().count("## docs/") == 13


# one Markdown file


def test_markdown_is_one_file_and_goes_on(pile, summarise):
    (pile / "bad.txt").write_bytes(b"\xff")
    summarise("docs/0.txt", "docs/bad.txt", "-o", "out.md", *MARKDOWN, code=1)
    first = Path("out.md").read_text()
    assert first.startswith(("## docs/0.txt\n\n", "## docs/bad.txt\n\n"))
    assert "Not summarised: not utf-8" in first
    with Path("out.md").open("a") as file:
        file.write("## docs/torn")
    summarise("docs", "-o", "out.md", *MARKDOWN, code=1)
    text = Path("out.md").read_text()
    assert text.count("## docs/") == 14
    assert "torn" not in text
    assert len(records("out.md.jsonl")) == 14


@pytest.mark.parametrize("damage", ["", "## docs/0.t", None])
def test_markdown_is_made_from_the_journal(damage, pile, summarise, no_model):
    summarise("docs/0.txt", "docs/1.txt", "-o", "out.md", *MARKDOWN)
    before = Path("out.md").read_text()
    Path("out.md").unlink()
    if damage is not None:  # by a kill, a full disk, an editor
        Path("out.md").write_text(damage)
    no_model()
    summarise("docs/0.txt", "docs/1.txt", "-o", "out.md", *MARKDOWN)
    assert Path("out.md").read_text() == before


def test_markdown_of_nothing_but_failures_goes_on(pile, summarise):
    for _ in range(2):
        done = summarise("missing.txt", "-o", "out.md", *MARKDOWN, code=1)
        assert "1 failed" in done.stderr
        assert Path("out.md").read_text().count("## missing.txt") == 1
        assert len(records("out.md.jsonl")) == 1


# a file per document


def test_a_line_that_moves_keeps_its_file(pile, summarise):
    lines = {text: json.dumps({"text": text}) + "\n" for text in "ABC"}
    Path("a.jsonl").write_text(lines["A"] + lines["B"])
    summarise("a.jsonl", "-o", "out", *FILES)
    before = texts("out")
    assert before.keys() == {line_file("a.jsonl", 1, "A"), line_file("a.jsonl", 2, "B")}
    Path("a.jsonl").write_text(lines["C"] + lines["A"] + lines["B"])
    assert "1 done, 2 done before" in summarise("a.jsonl", "-o", "out", *FILES).stderr
    after = texts("out")
    assert after.keys() == before.keys() | {line_file("a.jsonl", 1, "C")}
    assert {name: after[name] for name in before} == before


def test_files_are_made_from_the_journal_and_edits_stay(pile, summarise, no_model):
    """Of a run with another format, of one that was killed, and where one was deleted."""
    summarise("docs", "-o", "out/summaries.jsonl")
    no_model()
    summarise("docs", "-o", "out", *FILES)
    before = texts("out")
    assert len(before) == 13
    for record in records("out/summaries.jsonl"):
        assert record["summary"] in before[file_name(record)]
    Path("out/docs/0.txt.md").unlink()
    Path("out/docs/1.txt.md").write_text("my own words")
    assert "0 done, 13 done before" in summarise("docs", "-o", "out", *FILES).stderr
    assert texts("out") == {**before, "docs/1.txt.md": "my own words"}


def test_a_killed_run_s_older_file_is_replaced(pile, summarise, no_model):
    summarise("docs/0.txt", "-o", "out", *FILES)
    older = texts("out")
    (pile / "0.txt").write_text("Another text.")
    summarise("docs/0.txt", "-o", "out", *FILES)
    newer = texts("out")
    assert newer != older
    Path("out/docs/0.txt.md").write_text(older["docs/0.txt.md"])  # as if killed before it
    no_model()
    summarise("docs/0.txt", "-o", "out", *FILES)
    assert texts("out") == newer


def test_a_file_of_others_is_never_replaced(pile, summarise):
    Path("docs/0.txt.md").write_text("mine")
    error = summarise("docs/0.txt", "docs/1.txt", "-o", ".", *FILES, code=2).stderr
    assert "docs/0.txt.md is there and no earlier run wrote it; move" in error
    assert texts(".") == {"docs/0.txt.md": "mine"}
    assert not Path("summaries.jsonl").exists()


def test_one_result_that_cannot_be_written_does_not_stop_the_others(pile, summarise, no_model):
    Path("out").mkdir()
    Path("out/docs").write_text("a file where a folder must be")
    Path("x.txt").write_text("elsewhere")
    for n_done in (2, 0):
        done = summarise("docs/0.txt", "docs/1.txt", "x.txt", "-o", "out", *FILES, code=1)
        assert f"{n_done // 2} done, 2 failed" in done.stderr
        assert "failed: docs/0.txt: out/docs/0.txt.md cannot be written" in done.stderr
        assert texts("out").keys() == {"x.txt.md"}
        assert len(records("out/summaries.jsonl")) == 3
        no_model()
    Path("out/docs").unlink()
    summarise("docs/0.txt", "docs/1.txt", "x.txt", "-o", "out", *FILES)
    assert texts("out").keys() == {"x.txt.md", "docs/0.txt.md", "docs/1.txt.md"}


def test_a_full_disk_ends_the_run_and_loses_nothing(pile, summarise, monkeypatch, no_model):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out")

    monkeypatch.setattr("pyinertia.cli.sinks.write_whole", full)
    assert "error: out: No space left" in summarise("docs", "-o", "out", *FILES, code=1).stderr
    monkeypatch.undo()
    monkeypatch.chdir(pile.parent)
    (record,) = records("out/summaries.jsonl")
    no_model()
    summarise(record["path"], "-o", "out", *FILES)
    assert texts("out").keys() == {file_name(record)}


def test_a_document_and_a_folder_that_is_called_like_its_file(pile, summarise):
    Path("a").write_text("one")
    Path("a.md").mkdir()
    Path("a.md/x.txt").write_text("two")
    summarise("a", "a.md/x.txt", "-o", "out", *FILES)
    assert len(texts("out")) == 2


def test_no_two_documents_have_the_same_file():
    def record(path: str, line: int = 0, text: str = "") -> dict:
        return {"path": path, "line": line, "sha256": sha256(text.encode())}

    hashed = [file_name(record(path)) for path in ("../a", "-", "b.md/c")]
    assert all(re.search(r"\.[0-9a-f]{16}\.md$", name) for name in hashed)
    plain = ["a.txt", "a.pdf", "../a.txt", "/x/a.txt", "x/a.txt", "-", "stdin", "a", "__/a", "/x/a"]
    plain += [
        "../a",
        "_root/x/a",
        "n" * 250,
        "n" * 251,
        "é" * 125,
        "a.jsonl.3",
        "../../a",
        "__/__/a",
    ]
    plain += [name.removesuffix(".md") for name in hashed]  # as if somebody had called one so
    plain += [file_name(record("a.jsonl", 3, "A")).removesuffix(".md"), "b.md/c", "b_/c"]
    plain += ["summaries.jsonl/a", "a.md.part/a", os.fsdecode(b"\xe9"), os.fsdecode(b"\xe8" * 250)]
    of_lines = [
        ("a.jsonl", 3, "A"),
        ("a.jsonl", 3, "B"),
        ("a.jsonl", 4, "A"),
        ("../a.jsonl", 3, "A"),
    ]
    of_lines += [("__/a.jsonl", 3, "A"), ("n" * 234 + ".jsonl", 10**9, "A")]
    names = [*map(file_name, map(record, plain)), *(file_name(record(*one)) for one in of_lines)]
    assert file_name(record("a.txt")) == "a.txt.md"
    assert file_name(record("a.jsonl", 3, "A")) == f"a.jsonl.3.{sha256(b'A')[:8]}.md"
    assert len(set(names)) == len(names)
    assert [name for name in names if name.startswith(("/", ".."))] == []
    parts = [f"{part}.part" for name in names for part in name.split("/")]
    assert max(len(os.fsencode(part)) for part in parts) <= 255
    # a file of one is no folder of another, nor what is written beside it, nor the journal
    files = {*names, *(f"{name}.part" for name in names), "summaries.jsonl"}
    assert not [(a, b) for a, b in combinations(sorted(files), 2) if b.startswith(f"{a}/")]


# what was written is not read


@pytest.mark.parametrize("out", ["s.jsonl", "../docs/s.jsonl", "../link/s.jsonl", "../link.jsonl"])
def test_the_output_is_never_read_as_a_document(out, pile, summarise, monkeypatch):
    Path("link").symlink_to("docs")
    Path("link.jsonl").symlink_to("docs/s.jsonl")
    monkeypatch.chdir(pile)
    for _ in range(2):
        summarise(".", "-o", out)
        assert len(records("s.jsonl")) == 13
    assert (pile.parent / "link.jsonl").is_symlink()


@pytest.mark.parametrize("args", [("-o", "out.md", *MARKDOWN), ("-o", "out", *FILES)])
def test_nor_are_other_forms_of_it(args, pile, summarise):
    for _ in range(2):
        assert "13 done" in summarise(".", *args).stderr


def test_a_document_beside_the_output_is_read(pile, summarise, monkeypatch):
    monkeypatch.chdir(pile)
    Path("../b.txt").write_text("above")
    summarise("0.txt", "../b.txt", "-o", ".", *FILES)
    assert {record["path"] for record in records("summaries.jsonl")} == {"0.txt", "../b.txt"}
    again = summarise("0.txt", "../b.txt", "-o", ".", *FILES, "--temp", "0").stderr
    assert "0 done, 2 done before" in again
    assert "note:" not in again
    # a shell's *.md names what the run wrote
    named = summarise("1.txt", "0.txt.md", "-o", ".", *FILES).stderr
    assert "note: 0.txt.md is written with this -o, so it is not read" in named
    assert "1 done" in named
    error = summarise("0.txt.md", "-o", ".", *FILES, code=2).stderr
    assert "all documents are written with this -o" in error


# the journal


WHOLE = {"path": "a", "sha256": "0", "line": 0, "error": "", "settings": {"seed": 1}}


def journal_of(path: Path) -> Journal:
    return Journal(path, WHOLE["settings"], {})


def test_the_journal_cuts_a_torn_line_and_refuses_a_damaged_one(tmp_path):
    path = tmp_path / "a.jsonl"
    first, second = ((json.dumps({**WHOLE, "path": name}) + "\n").encode() for name in "ab")
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        journal = journal_of(path)
        journal.close()
        assert path.read_bytes() == first
        assert journal.knows("a", "0")
        assert not journal.knows("a", "0")
        assert not journal.knows("b", "0")
    path.write_bytes(first[:20] + b"\n" + second)
    with pytest.raises(CommandError, match="line 1 is no result of an earlier run"):
        journal_of(path)
    assert path.read_bytes() == first[:20] + b"\n" + second


def test_a_name_that_is_no_text_is_kept(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    journal = journal_of(tmp_path / "a.jsonl")
    journal.add({**WHOLE, "path": name})
    journal.close()
    again = journal_of(tmp_path / "a.jsonl")
    assert again.knows(name, "0")
    again.close()


def test_a_failure_is_forgotten_when_its_document_came_up_again_and_not_before(tmp_path):
    path = tmp_path / "a.jsonl"
    bad, other = ({**WHOLE, "path": name, "error": "bad"} for name in ("bad", "other"))
    for record in (bad, WHOLE, other):
        journal = journal_of(path)
        journal.add(record)
        journal.close()
    journal = journal_of(path)
    journal.try_again({"bad", "c"})
    assert not journal.knows("bad", "0")
    assert journal.knows("other", "0")
    journal.add({**WHOLE, "path": "bad", "sha256": "1"})
    journal.close()  # killed, or stopped
    assert records(path)[:3] == [bad, WHOLE, other]
    journal = journal_of(path)
    journal.try_again({"bad", "c"})
    journal.finish()
    journal.close()
    assert records(path) == [WHOLE, other, {**WHOLE, "path": "bad", "sha256": "1"}]
    assert {p.name for p in tmp_path.iterdir()} <= {"a.jsonl", "a.jsonl.lock"}


def test_a_failure_outlives_a_run_over_others(pile, summarise):
    (pile / "bad.txt").write_bytes(b"\xff")
    summarise("docs/0.txt", "docs/bad.txt", "-o", "out.jsonl", code=1)
    assert "1 done, 1 done before" in summarise("docs/1.txt", "-o", "out.jsonl").stderr
    failed = [record["path"] for record in records() if record["error"]]
    assert failed == ["docs/bad.txt"]
    # what is left of others is none of this run's failures
    summarise("docs/1.txt", "-o", "out.jsonl", "--no-retry")


def test_a_journal_is_one_run_s_until_it_is_closed(tmp_path):
    path, link = tmp_path / "a.jsonl", tmp_path / "link.jsonl"
    link.symlink_to("a.jsonl")
    journal = journal_of(path)
    journal.add({**WHOLE, "error": "bad"})
    journal.close()
    journal = journal_of(path)
    journal.try_again({"a"})
    for step in (lambda: None, lambda: journal.add(WHOLE), journal.finish):  # the file is replaced
        step()
        for name in (path, link):
            with pytest.raises(CommandError, match="is in use by another run"):
                journal_of(name)
    journal.close()
    journal_of(link).close()
    assert records(path) == [WHOLE]


def test_two_runs_do_not_share_an_output(pile, summarise):
    with FileLock("out.jsonl.lock"):
        assert "is in use by another run" in summarise("docs", "-o", "out.jsonl", code=2).stderr


def test_a_console_need_not_know_every_character(pile, tiny):
    Path("é.txt").write_text("What was said.")
    arguments = ["summarise", "é.txt", "-m", tiny, *ARGUMENTS, *MARKDOWN]
    done = call(*arguments, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert done.stdout.startswith("## \\xe9.txt\n")
