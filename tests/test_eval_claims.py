"""Claims: the numbers behind them by hand, the verdicts, and the command on a tiny model."""

from __future__ import annotations

import json

import pytest
import tiny_models
from typer.testing import CliRunner

from pyinertia.cli import app
from pyinertia.eval import claims, reproduction
from pyinertia.eval.cli import CLAIMED

BUDGET = 256


def judge(evaluation: str, by_policy: dict[str, list[dict]]) -> dict[str, dict]:
    """Rows by claim, of results that are given in the order of the samples."""
    results = {name: {} for name in ("ruler", "ppl", "overlap")}
    for policy, given in by_policy.items():
        results[evaluation][policy, BUDGET] = {("task", i): r for i, r in enumerate(given)}
    return {row["claim"]: row for row in claims.judge(results, [BUDGET])}


def kept(*pos: int) -> dict:
    cells = {"pos": list(pos), "score": [1.0] * len(pos)}
    return {"cells": {"1": {"pos": [0], "score": [1.0]}, "32": cells}}


def test_the_command_runs_the_policies_of_the_claims():
    assert set(CLAIMED.split(",")) == set(claims.POLICIES)


def test_kept_cells_are_those_after_the_last_step():
    rows = judge(
        "overlap",
        {
            "inertiakv": [kept(0, 1, 2, 3)] * 5,
            "value-norm": [kept(0, 1, 2, 3)] * 5,
            "entropy": [kept(0, 1, 2, 4)] * 5,
            "keydiff": [kept(0, 1, 4, 5)] * 5,
            "inertiakv/last": [kept(0, 1, 2, 3)] * 5,
            "value-norm/last": [kept(0, 1, 2, 5)] * 5,
        },
    )
    same = rows["value-norm keeps nearly the same cells"]
    assert (same["measured"]["mean"], same["verdict"]) == (1, "confirmed")
    other = rows["entropy keeps nearly the same cells"]
    assert (other["measured"]["mean"], other["verdict"]) == (pytest.approx(3 / 5), "refuted")
    assert rows["keydiff changes the ranking"]["measured"]["mean"] == pytest.approx(2 / 6)
    assert rows["keydiff changes the ranking"]["verdict"] == "confirmed"
    gain = rows["EMA brings value-norm nearer to attention"]
    assert (gain["measured"]["mean"], gain["verdict"]) == (pytest.approx(2 / 5), "confirmed")
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
        },
    )
    row = rows["keydiff loses quality: prose"]
    assert row["measured"]["mean"] == pytest.approx(1)  # 2 x and 1/2 x
    assert 0.5 <= row["measured"]["low"] < 0.8
    assert row["measured"]["low"] * row["measured"]["high"] == pytest.approx(1)
    assert row["verdict"] == "inconclusive"
    cost = rows["score-free costs 0.03: perplexity"]
    assert (cost["measured"]["mean"], cost["verdict"]) == (0, "confirmed")


def test_few_samples_decide_nothing():
    for n, verdict in ((4, "inconclusive"), (5, "confirmed")):
        rows = judge("overlap", {name: [kept(0, 1)] * n for name in ("inertiakv", "value-norm")})
        assert rows["value-norm keeps nearly the same cells"]["verdict"] == verdict


def test_scores_and_speeds():
    def answer(score: float, t_token: float | None) -> dict:
        return {"score": score, "t_token": t_token}

    rows = judge(
        "ruler",
        {
            "inertiakv": [answer(1, 0.02)] * 6,
            "inertiakv-lazy": [answer(1, 0.01)] * 5 + [answer(1, None)],
            "score-free": [answer(0.5, 0.02)] * 6,
            "streaming-llm": [answer(1, 0.02)] * 6,
        },
    )
    lazy = rows["lazy decodes 1.34 to 1.46 x as fast"]
    assert (lazy["measured"]["mean"], lazy["n_samples"]) == (pytest.approx(2), 5)
    assert lazy["verdict"] == "confirmed"
    assert rows["score-free costs 0.03: retrieval"]["measured"]["mean"] == 0.5
    assert rows["score-free costs 0.03: retrieval"]["verdict"] == "refuted"
    # no difference at all is neither
    assert rows["recency loses quality: retrieval"]["verdict"] == "inconclusive"


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
        assert row["verdict"] == "inconclusive", row  # of one sample, or four
        assert row["claim"] in done.output
    assert (tmp_path / "reproduce-claims-256.png").read_bytes().startswith(b"\x89PNG")

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
