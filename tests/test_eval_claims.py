"""Claims: the numbers behind them by hand, the verdicts, and the command on a tiny model."""

from __future__ import annotations

import json
import math
import re

import pages
import pytest
import tiny_models
from typer.testing import CliRunner

from pyinertia.cli import app
from pyinertia.eval import claims, reproduction
from pyinertia.eval.arms import parse_arms
from pyinertia.eval.cli import CLAIMED

BUDGET = 256


def judge(evaluation: str, by_policy: dict[str, list[dict]]) -> dict[str, dict]:
    """Rows by claim, of results that are given in the order of the samples."""
    results = {name: {} for name in ("ruler", "ppl", "overlap", "speed")}
    for policy, given in by_policy.items():
        results[evaluation][policy, BUDGET] = {("task", i): r for i, r in enumerate(given)}
    return {row["claim"]: row for row in claims.judge(results, [BUDGET])}


def kept(*pos: int) -> dict:
    cells = {"pos": list(pos), "score": [1.0] * len(pos)}
    return {"cells": {"1": {"pos": [0], "score": [1.0]}, "32": cells}}


def test_the_command_runs_the_policies_of_the_claims():
    assert set(CLAIMED.split(",")) == set(claims.POLICIES)


def test_the_page_has_every_claim_and_the_verdict_of_its_interval():
    rows = {}
    for line in pages.read("docs/measured.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and cells[-1] in ("confirmed", "refuted", "inconclusive"):
            rows[cells[0]] = cells[1:]
    assert list(rows) == [claim.text for claim in claims.CLAIMS]
    for claim in claims.CLAIMS:
        measure, claimed, number, n_samples, verdict = rows[claim.text]
        assert (measure, claimed) == (claim.measure.title, claim.range)
        _, low, high = map(float, re.findall(r"-?[\d.]+", number))
        assert claims._verdict(claim, low, high, [int(n_samples)]) == verdict, claim.text


def test_the_pages_commands_name_policies_that_exist():
    found = [words for page in pages.PAGES for words in pages.commands(page)]
    evals = [words for words in found if words[:2] == ["pyinertia", "eval"]]
    named = [words[words.index("--policies") + 1] for words in evals if "--policies" in words]
    assert len(named) >= 3
    for policies in named:
        arms, refusals = parse_arms(policies, "512")
        assert not refusals
        assert len(arms) == 1 + len(policies.split(","))


def test_kept_cells_are_those_after_the_last_step():
    rows = judge(
        "overlap",
        {
            "inertiakv": [kept(0, 1, 2, 3)] * 6,
            "value-norm": [kept(0, 1, 2, 3)] * 6,
            "entropy": [kept(0, 1, 2, 4), kept(0, 1, 4, 5)] * 3,
            "keydiff": [kept(0, 1, 4, 5), kept(0, 4, 5, 6)] * 3,
            "inertiakv/last": [kept(0, 1, 2, 3)] * 6,
            "value-norm/last": [kept(0, 1, 2, 5), kept(0, 1, 5, 6)] * 3,
        },
    )
    same = rows["value-norm keeps nearly the same cells"]
    assert same["measured"]["mean"] == 1
    # six samples without a loss leave room for one of 1 - 0.025^(1/6)
    assert same["measured"]["low"] == pytest.approx(1 - 0.4593, abs=1e-4)
    assert same["verdict"] == "inconclusive"
    other = rows["entropy keeps nearly the same cells"]
    assert other["measured"]["mean"] == pytest.approx((3 / 5 + 2 / 6) / 2)
    assert other["verdict"] == "refuted"
    assert rows["keydiff changes the ranking"]["measured"]["mean"] == pytest.approx(
        (2 / 6 + 1 / 7) / 2
    )
    assert rows["keydiff changes the ranking"]["verdict"] == "confirmed"
    gain = rows["EMA brings value-norm nearer to attention"]
    assert gain["measured"]["mean"] == pytest.approx(1 - (3 / 5 + 2 / 6) / 2)
    assert gain["verdict"] == "confirmed"
    assert rows["key-norm changes the ranking"]["verdict"] == "not measured"


def test_ratios_are_geometric_means_after_the_cut():
    before = [9.0, 9.0]  # the first two tokens are predicted with all cells
    rows = judge(
        "ppl",
        {
            "inertiakv": [{"kl": [*before, 0.1, 0.3], "nll": [*before, 1, 1]}] * 6,
            "keydiff": [
                {"kl": [*before, 0.4, 0.4], "nll": [*before, 2, 2]},
                {"kl": [*before, 0.1, 0.1], "nll": [*before, 2, 2]},
            ]
            * 3,
            "score-free": [{"kl": [*before, 1, 1], "nll": [*before, 1, 1]}] * 6,
            "key-norm": [{"kl": [*before, 0, 0], "nll": [*before, 1, 1]}]
            + [{"kl": [*before, 0.2, n / 10], "nll": [*before, 1, 1]} for n in range(5)],
            "streaming-llm": [{"kl": [*before, 0, 0], "nll": [*before, 1, 1]}] * 6,
        },
    )
    row = rows["keydiff loses quality: prose"]
    assert row["measured"]["mean"] == pytest.approx(1)  # 2 x and 1/2 x
    # logarithms of +-log 2: Student's 2.5706 of 5, and a standard deviation of log 2 sqrt(6/5)
    half = 2.5706 * math.log(2) * math.sqrt(6 / 5) / math.sqrt(6)
    assert row["measured"]["low"] == pytest.approx(math.exp(-half), rel=1e-4)
    assert row["measured"]["high"] == pytest.approx(math.exp(half), rel=1e-4)
    assert row["verdict"] == "inconclusive"
    cost = rows["score-free costs 0.03: perplexity"]
    assert (cost["measured"]["mean"], cost["verdict"]) == (0, "inconclusive")  # all are the same
    # a ratio of 0 has no logarithm: it is left out, and that is said
    dropped = rows["key-norm loses quality: prose"]
    assert (dropped["n_samples"], dropped["n_dropped"]) == (5, 1)
    assert dropped["measured"]["mean"] == pytest.approx(
        math.prod((0.2 + n / 10) / 0.4 for n in range(5)) ** (1 / 5)
    )
    nothing = rows["recency loses quality: prose"]
    assert (nothing["n_samples"], nothing["verdict"]) == (0, "not measured")
    assert [note.split(":")[0] for note in claims.notes(list(rows.values()))] == [
        "key-norm loses quality",
        "recency loses quality",
    ]


def test_a_ratio_to_nothing_is_left_out():
    zero = {"kl": [9, 9, 0, 0], "nll": [9, 9, 1, 1]}
    rows = judge("ppl", {"inertiakv": [zero] * 6, "keydiff": [zero] * 6})
    assert rows["keydiff loses quality: prose"]["n_dropped"] == 6


def test_few_samples_decide_nothing():
    for n, verdict in ((4, "inconclusive"), (5, "confirmed")):
        by_policy = {
            "inertiakv": [kept(*range(20 + i)) for i in range(n)],
            "value-norm": [kept(*range(21 + i)) for i in range(n)],  # 20/21 and more
        }
        rows = judge("overlap", by_policy)
        assert rows["value-norm keeps nearly the same cells"]["verdict"] == verdict


def test_few_samples_of_one_task_decide_nothing():
    def answers(score: float, n: int) -> dict:
        return {("one", i): {"score": score + i / 100} for i in range(9)} | {
            ("other", i): {"score": score + i / 100} for i in range(n)
        }

    for n, verdict in ((1, "inconclusive"), (4, "inconclusive"), (5, "confirmed")):
        ruler = {
            ("inertiakv", BUDGET): {key: {"score": 1} for key in answers(0, n)},
            ("keydiff", BUDGET): answers(0.1, n),
        }
        rows = claims.judge({"ruler": ruler, "ppl": {}, "overlap": {}, "speed": {}}, [BUDGET])
        found = {row["claim"]: row["verdict"] for row in rows}
        assert found["keydiff loses quality: retrieval"] == verdict


def test_scores():
    def answers(*scores: float) -> list[dict]:
        return [{"score": score} for score in scores]

    n = 32
    rows = judge(
        "ruler",
        {
            "inertiakv": answers(*[1] * n),
            "score-free": answers(*[1] * n),
            "streaming-llm": answers(*[1] * n),
            "key-norm": answers(*[0.5, 0.4] * (n // 2)),
        },
    )
    assert rows["key-norm loses quality: retrieval"]["measured"]["mean"] == pytest.approx(-0.55)
    assert rows["key-norm loses quality: retrieval"]["verdict"] == "confirmed"
    # no difference at all is neither
    assert rows["recency loses quality: retrieval"]["verdict"] == "inconclusive"
    # 32 pairs without a loss do not exclude a cost of 0.03, which one loss of 1 in 30 has
    cost = rows["score-free costs 0.03: retrieval"]
    assert cost["measured"]["high"] == pytest.approx(1 - 0.025 ** (1 / n), abs=1e-6)
    assert cost["verdict"] == "inconclusive"
    # 122 do: 1 - 0.025^(1/122) is below 0.03
    rows = judge("ruler", {"inertiakv": answers(*[1] * 122), "score-free": answers(*[1] * 122)})
    assert rows["score-free costs 0.03: retrieval"]["verdict"] == "confirmed"


def test_speed_is_that_of_the_same_turns():
    slow = [{"turns": [2.0, 40.0, 4.0 + i / 10]} for i in range(6)]
    fast = [{"turns": [1.0, 10.0, 1.0]} for i in range(6)]  # 2 x, 4 x, 4 x and more
    rows = judge("speed", {"inertiakv": slow, "inertiakv-lazy": fast})
    lazy = rows["lazy decodes 1.34 to 1.46 x as fast"]
    assert lazy["measured"]["mean"] == pytest.approx(4)
    assert (lazy["n_samples"], lazy["verdict"]) == (6, "inconclusive")  # all are the same
    slow = [{"turns": [1.5 + i / 100]} for i in range(6)]
    fast = [{"turns": [1.0]} for i in range(6)]
    rows = judge("speed", {"inertiakv": slow, "inertiakv-lazy": fast})
    assert rows["lazy decodes 1.34 to 1.46 x as fast"]["verdict"] == "confirmed"


@pytest.mark.parametrize(
    ("policies", "message"),
    [
        ("h2o", "no claim is about h2o; known are value-norm, inertiakv"),
        ("inertiakv,keydiff,h2o,tova", "no claim is about h2o, tova;"),
        ("keydiff,full", "no claim is about these alone"),
        (",", "nothing to compare"),
    ],
)
def test_other_policies_are_refused(tmp_path, policies, message):
    model = tiny_models.write_llama(tmp_path / "llama.gguf")
    args = ["eval", "reproduce", "-m", str(model), "--policies", policies]
    done = CliRunner().invoke(app, [*args, "--out", str(tmp_path / "new")])
    assert done.exit_code == 2
    assert message in done.output
    assert len(done.output.strip().splitlines()) == 1
    assert not (tmp_path / "new").exists()


def test_the_command_judges_every_claim(tmp_path, monkeypatch):
    # the others are too long for a tiny model, to which every byte is a token
    monkeypatch.setattr(reproduction, "TASKS", ("niah_single_1",))
    model = tiny_models.write_llama(tmp_path / "llama.gguf")
    args = ["eval", "reproduce", "-m", str(model), "--samples", "1", "--length", "800"]
    args += ["--tokens", "8", "--out", str(tmp_path), "-t", "1"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output + repr(done.exception)
    report = json.loads((tmp_path / "reproduce.json").read_text())
    assert [row["claim"] for row in report["rows"]] == [claim.text for claim in claims.CLAIMS]
    assert report["refusals"] == []
    for row in report["rows"]:
        assert row["verdict"] in ("inconclusive", "not measured"), row  # of one sample
        # the score-free first ranking of a tiny model may be that of the full cache
        assert row["n_samples"] + row["n_dropped"] == 1
        assert row["claim"] in done.output
    assert (tmp_path / "reproduce-claims-256.png").read_bytes().startswith(b"\x89PNG")

    turns = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["sample"]["policy"] for line in turns] == ["inertiakv-lazy", "inertiakv"]
    assert all(len(line["result"]["turns"]) == 8 for line in turns)

    # of fewer policies fewer claims can be judged, and nothing is measured again
    lines = (tmp_path / "ppl.jsonl").read_bytes()
    done = CliRunner().invoke(app, [*args, "--policies", "inertiakv,keydiff"])
    rows = json.loads((tmp_path / "reproduce.json").read_text())["rows"]
    judged = {row["claim"] for row in rows if row["verdict"] != "not measured"}
    assert judged == {
        "keydiff changes the ranking",
        "keydiff loses quality: prose",
        "keydiff loses quality: retrieval",
    }
    assert (tmp_path / "ppl.jsonl").read_bytes() == lines
