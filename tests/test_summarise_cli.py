"""`pyinertia summarise`: every document exactly once, whatever happens to it or to the run."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections import Counter
from pathlib import Path

import make_documents
import pytest
import tiny_models
from command_line import call, start
from typer.testing import CliRunner

from pyinertia.cli import app
from pyinertia.cli.journal import Journal
from pyinertia.cli.sinks import file_name
from pyinertia.errors import CommandError

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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture
def pile(tmp_path, monkeypatch) -> Path:
    """Twelve documents in a folder of their own, which is where the command runs."""
    monkeypatch.chdir(tmp_path)
    docs = tmp_path / "docs"
    (docs / "sub").mkdir(parents=True)
    for i in range(10):
        (docs / f"{i}.txt").write_text(f"This is document {i}. " * (i + 1))
    lines = [json.dumps({"text": text}) for text in ("first line", "same", "same")]
    (docs / "sub" / "lines.jsonl").write_text("\n".join(lines) + "\n")
    return docs


@pytest.fixture
def summarise(tiny):
    def summarise(*args: str | Path, code: int = 0, stdin: str = ""):
        given = [str(arg) for arg in ("summarise", *args, "-m", tiny, *ARGUMENTS)]
        done = CliRunner().invoke(app, given, input=stdin)
        assert done.exit_code == code, done.output + repr(done.exception)
        return done

    return summarise


def records(path: Path | str = "out.jsonl") -> list[dict]:
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def identities(found: list[dict]) -> Counter:
    return Counter((record["path"], record["sha256"]) for record in found)


def expected(folder: Path) -> Counter:
    """What there is, hashed here."""
    found: Counter = Counter()
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        name = os.path.relpath(path)
        parts = [path.read_bytes()]
        if path.suffix == ".jsonl":
            parts = path.read_bytes().splitlines(keepends=True)
        found.update((name, hashlib.sha256(part).hexdigest()) for part in parts)
    return found


def test_every_document_has_one_line(pile, summarise):
    done = summarise("docs", "-o", "out.jsonl")
    found = records()
    assert identities(found) == expected(pile)
    assert len(found) == 13
    for record in found:
        assert record["error"] == ""
        assert record["finish_reason"] in {"stop", "length"}
        assert record["n_parts"] >= 1
        assert record["settings"]["kv_policy"] == "inertiakv"
    by_path = {record["path"]: record for record in found}
    assert by_path["docs/3.txt"]["n_tokens"] == len("This is document 3. " * 4)
    assert "13 done; out.jsonl" in done.stderr
    assert done.stdout == ""


def test_a_finished_run_does_nothing_and_loads_no_model(pile, summarise, tiny):
    summarise("docs", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    assert "0 done, 13 done before" in summarise("docs", "-o", "out.jsonl").stderr
    assert Path("out.jsonl").read_bytes() == before


def test_a_document_that_changed_is_done_anew_and_a_new_one_too(pile, summarise):
    summarise("docs", "-o", "out.jsonl")
    (pile / "0.txt").write_text("Another text.")
    (pile / "new.txt").write_text("A new text.")
    with (pile / "sub" / "lines.jsonl").open("a") as file:
        file.write('{"text": "same"}\n')
    assert "3 done, 13 done before" in summarise("docs", "-o", "out.jsonl").stderr
    assert not expected(pile) - identities(records())
    assert len(records()) == 16


@pytest.mark.parametrize("form", ["jsonl", "files"])
def test_a_run_that_is_killed_goes_on_where_it_was(form, pile, summarise, tiny):
    out = Path("out.jsonl" if form == "jsonl" else "out")
    journal = out if form == "jsonl" else out / "summaries.jsonl"
    arguments = ["summarise", "docs", "-o", out, "--format", form, "-m", tiny, *ARGUMENTS]
    seen = []
    for n_lines in (1, 5, 9):  # the moments
        with start(*arguments) as process:
            while process.poll() is None:
                if journal.exists() and journal.read_bytes().count(b"\n") >= n_lines:
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
        written = {str(path.relative_to(out)) for path in out.rglob("*.md")}
        names = [f"docs/{i}.txt.md" for i in range(10)]
        assert written == {*names, *(f"docs/sub/lines.jsonl.{i}.md" for i in (1, 2, 3))}


def test_ctrl_c_keeps_what_is_done(pile, summarise, tiny):
    with start("summarise", "docs", "-o", "out.jsonl", "-m", tiny, *ARGUMENTS) as process:
        while not Path("out.jsonl").exists() or not Path("out.jsonl").read_bytes():
            time.sleep(0.001)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in err
    assert b"the same command goes on" in err
    n_before = len(records())
    assert n_before
    assert f"{n_before} done before" in summarise("docs", "-o", "out.jsonl").stderr
    assert identities(records()) == expected(pile)


def test_other_settings_are_refused_by_name(pile, summarise):
    summarise("docs/0.txt", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    error = summarise("docs", "-o", "out.jsonl", "--kv-budget", "300", code=2).stderr
    assert "out.jsonl was made with --kv-budget None, now '300'" in error
    assert "or another -o to start anew" in error
    assert Path("out.jsonl").read_bytes() == before
    summarise("docs/1.txt", "-o", "out.jsonl", "-t", "2", "-np", "2")  # no result depends on these


def test_failures_are_recorded_and_tried_again(pile, summarise):
    (pile / "bad.txt").write_bytes(b"\xff")
    (pile / "empty.md").write_bytes(b"")
    done = summarise("docs", "missing.txt", "-o", "out.jsonl", code=1)
    assert "failed: docs/bad.txt: not utf-8 text (byte 0)" in done.stderr
    failed = {record["path"] for record in records() if record["error"]}
    assert failed == {"docs/bad.txt", "docs/empty.md", "missing.txt"}
    left = summarise("docs", "missing.txt", "-o", "out.jsonl", "--no-retry", code=1)
    assert "0 done, 13 done before" in left.stderr
    assert len(records()) == 16
    (pile / "bad.txt").write_text("mended")
    Path("missing.txt").write_text("found")
    (pile / "empty.md").unlink()
    again = summarise("docs", "missing.txt", "-o", "out.jsonl")
    assert "2 done, 13 done before" in again.stderr
    assert not [record for record in records() if record["error"]]
    assert len(records()) == 15


def test_a_folder_of_everything_bad_does_not_stop_the_night(pile, summarise):
    """All hostile inputs at once, good ones between them: the good ones are all done."""
    for name, (make, _) in make_documents.HOSTILE.items():
        make(pile / name)
    good = {k: v for k, v in make_documents.GOOD.items() if len(v) < 10_000}
    for name, data in good.items():
        (pile / name).write_bytes(data)
    (pile / "loop").symlink_to("..")
    named = [
        f"docs/{name}" for name in make_documents.HOSTILE
    ]  # what a folder would leave out, too
    summarise("docs", *named, "docs/README", "-o", "out.jsonl", code=1)
    found = records()
    done = {record["path"] for record in found if not record["error"]}
    assert {f"docs/{name}" for name in good} <= done
    assert {f"docs/{i}.txt" for i in range(10)} <= done
    failed = Counter(record["path"] for record in found if record["error"])
    # the folder that is called like a text has no document in it, and gives none
    assert set(failed) == {*named} - {"docs/folder.txt"}
    assert set(failed.values()) == {1}


def test_a_document_longer_than_all_positions_is_read_in_parts(pile, summarise):
    Path("long.txt").write_text("A sentence that says little. " * 100)
    summarise("long.txt", "-o", "out.jsonl")
    (record,) = records()
    assert record["error"] == ""
    assert record["n_tokens"] == 2900
    assert record["n_parts"] > 2900 // 768


def test_markdown_is_one_file_and_goes_on(pile, summarise):
    (pile / "bad.txt").write_bytes(b"\xff")
    summarise("docs/0.txt", "docs/bad.txt", "-o", "out.md", "--format", "markdown", code=1)
    first = Path("out.md").read_text()
    assert first.startswith(("## docs/0.txt\n\n", "## docs/bad.txt\n\n"))
    assert "Not summarised: not utf-8" in first
    with Path("out.md").open("a") as file:
        file.write("## docs/torn")
    summarise("docs", "-o", "out.md", "--format", "markdown", code=1)
    text = Path("out.md").read_text()
    assert text.count("## docs/") == 14
    assert "torn" not in text
    assert len(records("out.md.jsonl")) == 14


def test_stdout_takes_json_lines_and_stdin_gives_a_document(pile, summarise):
    done = summarise("-", "docs/0.txt", stdin="What was said.")
    found = {record["path"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {"-", "docs/0.txt"}
    assert found["-"]["sha256"] == hashlib.sha256(b"What was said.").hexdigest()
    assert "## stdin" in summarise("-", "--format", "markdown", stdin="What was said.").stdout


def test_the_output_is_never_read_as_a_document(pile, summarise):
    for _ in range(2):
        summarise(".", "-o", "out.jsonl")
        assert len(records()) == 13
    Path("out.jsonl").unlink()
    for _ in range(2):
        summarise(".", "-o", "out", "--format", "files")
        assert len(records("out/summaries.jsonl")) == 13


def test_two_runs_do_not_share_an_output(pile, summarise):
    summarise("docs/0.txt", "-o", "out.jsonl")
    settings = records()[0]["settings"]
    journal = Journal(Path("out.jsonl"), settings, {}, retry=True)
    assert "is in use by another run" in summarise("docs", "-o", "out.jsonl", code=2).stderr
    journal.close()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nothing/*.txt"], "matches no file"),
        (["docs", "--format", "pdf"], "--format pdf: must be one of jsonl, markdown, files"),
        (["docs", "--format", "files"], "needs a folder; pass it with -o"),
        (["docs", "-o", "docs"], "is a folder; pass a file, or --format files"),
        (["docs", "-o", "docs/0.txt", "--format", "files"], "is a file"),
        (["docs", "-o", "docs/0.txt/out.jsonl"], "cannot be written"),
        (["docs", "-o", "docs/0.txt"], "ends in what no run wrote; is it a document?"),
        (["docs", "-o", "docs/sub/lines.jsonl"], "line 1 is no result of an earlier run"),
        (["docs", "-o", "docs/0.txt", "--format", "markdown"], "no earlier run wrote it"),
        (["docs", "-o", ".", "--format", "files"], "all documents are where the output goes"),
        (["docs", "-n", "0"], "a summary needs a limit"),
        (["docs", "--seed", "-1"], "a seed of 0 or more"),
        (["docs", "--kv-prefill", "full"], "have room for a bounded prefill only"),
        (["docs", "--kv-budget", "0.5"], "have room for a bounded prefill only"),
        (["docs", "--encoding", "utf-9"], "--encoding utf-9 is not known"),
        (["docs", "-n", "400"], "has no room for an instruction"),
        (["docs", "--part", "3"], "a part must have room for two summaries"),
        (["docs", "--instruction", " "], "must be a text that is not empty"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_ends_with_2_and_one_line(args, says, pile, tiny):
    before = expected(pile)
    arguments = ["summarise", "-m", str(tiny), *ARGUMENTS, *args]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.stderr.split())
    assert done.stderr.count("error:") <= 1
    assert expected(pile) == before


def test_the_journal_cuts_a_torn_line_and_refuses_a_damaged_one(tmp_path):
    path, settings = tmp_path / "a.jsonl", {"seed": 1}
    whole = {"path": "a", "sha256": "0", "line": 0, "error": "", "settings": settings}
    first, second = ((json.dumps({**whole, "path": name}) + "\n").encode() for name in "ab")
    for cut in range(len(second)):
        path.write_bytes(first + second[:cut])
        journal = Journal(path, settings, {}, retry=True)
        journal.close()
        assert path.read_bytes() == first
        assert journal.knows("a", "0")
        assert not journal.knows("a", "0")
        assert not journal.knows("b", "0")
    path.write_bytes(first[:20] + b"\n" + second)
    with pytest.raises(CommandError, match="line 1 is no result of an earlier run"):
        Journal(path, settings, {}, retry=True)
    assert path.read_bytes() == first[:20] + b"\n" + second


def test_a_name_that_is_no_text_is_kept(tmp_path):
    path = tmp_path / "a.jsonl"
    name = os.fsdecode(b"caf\xe9.txt")
    journal = Journal(path, {}, {}, retry=True)
    journal.add({"path": name, "sha256": "0", "line": 0, "error": "", "settings": {}})
    journal.close()
    again = Journal(path, {}, {}, retry=True)
    assert again.knows(name, "0")
    again.close()


def test_no_two_documents_have_the_same_file():
    paths = ["a.txt", "a.pdf", "../a.txt", "/x/a.txt", "x/a.txt", "-", "n" * 250, "n" * 251]
    names = [file_name(path, 0) for path in paths]
    assert [name for name in names if name.startswith(("/", ".."))] == []
    assert all(len(part) <= 255 for name in names for part in name.split("/"))
    assert file_name("a.jsonl", 3) == "a.jsonl.3.md"
    assert len(set(names)) == len(names)


def test_progress_goes_to_stderr_and_quiet_has_none(pile, summarise):
    loud = summarise("docs/0.txt", "docs/1.txt", "-o", "out.jsonl").stderr
    assert "[1 done, " in loud
    assert "left] docs/" in loud
    quiet = summarise("docs/0.txt", "-o", "other.jsonl", "-q")
    assert quiet.stderr == quiet.stdout == ""


def test_a_broken_pipe_is_quiet(pile, tiny):
    with start("summarise", "docs", "-q", "-m", tiny, *ARGUMENTS) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(20) == 141


def test_the_real_process_says_0_1_and_2(pile, tiny):
    base = ["summarise", "-m", tiny, *ARGUMENTS, "-o", "out.jsonl"]
    assert "1 done" in call(*base, "docs/0.txt").stderr
    assert "llama_" not in call(*base, "missing.txt", code=1).stderr
    call(*base, "--seed", "7", "docs/0.txt", code=2)
