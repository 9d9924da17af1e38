"""The commands on a tiny model: files, resuming, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from typer.testing import CliRunner

from pyinertia import POLICIES, Llama
from pyinertia.cli import app
from pyinertia.errors import EvalError
from pyinertia.eval.arms import parse_arms, parse_policy
from pyinertia.eval.models import N_END, Models
from pyinertia.eval.passages import Passages
from pyinertia.eval.play import teacher_forced
from pyinertia.eval.settings import Settings
from pyinertia.eval.store import Store
from pyinertia.eval.vocabulary import Vocabulary
from pyinertia.policy import KVPolicy

TIMES = {"t_token"}
ARMS = ["--policies", "inertiakv,streaming-llm", "--budgets", "256", "-t", "1"]
NEEDLES = ["ruler", "--tasks", "niah_single_1,niah_single_2", "--length", "800", *ARMS]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", offline)


@pytest.fixture(scope="module")
def run(tiny):
    def run(*args: str | Path, code: int = 0) -> str:
        done = CliRunner().invoke(app, ["eval", *map(str, args), "-m", str(tiny)])
        assert done.exit_code == code, done.output + repr(done.exception)
        return done.output

    return run


def records(path: Path) -> dict[str, dict]:
    """Results by sample, without the times."""
    found = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        result = {key: value for key, value in record["result"].items() if key not in TIMES}
        found[json.dumps(record["sample"], sort_keys=True)] = result
    return found


@pytest.fixture(scope="module")
def whole(run, tmp_path_factory) -> Path:
    """A run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole")
    run(*NEEDLES, "--samples", 3, "--out", out)
    return out


def test_a_run_writes_every_sample_and_a_summary(whole):
    found = records(whole / "ruler.jsonl")
    assert len(found) == 3 * 2 * 3
    identity = json.loads(next(iter(found)))
    assert {"task", "policy", "budget", "seed", "index", "length", "model"} <= identity.keys()
    report = json.loads((whole / "ruler.json").read_text())
    assert [row["arm"] for row in report["rows"]] == ["full", "inertiakv 256", "streaming-llm 256"]
    for row in report["rows"]:
        scores = [r["score"] for k, r in found.items() if json.loads(k)["policy"] == row["policy"]]
        assert row["n_samples"] == 6
        assert row["score"] == pytest.approx(np.mean(scores))
        assert row["n_cells"] == 256 or row["policy"] == "full"


def test_plots_are_drawn(whole):
    for name in ("score-by-budget", "score-by-speed", "recall-by-depth"):
        image = (whole / f"ruler-{name}.png").read_bytes()
        assert image.startswith(b"\x89PNG")
        width, height = (int.from_bytes(image[at : at + 4], "big") for at in (16, 20))
        assert min(width, height) > 100


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(run, tiny, whole, tmp_path):
    command = [*NEEDLES, "--samples", "3", "--out", str(tmp_path), "-m", str(tiny)]
    with subprocess.Popen([sys.executable, "-m", "pyinertia", "eval", *command]) as process:
        log = tmp_path / "ruler.jsonl"
        while process.poll() is None and (not log.exists() or log.read_bytes().count(b"\n") < 5):
            time.sleep(0.002)
        os.kill(process.pid, signal.SIGKILL)
    before = log.read_bytes()
    assert 5 <= before.count(b"\n") < 18
    log.write_bytes(before[: before.rindex(b"\n") + 1] + b'{"sample": {"task": "ni')
    run(*NEEDLES, "--no-plots", "--samples", 3, "--out", tmp_path)
    assert log.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    assert records(log) == records(whole / "ruler.jsonl")


def test_nothing_is_measured_twice(run, whole, monkeypatch):
    monkeypatch.setattr("pyinertia.llama.Llama.__init__", None)  # no model may be opened
    before = (whole / "ruler.jsonl").read_bytes()
    assert "inertiakv 256" in run(*NEEDLES, "--samples", 3, "--out", whole)
    assert (whole / "ruler.jsonl").read_bytes() == before


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "ruler.jsonl"
    path.write_text('{"sample": {"index": 0}, "result": {}}\n{"sam\n{"sample": {}, "result": {}}\n')
    with pytest.raises(EvalError, match=r"ruler\.jsonl, line 2 is damaged"):
        Store(path)


def test_perplexity_is_that_of_the_text(run, tiny, tmp_path):
    args = ["--samples", 2, "--length", 600, "--tokens", 24, *ARMS]
    run("ppl", *args, "--out", tmp_path)
    found = records(tmp_path / "ppl.jsonl")
    assert len(found) == 6
    vocabulary = Vocabulary(tiny)
    passages = Passages(vocabulary, None, length=600, n_tokens=24, seed=0)
    llm = Llama(tiny, n_ctx=600, n_threads=1, flash_attn=True, logits_all=True, verbose=False)
    for key, result in found.items():
        sample, index = json.loads(key), json.loads(key)["index"]
        if sample["policy"] == "full":
            assert result["kl"] == [0] * 24
            # all tokens at once, and the probabilities by their definition
            tokens = passages.sample("text", index)
            llm.reset()
            llm.eval([*tokens.prompt, *tokens.continuation])
            logits = llm.scores[len(tokens.prompt) - 1 : 599].astype(np.float64)
            p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
            nll = [-np.log(row[token]) for row, token in zip(p, tokens.continuation, strict=True)]
            assert result["nll"] == pytest.approx(nll, abs=0.02)  # f16 cells, other batches
        else:
            assert result["kl"][:2] == [0, 0]  # nothing was cut yet
            assert sum(result["kl"]) > 0
    # a further arm needs the full cache's logits again, but adds only its own samples
    run("ppl", *args[:-4], "--policies", "random", "--budgets", 256, "-t", 1, "--out", tmp_path)
    after = records(tmp_path / "ppl.jsonl")
    assert len(after) == 8
    assert after.items() >= found.items()


@pytest.mark.parametrize("policy", ["inertiakv", "tova", "streaming-llm"])
def test_an_arm_is_what_its_policy_is_in_a_model_of_its_own(tiny, policy):
    """A shared start of the prompt changes nothing, if both evaluate it in the same batches."""
    n_prompt = 512 + N_END
    tokens = Passages(Vocabulary(tiny), None, length=n_prompt + 24, n_tokens=24, seed=0)
    sample = tokens.sample("text", 0)
    assert len(sample.prompt) == n_prompt
    arms, _ = parse_arms(f"random,{policy}", "256")
    settings = Settings(model=tiny, model_sha256="", length=n_prompt + 24, seed=0, n_threads=1)
    with Models(settings) as models:
        for arm in arms:  # others before it leave nothing behind
            llm = models.ready(arm, sample)
            logits = list(teacher_forced(llm, sample))
            cells = llm.kv_cells()
    alone = Llama(
        tiny, n_ctx=n_prompt + 24, n_threads=1, n_threads_batch=1, flash_attn=True, verbose=False,
        kv_policy=policy, kv_budget=256,
    )  # fmt: skip
    expected = list(teacher_forced(alone, sample))
    assert len(cells) == 256
    assert np.array_equal(cells, alone.kv_cells())
    assert np.array_equal(logits, expected)


def test_overlap_compares_each_aggregation(run, tmp_path):
    args = ["overlap", "--samples", 1, "--length", 600, "--tokens", 8, *ARMS]
    run(*args, "--out", tmp_path)
    rows = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    names = ["inertiakv/ema", "inertiakv/last", "streaming-llm"]
    assert {row["a"] for row in rows} == set(names)
    assert {row["step"] for row in rows} == {1, 2, 8}
    for row in rows:
        if row["a"] == row["b"]:
            assert (row["jaccard"], row["spearman"]) == (1, pytest.approx(1))
        elif row["step"] == 1:  # nothing was cut yet
            assert row["jaccard"] == 1
        elif row["b"] == "streaming-llm":
            assert 0 < row["jaccard"] < 1
    cells = next(iter(records(tmp_path / "overlap.jsonl").values()))["cells"]
    assert [len(cells[step]["pos"]) for step in ("1", "2", "8")] == [593, 256, 256]


def test_data_sets_run_from_local_files(run, tmp_path):
    row = {"context": "Some text. " * 80, "input": "A question?", "answers": ["a"]}
    for name in ("trec", "lcc"):
        text = json.dumps(row | {"all_classes": ["a", "b"]}) + "\n"
        (tmp_path / f"{name}.jsonl").write_text(text)
    args = ["--samples", 2, "--length", 600, *ARMS, "--out", tmp_path]
    run("longbench", "--no-plots", "--data", tmp_path, "--tasks", "trec,lcc", *args)
    v2 = {"context": "Some text. " * 80, "question": "Which?", "answer": "A", "length": "short"}
    v2 |= {f"choice_{letter}": letter for letter in "ABCD"}
    (tmp_path / "data.json").write_text(json.dumps([v2]))
    run("longbench-v2", "--no-plots", "--data", tmp_path, "--tasks", "short", *args)
    squad = {"context": "Ten.", "qas": [{"question": "How many?", "answers": [{"text": "Ten"}]}]}
    (tmp_path / "squad.json").write_text(json.dumps({"data": [{"paragraphs": [squad]}]}))
    run("ruler", "--no-plots", "--qa", tmp_path / "squad.json", "--tasks", "qa_1", *args)
    for name, n_samples in (("longbench", 2), ("longbench-v2", 1), ("ruler", 2)):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
        assert [row["n_samples"] for row in rows] == [n_samples] * 3


def test_other_texts_are_not_compared(run, whole, tmp_path):
    lines = (whole / "ruler.jsonl").read_text().splitlines()
    changed = [json.loads(line) for line in lines]
    changed[1]["result"]["prompt"] = "of another text"
    (tmp_path / "ruler.jsonl").write_text("".join(json.dumps(line) + "\n" for line in changed))
    output = run(*NEEDLES, "--no-plots", "--samples", 3, "--out", tmp_path)
    assert "1 results are of other texts" in output
    rows = json.loads((tmp_path / "ruler.json").read_text())["rows"]
    assert [row["n_samples"] for row in rows] == [6, 5, 6]


def test_agreement_with_itself_is_whole(run, tmp_path):
    run("agree", "--samples", 2, "--length", 700, *ARMS, "--out", tmp_path)
    rows = json.loads((tmp_path / "agree.json").read_text())["rows"]
    assert rows[0]["match"]["mean"] == rows[0]["identical"] == 1
    assert rows[1]["match"]["mean"] < 1


def test_questions_need_their_data(run, tmp_path):
    args = ["ruler", "--samples", 1, "--length", 900, *ARMS, "--out", tmp_path]
    assert "pass a local copy with --qa" in run(*args, "--tasks", "qa_1", code=1)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["ruler", "--tasks", "niah_singel_1"], "Did you mean 'niah_single_1'?"),
        (["ruler", "--policies", "inertia"], "Did you mean 'inertiakv'?"),
        (["ruler", "--policies", "tova/n_sinks=2"], "'n_sinks=2' changes nothing of a policy"),
        (["ruler", "--policies", "tova/n_sink=-2"], "n_sink must be a whole number"),
        (["ruler", "--budgets", "1.5"], "'1.5' is not a budget"),
        (["ruler", "--policies", "full"], "nothing to compare with the full cache"),
        (["ruler", "--length", "2000"], "longer than the context of 1024 tokens"),
        (["ruler", "--tasks", "vt", "--length", "1000"], "vt: the shortest prompt"),
        (["ppl", "--length", "500", "--tokens", "500"], "leaves no prompt"),
        (["ppl", "--text", "nothing.txt"], "--text nothing.txt cannot be read"),
        (["longbench", "--data", "nothing"], "nothing cannot be read"),
        (["longbench-v2", "--data", "nothing"], "nothing cannot be read"),
        (["ruler", "-ctk", "f8"], "-ctk f8: the cache types are"),
        (["ruler", "-ctv", "q8_0", "--no-flash-attn"], "needs flash attention"),
    ],
)
def test_bad_input_is_one_readable_line(run, tmp_path, args, message):
    if "--length" not in args:
        args = [*args, "--length", "900"]
    if args[0] == "ruler" and "--tasks" not in args:
        args = [*args, "--tasks", "vt"]
    output = run(*args, "--out", tmp_path, code=1)
    assert message in output
    assert output.startswith("error: ")
    assert len(output.strip().splitlines()) == 1


def test_a_model_that_is_none_is_refused(tmp_path):
    for path, message in ((tmp_path / "no.gguf", "does not exist"), (Path(__file__), "not a GGUF")):
        args = ["eval", "ruler", "-m", str(path), "--out", str(tmp_path)]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 1
        assert message in done.output


def test_policies_can_be_changed():
    assert parse_policy("h2o/last/n_recent=64") == KVPolicy(
        aggregation="last", lambda_=1.0, n_recent=64
    )
    assert parse_policy("keydiff/mean/heads=max") == KVPolicy(
        scorer="keydiff", aggregation="mean", heads="max"
    )
    arms, _ = parse_arms(",".join(POLICIES), "512")
    assert [arm.name for arm in arms] == list(POLICIES)
    arms, refusals = parse_arms("inertiakv,tova/n_recent=600", "512,0.5")
    assert [arm.label for arm in arms] == [
        "full",
        "inertiakv 512",
        "inertiakv 50%",
        "tova/n_recent=600 50%",
    ]
    assert [refusal.label for refusal in refusals] == ["tova/n_recent=600 512"]


def test_a_question_can_be_named_before_its_prompt(run, tmp_path, monkeypatch):
    kv_query, asked = Llama.kv_query, []

    def recorded(self, text):
        kv_query(self, text)
        asked.append(text)

    monkeypatch.setattr(Llama, "kv_query", recorded)
    policies = "inertiakv/bounded,inertiakv/bounded/query,inertiakv/query"
    args = ["--policies", policies, "--samples", 1, "--no-plots", "--out", tmp_path]
    output = run(*NEEDLES, *args)
    assert len(asked) == 2
    assert all(text.startswith("What is the secret number of") for text in asked)
    assert "kv_query needs kv_prefill='bounded'" in " ".join(output.split())
    rows = json.loads((tmp_path / "ruler.json").read_text())["rows"]
    assert {row["arm"]: row["n_cells"] for row in rows[1:]} == {
        "inertiakv/bounded 256": 256,
        "inertiakv/bounded/query 256": 256,
    }


def test_an_interrupt_keeps_what_was_measured(run, tmp_path, monkeypatch):
    from pyinertia.eval import scored

    measure, calls = scored.Scored.measure, []

    def interrupted(self, llm, sample, arm):
        calls.append(sample)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(self, llm, sample, arm)

    monkeypatch.setattr(scored.Scored, "measure", interrupted)
    output = run(*NEEDLES, "--samples", 3, "--out", tmp_path, code=130)
    assert "the same command goes on from here" in output
    assert len(records(tmp_path / "ruler.jsonl")) == 3
    assert json.loads((tmp_path / "ruler.json").read_text())["interrupted"]
