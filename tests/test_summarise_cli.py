"""`pyinertia summarise`: every document exactly once, whatever happens to it or to the run."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import make_documents
import pytest
import tiny_models
from command_line import call, start
from summarise_runs import ARGUMENTS, expected, identities, make_pile, records, run, sha256
from typer.testing import CliRunner

from pyinertia.cli import app


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_chat(tmp_path_factory.mktemp("tiny") / "chat.gguf")


@pytest.fixture
def pile(tmp_path, monkeypatch) -> Path:
    """Twelve documents in a folder of their own, which is where the command runs."""
    monkeypatch.chdir(tmp_path)
    return make_pile(tmp_path)


@pytest.fixture
def summarise(tiny):
    return partial(run, tiny)


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


def test_a_finished_run_does_nothing_and_loads_no_model(pile, summarise, monkeypatch):
    def loads(*_, **__):
        raise AssertionError("a model is loaded")

    summarise("docs", "-o", "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    monkeypatch.setattr("pyinertia.batch.summarise", loads)
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
    assert "0 done, 13 done before, 3 failed before" in left.stderr
    assert len(records()) == 16
    (pile / "bad.txt").write_text("mended")
    Path("missing.txt").write_text("found")
    (pile / "empty.md").unlink()
    again = summarise("docs", "missing.txt", "-o", "out.jsonl")
    assert "2 done, 13 done before" in again.stderr
    # what is gone has not come up again
    assert [record["path"] for record in records() if record["error"]] == ["docs/empty.md"]
    assert len(records()) == 16


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


def test_stdout_takes_json_lines_and_stdin_gives_a_document(pile, summarise):
    done = summarise("-", "docs/0.txt", stdin="What was said.")
    found = {record["path"]: record for record in map(json.loads, done.stdout.splitlines())}
    assert found.keys() == {"-", "docs/0.txt"}
    assert found["-"]["sha256"] == sha256(b"What was said.")
    assert "## stdin" in summarise("-", "--format", "markdown", stdin="What was said.").stdout


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
        (["docs", "-n", "0"], "a summary needs a limit"),
        (["docs", "--seed", "-1"], "a seed of 0 or more"),
        (["docs", "--kv-prefill", "full"], "have room for a bounded prefill only"),
        (["docs", "--kv-budget", "0.5"], "have room for a bounded prefill only"),
        (["docs", "--encoding", "utf-9"], "--encoding utf-9 is not known"),
        (["docs", "--encoding", "hex"], "--encoding hex is not known"),
        (["docs", "--encoding", "rot13"], "--encoding rot13 is not known"),
        (["docs", "-n", "400", "-o", "docs/out.jsonl"], "has no room for an instruction"),
        (["docs", "-n", "400", "-o", "docs", "--format", "files"], "has no room for an"),
        (["docs", "-n", "400"], "has no room for an instruction"),
        (["docs", "--part", "3"], "a part must have room for two summaries"),
        (["docs", "--instruction", " "], "must be a text that is not empty"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_ends_with_2_and_one_line(args, says, pile, tiny):
    before, names = expected(pile), {*pile.parent.rglob("*")}
    arguments = ["summarise", "-m", str(tiny), *ARGUMENTS, *args]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert says in " ".join(done.stderr.split())
    assert done.stderr.count("error:") <= 1
    assert expected(pile) == before
    assert {*pile.parent.rglob("*")} == names


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
