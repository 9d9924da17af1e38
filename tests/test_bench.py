"""The benchmark's own arithmetic and its sides; real processes, a tiny model, no times."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
from gguf import GGUFReader
from typer.testing import CliRunner

from pyinertia.bench import documents, gguf, openvino, plots, summary
from pyinertia.bench.run import Run, text_tokens
from pyinertia.bench.settings import N_SETTLE, Settings
from pyinertia.bench.sides import Repeat, Side, specs
from pyinertia.bench.worker import N_BATCH
from pyinertia.cli import app
from pyinertia.errors import BenchError, CommandError, PolicyError
from pyinertia.vocabulary import open_vocabulary

N_PROMPT, BUDGET, N_DECODED = 120, 64, 19  # 4 to settle and 3 turns of 1 + 4
CELL_BYTES = 2 * tiny_models.N_LAYER * 2 * 32 * 2  # K and V, layers, KV heads of 32, f16
SIDES = ["stock", "stock, context of 64", "kv_policy=None", "inertiakv", "streaming-llm"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return tiny_models.write_llama(tmp_path_factory.mktemp("bench") / "llama.gguf")


@pytest.fixture(scope="module")
def settings(tiny, stock_lib_dir) -> Settings:
    return Settings(
        model=tiny,
        prompts=(N_PROMPT,),
        budgets=(BUDGET,),
        policies=("inertiakv", "streaming-llm"),
        threads=(1,),
        types_k=("f16",),
        types_v=(),
        flash_attn=True,
        n_tokens=N_DECODED + 2,  # two are left over: no turn of their own
        n_block=4,
        repeats=2,
        full_cache=True,
        stock_lib=stock_lib_dir,
        openvino=None,
    )


def bench(*args: object):
    return CliRunner().invoke(app, ["bench", *map(str, args)])


@pytest.fixture(scope="module")
def done(tiny, stock_lib_dir, tmp_path_factory):
    """One whole run of the command: its output and its files."""
    folder = tmp_path_factory.mktemp("out")
    result = bench(
        *("-m", tiny, "-p", N_PROMPT, "--budget", BUDGET, "-n", N_DECODED, "--block", 4),
        *("-r", 2, "-t", 1, "--policies", "inertiakv,streaming-llm", "--stock-lib", stock_lib_dir),
        *("--openvino", "off", "--json", folder / "bench.json", "--plots", folder / "plots"),
    )
    assert result.exit_code == 0, result.output
    return result, json.loads((folder / "bench.json").read_text()), folder / "plots"


def test_json_has_every_side_and_every_raw_repeat(done):
    _, results, _ = done
    (group,) = results["groups"]
    assert group["n_prompt"] == N_PROMPT
    assert [side["name"] for side in group["sides"]] == SIDES
    for side in group["sides"]:
        assert side["failed"] == ""
        assert len(side["repeats"]) == 2
        for repeat in side["repeats"]:
            assert len(repeat["prefill"]) == 1
            assert len(repeat["settle"]) == N_SETTLE
            assert [len(turn) for turn in repeat["turns"]] == [5, 5, 5]
        unknown = {name for name, cell in side["summary"].items() if cell is None}
        assert unknown == expected_unknown(side)


def expected_unknown(side) -> set[str]:
    unknown = set() if side["policy"] else {"cut_ms"}
    unknown |= {"kv_bytes_resident"} if side["kind"] == "stock" else set()
    if side["name"] == SIDES[1]:  # its prompt is another one
        return unknown | {"x_stock_prefill"}
    return unknown if side["budget"] else unknown | {"x_stock_at_budget"}


def test_json_names_what_the_numbers_depend_on(done, tiny):
    _, results, _ = done
    assert results["settings"]["model"] == str(tiny)
    assert results["settings"]["budgets"] == [BUDGET]
    assert set(results["machine"]) == {"cpu", "n_cpus", "system"}
    assert {"pyinertia", "llama_cpp_python", "llama.cpp", "python"} == set(results["versions"])
    assert results["read_bandwidth"]["1"] > 0


def test_bytes_are_those_of_the_cells(done):
    sides = {side["name"]: side["summary"] for side in done[1]["groups"][0]["sides"]}
    # contexts are padded to 256 cells
    assert sides["kv_policy=None"]["kv_bytes"]["median"] == 256 * CELL_BYTES
    used = {name: cells["kv_bytes_used"]["median"] for name, cells in sides.items()}
    assert used["kv_policy=None"] == (N_PROMPT + N_DECODED) * CELL_BYTES
    assert used["inertiakv"] == used["streaming-llm"] == BUDGET * CELL_BYTES
    # stock's log has two digits of MiB
    assert used["stock"] == pytest.approx(used["kv_policy=None"], rel=0.05)
    assert used["stock, context of 64"] == pytest.approx(used["inertiakv"], rel=0.05)


def test_sides_with_a_full_cache_can_be_left_out(settings):
    without = replace(settings, full_cache=False)
    names = [spec.name for spec in specs(without, next(without.groups()))]
    assert names == [name for name in SIDES if name not in ("stock", "kv_policy=None")]


def test_table_has_every_side(done):
    rows = [line.split("|") for line in done[0].stdout.splitlines() if line.startswith("|")]
    assert [row[1].strip() for row in rows if row[1].strip() in SIDES] == SIDES
    assert len({len(row) for row in rows}) == 1


def test_plots_are_pngs_of_the_stated_size(done, tmp_path):
    _, results, bars = done
    # a second prompt, so that there are lines instead of bars
    longer = {**results["groups"][0], "n_prompt": 2 * N_PROMPT}
    plots.write({**results, "groups": [*results["groups"], longer]}, tmp_path)
    names = ["decode_by_budget", "decode_by_prompt", "memory_by_prompt", "prefill_by_prompt"]
    for folder in (bars, tmp_path):
        paths = sorted(folder.iterdir())
        assert [path.name for path in paths] == [f"{name}.png" for name in names]
        for path in paths:
            head = path.read_bytes()[:24]
            assert head[:8] == b"\x89PNG\r\n\x1a\n"
            assert struct.unpack(">II", head[16:24]) == (1200, 600)


def test_what_was_not_measured_is_not_drawn(done, tmp_path):
    results = json.loads(json.dumps(done[1]))
    for side in results["groups"][0]["sides"]:  # nothing of it came to decoding
        side["summary"]["decode_ms"] = None
    paths = plots.write(results, tmp_path)
    assert [path.name for path in paths] == ["prefill_by_prompt.png", "memory_by_prompt.png"]
    assert sorted(paths) == sorted(tmp_path.iterdir())
    # Ctrl-C before the end of the first window
    assert plots.write({"settings": results["settings"], "windows": []}, tmp_path) == []


def test_a_policy_is_read_as_eval_reads_it(settings):
    changed = replace(settings, policies=("inertiakv/n_sink=8",), stock_lib=None, full_cache=False)
    changed.check()
    (spec,) = specs(changed, next(changed.groups()))
    side = Side(spec, changed, next(changed.groups()), text_tokens(changed.model, 200))
    try:
        side.open()
        assert side.failed == ""
    finally:
        side.close()


def test_a_turn_counts_all_but_its_first_token():
    repeat = Repeat(turns=[[90.0, 2.0, 4.0], [90.0, 5.0, 5.0], [90.0, 30.0, 50.0]])
    assert summary.decode_ms(repeat, 0) == 5.0  # of 3, 5, 40
    assert summary.decode_per_second(repeat, 0) == 200.0


def test_the_first_cut_is_what_its_step_takes_beyond_an_ordinary_one():
    repeat = Repeat(
        settle=[70.0, 12.0, 6.0, 5.0],
        turns=[[5.0, 5.0, 5.0]],
        prompt_stats={"n_evicted": 0},
        stats={"n_evicted": 60},
    )
    assert summary.cut_ms(repeat, 100) == 7.0
    # a bounded prefill has cut before
    assert summary.cut_ms(replace(repeat, prompt_stats={"n_evicted": 9}), 100) is None


def test_weights_of_a_step_are_what_another_reader_finds(tiny, tmp_path):
    sizes = {tensor.name: tensor.n_bytes for tensor in GGUFReader(tiny).tensors}
    assert gguf.read(tiny)[1] == pytest.approx(sizes, abs=31)  # padding between tensors
    # the embedding is the output matrix too
    assert gguf.bytes_per_token(tiny) == pytest.approx(sum(sizes.values()), abs=31 * len(sizes))


def test_a_side_that_fails_is_a_row_and_the_others_go_on(settings, lib_dir):
    # our own library is not the unpatched one
    run = Run(replace(settings, stock_lib=lib_dir, repeats=1))
    run.measure(lambda _: None, lambda _: None)
    sides = {side["name"]: side for side in run.results()["groups"][0]["sides"]}
    assert "is a patched library, not stock" in sides["stock"]["failed"]
    assert sides["stock"]["summary"]["decode_ms"] is None
    assert sides["inertiakv"]["summary"]["decode_ms"]["median"] > 0
    assert sides["inertiakv"]["summary"]["x_stock"] is None


def test_a_process_that_dies_says_how(settings):
    group = next(settings.groups())
    spec = list(specs(settings, group))[3]
    side = Side(spec, settings, group, text_tokens(settings.model, 200))
    try:
        side.open()
        side.begin(N_DECODED)
        side.prefill(N_PROMPT)
        side._process.kill()
        side.settle(N_SETTLE)
        assert "killed by signal 9" in side.failed
        side.turn(5)  # does nothing
    finally:
        side.close()
    assert side.repeats[0].turns == []


def test_interrupted_runs_show_what_they_have(settings):
    run = Run(settings)

    def interrupt(_: int) -> None:
        if run.measured[0][1] and len(run.measured[0][1][0].repeats) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.measure(interrupt, lambda _: None)
    stock = run.results()["groups"][0]["sides"][0]
    assert len(stock["repeats"]) == 2
    assert stock["repeats"][1]["turns"] == []
    assert stock["summary"]["decode_ms"]["median"] > 0


def test_steady_has_ten_windows(tiny, tmp_path):
    file = tmp_path / "steady.json"
    result = bench(
        *("-m", tiny, "-p", N_PROMPT, "--budget", BUDGET, "--policies", "inertiakv", "-t", 1),
        *("--steady", 405, "--json", file, "--plots", tmp_path),
    )
    assert result.exit_code == 0, result.output
    windows = json.loads(file.read_text())["windows"]
    assert [window["n_tokens"] for window in windows] == [405 * i // 10 for i in range(1, 11)]
    assert {window["n_used"] for window in windows} == {BUDGET}
    assert {window["n_evicted"] for window in windows} == {1.0}
    assert (tmp_path / "steady.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model": Path("missing.gguf")}, BenchError, "missing.gguf: there is no such file"),
        ({"policies": ("inertia",)}, CommandError, "Did you mean 'inertiakv'"),
        ({"policies": ("full",)}, BenchError, "evicts nothing"),
        ({"budgets": (36,)}, PolicyError, "the budget must be at least 37"),
        ({"budgets": (N_PROMPT,)}, BenchError, "nothing would be evicted"),
        ({"prompts": (0,)}, BenchError, "--prompt 0: must be at least 1"),
        ({"n_tokens": 8}, BenchError, "pass at least 9"),
        ({"n_tokens": 64}, BenchError, "must be below --budget 64"),
        ({"types_k": ("q3",)}, CommandError, "-ctk q3: the cache types are f32, f16"),
        ({"types_k": ("q8_0",), "flash_attn": False}, CommandError, "pass -fa on"),
        ({"policies": ("inertiakv-lazy",)}, BenchError, "pass a multiple of that, --block 8"),
        ({"policies": ()}, BenchError, "--policies names none"),
        ({"types_k": ()}, BenchError, "--cache-type-k names no type"),
        ({"policies": ("inertiakv/n_sinks=8",)}, CommandError, "changes nothing of a policy"),
        ({"stock_lib": Path(__file__).parent}, BenchError, "has no llama library"),
    ],
)
def test_bad_settings_are_named(settings, changes, error, message):
    with pytest.raises(error, match=message.replace("(", r"\(")):
        replace(settings, **changes).check()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-p", "2k"], "--prompt 2k: must be whole numbers, with commas between"),
        (["-fa", "auto"], "-fa auto: must be on or off"),
        (["--openvino", "no/such/python"], "not a Python with openvino-genai; pass one, or "),
        (["--steady", "100", "--policies", ","], "--policies names none"),
        (["--steady", "5", "-t", "1"], "--steady 5: must be at least 10"),
        (["--documents", "0"], "--documents 0: must be at least 1"),
        (["--documents", "5", "--parallel", "0,2"], "--parallel 0,2: must be at least 1"),
        (["--documents", "5", "--steady", "50"], "--documents and --steady: pass one of them"),
    ],
)
def test_bad_arguments_are_one_line(tiny, args, message):
    result = bench("-m", tiny, "--openvino", "off", *args)
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = (line for line in result.stderr.splitlines() if "left out" not in line)
    assert line.startswith("error: ")
    assert message in line


def test_openvino_without_its_package_says_how_to_get_it():
    import sys

    # this environment has none, and sees only itself
    with pytest.raises(BenchError, match="--openvino auto, which installs it into"):
        openvino.check(sys.executable)


def test_documents_are_done_by_every_side(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "N_SHORTEST", 200)
    monkeypatch.setattr(documents, "N_LONGEST", 400)
    n_documents, n_answer, file = 5, 20, tmp_path / "documents.json"
    result = bench(
        *("-m", tiny_models.write_chat(tmp_path / "chat.gguf"), "--budget", 512, "-t", 1),
        *("-n", n_answer, "--documents", n_documents, "--parallel", "1,2"),
        *("--json", file, "--plots", tmp_path),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    sides = [(row["name"], row["n_parallel"]) for row in rows]
    assert sides == [("full cache", 1), ("inertiakv", 1), ("inertiakv", 2)]
    assert [row["failed"] for row in rows] == ["", "", ""]
    assert [row["n_documents"] for row in rows] == [n_documents] * 3
    # the first token of an answer comes from the prompt's last call
    assert [row["n_decode"] for row in rows] == [n_documents * (n_answer - 1)] * 3
    assert len({row["n_prompt"] for row in rows}) == 1
    n_ctx = -(-(documents.N_LONGEST + documents.N_FRAME + n_answer) // 256) * 256
    cells = [n_ctx, 512 + N_BATCH, 2 * (512 + N_BATCH)]
    assert [row["kv_bytes"] for row in rows] == [n * CELL_BYTES for n in cells]
    assert (tmp_path / "documents.png").stat().st_size > 0


def test_documents_are_of_the_stated_length(smollm2):
    tokenizer = open_vocabulary(smollm2)
    texts = documents.pieces(smollm2, 20)
    lengths = [len(tokenizer.tokenize(t.encode(), add_bos=False, special=False)) for t in texts]
    assert len(set(texts)) == 20
    # a token that was cut in two at an end may become others
    assert documents.N_SHORTEST - 3 <= min(lengths) < 1500
    assert 2500 < max(lengths) <= documents.N_LONGEST + 3
