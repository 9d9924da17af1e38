"""The commands on a tiny model: files, resuming, what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from typer.testing import CliRunner

from pyinertia import POLICIES, Llama
from pyinertia.cli import app
from pyinertia.errors import EvalError
from pyinertia.eval.arms import parse_arms
from pyinertia.eval.later import make_sample
from pyinertia.eval.models import N_END, Models
from pyinertia.eval.passages import Passages
from pyinertia.eval.play import answer, step_time, teacher_forced
from pyinertia.eval.settings import Settings
from pyinertia.eval.store import Store
from pyinertia.eval.vocabulary import Vocabulary
from pyinertia.policy import KVPolicy
from pyinertia.policy_text import effective, parse_policy

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
    assert {"task", "policy", "budget", "sample", "index", "length", "model"} <= identity.keys()
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
    passages = Passages(vocabulary, None, length=600, n_tokens=24, n_samples=2, seed=0)
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
    tokens = Passages(
        Vocabulary(tiny), None, length=n_prompt + 24, n_tokens=24, n_samples=2, seed=0
    )
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


def test_overlap_runs_each_policy_as_it_is_named(run, tmp_path):
    names = ["coupled", "h2o", "inertiakv/last", "streaming-llm"]
    args = ["overlap", "--samples", 2, "--length", 600, "--tokens", 8, "--budgets", "256", "-t", 1]
    query = "inertiakv/bounded/query"
    output = run(*args, "--policies", ",".join([*names, query]), "--out", tmp_path)
    # a text asks nothing that could be named
    assert f"{query} 256 did not run: text asks no question" in " ".join(output.split())
    rows = json.loads((tmp_path / "overlap.json").read_text())["rows"]
    assert {row["a"] for row in rows} == set(names)
    assert {row["step"] for row in rows} == {1, 2, 8}
    for row in rows:
        jaccard = row["jaccard"]
        if row["a"] == row["b"]:
            assert (jaccard["mean"], row["spearman"]["mean"]) == (1, pytest.approx(1))
        elif row["step"] == 1:  # nothing was cut yet
            assert jaccard["mean"] == 1
        elif row["b"] == "streaming-llm":
            assert 0 < jaccard["mean"] < 1
        # two samples tell little: of a share of 0.842, 1 - 0.025^(1/2), two of two may lack
        same = row["a"] == row["b"] or row["step"] == 1
        assert jaccard["low"] == pytest.approx(1 - 0.8419 if same else 0, abs=1e-4)
        assert jaccard["high"] == 1
    fields = {}
    for key, result in records(tmp_path / "overlap.jsonl").items():
        sample = json.loads(key)
        fields[sample["policy"]] = (sample["fields"]["aggregation"], sample["fields"]["beta"])
        counts = [len(result["cells"][step]["pos"]) for step in ("1", "2", "8")]
        assert counts == [593, 256, 256]
    assert fields["coupled"] == ("coupled", 0.99)
    assert fields["h2o"][0] == "sum"
    assert fields["inertiakv/last"][0] == "last"


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


def test_what_a_result_depends_on_is_measured_again(tiny, tmp_path, monkeypatch):
    """Other answers to the same prompt, other fields under a name, threads, layers, versions."""
    vocabulary = Vocabulary(tiny)
    passages = Passages(vocabulary, None, length=600, n_tokens=24, n_samples=2, seed=0)
    (arm,) = parse_arms("inertiakv", "256")[0][1:]
    settings = Settings(model=tiny, model_sha256="x", length=600, seed=0, n_threads=1)
    sample = replace(passages.sample("text", 0), answers=("yes",))

    def key(settings=settings, arm=arm, sample=sample) -> dict:
        return settings.identity("ppl", arm, ("text", 0), sample.sha256)

    store = Store(tmp_path / "ppl.jsonl")
    store.add(key(), {"score": 1})
    store.close()
    store = Store(tmp_path / "ppl.jsonl")
    assert store.get(key()) == {"score": 1}
    assert store.get(key(sample=replace(sample, answers=("no",)))) is None
    assert store.get(key(sample=replace(sample, question_span=(1, 2)))) is None
    assert store.get(key(arm=replace(arm, policy=replace(arm.policy, n_pool=9)))) is None
    assert store.get(key(settings=replace(settings, n_threads=2))) is None
    assert store.get(key(settings=replace(settings, n_gpu_layers=1))) is None
    monkeypatch.setattr("pyinertia.__version__", "0+other")
    assert store.get(key()) is None
    store.close()


def test_answers_of_changed_data_are_measured_again(run, tmp_path):
    args = ["ruler", "--no-plots", "--tasks", "qa_1", "--samples", 1, "--length", 600, *ARMS]
    for word in ("Ten", "Six"):  # the prompt is the same
        question = {"question": "How many?", "answers": [{"text": word}]}
        paragraph = {"context": "Ten or six.", "qas": [question]}
        (tmp_path / "qa.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
        run(*args, "--qa", tmp_path / "qa.json", "--out", tmp_path)
    assert len(records(tmp_path / "ruler.jsonl")) == 2 * 3


def test_windows_of_a_text_do_not_overlap(tiny, tmp_path):
    # a byte is a token, and these bytes are all there are of theirs
    text = "".join(chr(0x4E00 + i) for i in range(1700))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    vocabulary = Vocabulary(tiny)

    def windows(n_samples: int, seed: int) -> list[tuple[int, ...]]:
        given = {"length": 601, "n_tokens": 24, "n_samples": n_samples, "seed": seed}
        passages = Passages(vocabulary, tmp_path / "text.txt", **given)
        samples = [passages.sample("text", i) for i in range(n_samples)]
        return [(*s.prompt, *s.continuation)[len(vocabulary.encode("")) :] for s in samples]

    every = windows(8, 0)  # 5,100 tokens
    tokens = vocabulary.encode(text)
    starts = sorted(
        next(i for i in range(len(tokens)) if tuple(tokens[i : i + 600]) == window)
        for window in every
    )
    assert all(b - a >= 600 for a, b in pairwise(starts))
    assert windows(3, 0) == every[:3]
    assert windows(3, 1) != every[:3]
    with pytest.raises(EvalError, match=r"8 windows of --length 601 .* or --samples 8"):
        windows(9, 0)


def test_the_time_of_a_step_has_its_share_of_scored_ones():
    # the prompt, the first step with all cells, the cut; then 1 scored step of 9 among 3 of 1
    steps = [90, 50, 60, *[1, 1, 9, 1] * 3]
    assert step_time(steps, 4) == (1 + 1 + 9 + 1) / 4
    assert step_time([*steps, 1, 1], 4) == (1 + 1 + 9 + 1) / 4  # a period that is not whole
    assert step_time(steps[:-5], 4) is None  # 7 steps
    assert step_time(steps[:11], 1) == 3


@pytest.mark.parametrize("task", ["after_300", "second_question"])
def test_later_answers_go_on_from_the_whole_conversation(run, tiny, tmp_path, task):
    run("later", "--tasks", task, "--length", 900, "--samples", 1, *ARMS, "--out", tmp_path)
    results = {json.loads(k)["policy"]: r for k, r in records(tmp_path / "later.jsonl").items()}
    assert set(results) == {"full", "inertiakv", "streaming-llm"}
    assert [results[name]["n_cells"] for name in results if name != "full"] == [256, 256]

    sample = make_sample(task, Vocabulary(tiny), length=900, seed=0, index=0)
    whole = replace(
        sample,
        prompt=sample.prompt + sample.continuation + sample.next_prompt,
        continuation=(),
        next_prompt=(),
    )
    llm = Llama(tiny, n_ctx=900, n_threads=1, flash_attn=True, verbose=False)
    assert results["full"]["tokens"] == answer(llm, whole)["tokens"]


def test_agreement_with_itself_is_whole(run, tmp_path):
    run("agree", "--samples", 2, "--length", 700, *ARMS, "--out", tmp_path)
    rows = json.loads((tmp_path / "agree.json").read_text())["rows"]
    assert rows[0]["match"]["mean"] == rows[0]["identical"] == 1
    assert rows[1]["match"]["mean"] < 1


def test_questions_need_their_data(run, tmp_path):
    args = ["ruler", "--samples", 1, "--length", 900, *ARMS, "--out", tmp_path]
    assert "pass a local copy with --qa" in run(*args, "--tasks", "qa_1", code=2)


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
        (["ruler", "-ctv", "q8_0", "-fa", "off"], "need flash attention"),
        (["ruler", "-fa", "auto"], "-fa auto: must be on or off"),
        (["ruler", "--policies", "h2o,h2o/beta=0.5"], "h2o and h2o/beta=0.5 keep the same cells"),
        (["ruler", "--policies", "h2o,h2o/scorer=none"], "h2o/scorer=none evicts nothing"),
        (["ruler", "--policies", "tova/last/ema"], "changes aggregation twice"),
        (["ppl", "--samples", "9999"], "windows of --length 900 that do not overlap"),
    ],
)
def test_bad_input_is_one_readable_line(run, tmp_path, args, message):
    if "--length" not in args:
        args = [*args, "--length", "900"]
    if args[0] == "ruler" and "--tasks" not in args:
        args = [*args, "--tasks", "vt"]
    output = run(*args, "--out", tmp_path, code=2)
    assert message in output
    assert output.startswith("error: ")
    assert len(output.strip().splitlines()) == 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux binds to CPUs")
def test_threads_are_the_cpus_that_may_be_used():
    code = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    code += "from pyinertia.eval.options import Options; print(Options.threads)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "1\n"


def test_a_model_that_is_none_is_refused(tmp_path):
    for path, message in ((tmp_path / "no.gguf", "does not exist"), (Path(__file__), "not a GGUF")):
        args = ["eval", "ruler", "-m", str(path), "--out", str(tmp_path)]
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 2
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
    # what the preset's budget has no room for, this one has; the other way round is refused
    arms, _ = parse_arms("inertiakv/n_recent=1024,inertiakv/n_refresh=2000", "2048")
    assert [arm.policy for arm in arms[1:]] == [
        KVPolicy(n_recent=1024, n_budget=2048),
        KVPolicy(n_refresh=2000, n_budget=2048),
    ]
    # each budget once, however it is written
    arms, _ = parse_arms("h2o", "0.12,0.124,0.120,256,0256")
    assert [arm.label for arm in arms] == ["full", "h2o 12%", "h2o 12.4%", "h2o 256"]
    arms, refusals = parse_arms("inertiakv,tova/n_recent=600", "512,0.5")
    assert [arm.label for arm in arms] == [
        "full",
        "inertiakv 512",
        "inertiakv 50%",
        "tova/n_recent=600 50%",
    ]
    assert [refusal.label for refusal in refusals] == ["tova/n_recent=600 512"]


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("h2o", "h2o/beta=0.5", True),
        ("inertiakv/last", "tova/lambda_=None/n_window=16/n_pool=21", True),
        ("streaming-llm", "streaming-llm/heads=max", True),
        ("streaming-llm", "streaming-llm/frozen=True", False),  # generated tokens outrank
        ("random", "random/seed=1", False),
        ("inertiakv", "inertiakv/seed=1", True),
        ("score-free", "score-free/last", True),  # a first ranking and no other
        ("score-free", "score-free/sum", False),
        ("score-free/bounded", "score-free/bounded/last", False),  # every batch has a ranking
        ("keydiff", "keydiff/n_window=0", True),
        ("inertiakv", "inertiakv/beta=0.9", False),
    ],
)
def test_policies_that_are_one_in_effect_are_known(one, other, same):
    assert (effective(parse_policy(one)) == effective(parse_policy(other))) is same


def test_a_question_can_be_named_before_its_prompt(run, tmp_path, monkeypatch):
    kv_query, asked = Llama.kv_query, []

    def recorded(self, text):
        kv_query(self, text)
        asked.append((text, self.n_batch))

    monkeypatch.setattr(Llama, "kv_query", recorded)
    one, own, other = (f"inertiakv/bounded{end}" for end in ("", "/query", "/query=Which numbers?"))
    args = ["--policies", f"{one},{own},{other},inertiakv/query", "-b", 256]
    output = run(*NEEDLES, *args, "--samples", 1, "--no-plots", "--out", tmp_path)
    texts = sorted(text for text, _ in asked)
    assert texts[2:] == ["Which numbers?"] * 2
    assert all(text.startswith("What is the secret number of") for text in texts[:2])
    assert {n_batch for _, n_batch in asked} == {256}
    assert "kv_query needs kv_prefill='bounded'" in " ".join(output.split())
    rows = json.loads((tmp_path / "ruler.json").read_text())["rows"]
    assert {row["arm"]: row["n_cells"] for row in rows[1:]} == {
        f"{one} 256": 256,
        f"{own} 256": 256,
        f"{other} 256": 256,
    }


def test_a_question_that_is_too_long_refuses_its_policy_alone(run, tmp_path):
    args = ["--policies", "inertiakv/bounded/query,inertiakv/bounded", "-b", 128]
    output = run(*NEEDLES, *args, "--samples", 1, "--no-plots", "--out", tmp_path)
    assert "more than half of n_batch, 64" in " ".join(output.split())
    rows = json.loads((tmp_path / "ruler.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["full", "inertiakv/bounded 256"]


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
