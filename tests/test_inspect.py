"""`pyinertia inspect`: the recording, the page, the picture, the terminal, and what goes wrong."""

from __future__ import annotations

import io
import re
import struct
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import tiny_models
from command_line import ESCAPE, call
from inspect_page import N_PREDICT, ODD, RUN, SHOWN, Page, by_hand, invoke
from rich.console import Console

from pyinertia import Llama
from pyinertia.inspect import page, pieces, record, recording, terminal, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("inspect")


@pytest.fixture(scope="module")
def tiny(folder) -> Path:
    return tiny_models.write_llama(folder / "llama.gguf")


@pytest.fixture(scope="module")
def prompt(folder) -> Path:
    path = folder / "odd.txt"
    path.write_text(ODD * 2, encoding="utf-8", newline="\n")
    return path


@pytest.fixture(scope="module")
def shown(folder, tiny, prompt) -> Page:
    invoke(prompt, "-m", tiny, *RUN, "--html", folder / "odd.html")
    return Page(folder / "odd.html")


@pytest.fixture(scope="module")
def cells(tiny) -> list[np.ndarray]:
    return by_hand(tiny, ODD * 2)


def load(path: Path, n_ctx: int = 1024, **policy) -> Llama:
    return Llama(path, n_ctx=n_ctx, n_threads=1, n_threads_batch=1, verbose=False, **policy)


def recorded(path: Path, n_predict: int = 40, text: str = "abcdefgh " * 40, **more):
    llm = load(path, kv_policy="inertiakv", kv_budget=128)
    tokens = llm.tokenize(text.encode())
    try:
        return record(llm, tokens, n_predict, model="m", policy="inertiakv", temp=0, **more)
    finally:
        llm.close()


# what is shown is what was there


def test_the_page_has_the_resident_positions(shown, cells):
    assert shown.data["n_decoded"] == list(range(N_PREDICT + 1))
    assert len(cells[-1]) < len(cells[0]) < shown.data["n_prompt"]  # both prefill and decode cut
    for step, expected in enumerate(cells):
        assert shown.positions(step).tolist() == expected["pos"].tolist()


def test_the_page_has_the_scores(shown, cells):
    scale = shown.data["scale"]
    ratio = (scale["high"] / scale["low"]) ** (0.5 / 254) if scale["log"] else 1
    half = 0 if scale["log"] else (scale["high"] - scale["low"]) / 254 / 2
    every = np.concatenate([step["score"] for step in cells])
    assert scale["high"] == every.max()
    assert (every[every > 0] < scale["low"]).mean() <= 0.011
    for step, expected in enumerate(cells):
        score = expected["score"].astype(float)
        wanted = np.where(score > 0, np.clip(score, scale["low"], None), 0)
        np.testing.assert_allclose(
            shown.scores(step), wanted, rtol=1.001 * (ratio - 1) + 1e-6, atol=1.001 * half
        )
    assert shown.data["scored"] == [bool((step["score"] != 0).any()) for step in cells]


def test_a_long_run_shows_every_other_step(tiny, monkeypatch):
    whole = recorded(tiny, 50)
    monkeypatch.setattr(recording, "N_STEPS", 12)
    part = recorded(tiny, 50)
    assert part.every == 8
    assert [step.n_decoded for step in part.steps] == [0, 8, 16, 24, 32, 40, 48, 50]
    for step in part.steps:
        assert np.array_equal(step.cells, whole.steps[step.n_decoded].cells)
    lost = whole.lost_at()
    for pos, i in enumerate(part.lost_at()):
        assert (i < 0) == (lost[pos] < 0)
        if i > 0:
            assert part.steps[i - 1].n_decoded < lost[pos] <= part.steps[i].n_decoded
    assert "Shown is every 8th step" in words.run(part)


def test_steps_of_many_cells_are_few(tiny, monkeypatch):
    monkeypatch.setattr(recording, "N_CELLS", 2000)
    part = recorded(tiny, 60)
    assert sum(len(step.cells) for step in part.steps) <= 2000
    assert part.steps[0].n_decoded == 0
    assert part.steps[-1].n_decoded == 60


def test_speed_is_that_between_steps(tiny):
    found = recorded(tiny)
    times = [step.t_decode for step in found.steps]
    assert found.speeds()[1:] == pytest.approx([1 / (b - a) for a, b in pairwise(times)])


def test_ctrl_c_keeps_what_was_recorded(tiny):
    def stop(n_decoded: int) -> None:
        if n_decoded == 5:
            raise KeyboardInterrupt

    found = recorded(tiny, told=stop)
    assert found.end == "interrupted"
    assert [step.n_decoded for step in found.steps] == [0, 1, 2, 3, 4, 5]
    assert len(found.tokens) == found.steps[-1].n_tokens == found.n_prompt + 5
    assert "interrupted" in page.html(found)


def test_ctrl_c_still_writes_the_page(tiny, folder, prompt, monkeypatch):
    looks = iter(range(6))

    def interrupted(llm):
        if next(looks) == 5:
            raise KeyboardInterrupt
        return llm.kv_cells()

    monkeypatch.setattr(recording, "_cells", interrupted)
    done = invoke(prompt, "-m", tiny, *RUN, "--html", folder / "part.html", code=130)
    assert done.stderr.endswith(f"\nwrote {folder / 'part.html'}\n")
    found = Page(folder / "part.html")
    assert found.data["n_decoded"] == [0, 1, 2, 3, 4]
    assert len(found.data["lost"]) == found.data["n_prompt"] + 4
    assert "The run was interrupted." in found.text


def test_the_answer_ends_with_the_context(tiny):
    llm = load(tiny, n_ctx=256)
    tokens = llm.tokenize(b"x" * 200)
    found = record(llm, tokens, -1, model="m", policy="full", temp=0)
    assert found.end == "context"
    assert found.steps[-1].n_tokens == 255
    assert words.passages(found) == []
    assert "drops nothing" in words.settings(found)


def test_a_model_without_an_engine_is_shown_too(folder, prompt):
    mamba = tiny_models.write_mamba(folder / "mamba.gguf")
    invoke(
        prompt, "-m", mamba, "--kv-policy", "full", "-n", 3, "-t", 1, "--html", folder / "m.html"
    )
    found = Page(folder / "m.html").data
    assert found["n_cells"] == found["n_tokens"]
    assert set(found["lost"]) == {-1}


def test_words_name_what_was_dropped(tiny):
    found = recorded(tiny)
    last = found.steps[-1].cells["pos"]
    gone = np.setdiff1d(np.arange(len(found.tokens)), last)
    first = words.passages(found, 100)
    assert sum(passage.n_tokens for passage in first) == len(gone)
    assert first[0].n_tokens == max(
        len(p) for p in np.split(gone, np.where(np.diff(gone) > 1)[0] + 1)
    )
    whole = "<s>" + "abcdefgh " * 40
    for passage in first:
        if passage.start >= 3 and passage.start + passage.n_tokens <= found.n_prompt:
            text = whole[passage.start + 2 :][: passage.n_tokens].strip()  # "<s>" is one token
            assert text.startswith(passage.head)
            assert text.endswith(passage.tail)
    assert words.state(found.steps[-1]).startswith(f"{len(gone):,} of {len(found.tokens):,} tokens")


def test_a_system_prompt_is_named_as_what_stays(folder):
    chat = tiny_models.write_chat(folder / "chat.gguf")
    path = folder / "long.txt"
    path.write_text("abcdefgh " * 60)
    text = invoke(path, "-m", chat, *RUN, "--system", "Be brief.").stdout
    n_system = 1 + len("system\nBe brief.")  # <s> is one token, bytes are tokens
    stays = re.search(r"the first 4 tokens, positions 0 to (\d+) \(protected\) and", text)
    assert int(stays[1]) + 1 >= n_system
    assert "Prompt\n<s>system\nBe brief.</s>" in text


def test_shares_by_position(tiny):
    found = recorded(tiny)
    shares, edges = words.kept_shares(found, 20)
    for row, step in zip(shares, found.steps, strict=True):
        for share, a, b in zip(row, edges[:-1], edges[1:], strict=True):
            read = [pos for pos in range(a, b) if pos < step.n_tokens]
            kept = np.isin(read, step.cells["pos"])
            assert share == pytest.approx(kept.mean()) if read else np.isnan(share)


# text


def test_pieces_are_whole_characters(tiny):
    llm = load(tiny)
    tokens = [*llm.tokenize("aé☃".encode()), 0x80, *b"\xe2\x98", *b"b\xf0\x9f"]  # bytes are tokens
    found = pieces.pieces(llm, tokens, len(tokens) - 1)
    llm.close()
    assert [(p.text, p.start, p.n_tokens) for p in found] == [
        ("<s>", 0, 1),
        ("a", 1, 1),
        ("é", 2, 2),
        ("☃", 4, 3),
        ("\ufffd", 7, 1),
        ("\ufffdb", 8, 3),  # only the next byte shows that the character was broken
        ("\ufffd", 11, 1),  # the prompt ends within a character
        ("\ufffd", 12, 1),
    ]
    assert [p.special for p in found] == [True] + [False] * 7


def test_the_page_shows_the_prompt_and_runs_none_of_it(shown):
    texts, counts = shown.data["texts"], shown.data["counts"]
    sizes = [counts.get(str(i), 1) for i in range(len(texts))]
    ends = np.cumsum(sizes)
    assert ends[-1] == shown.data["n_tokens"][-1] == len(shown.data["lost"])
    n_pieces = int(np.searchsorted(ends, shown.data["n_prompt"])) + 1
    whole = (ODD * 2).removesuffix("\n").translate(SHOWN)
    assert "".join(texts[:n_pieces]) == "<s>" + whole
    assert [texts[i] for i in shown.data["special"] if i < n_pieces] == ["<s>"]
    assert shown.tags.count("script") == len(shown.scripts) == 2
    assert "b" not in shown.tags
    assert "49" not in re.findall(r"\d+", "".join(texts[:n_pieces]))


def test_what_was_dropped_is_escaped_in_the_page_s_own_text(tiny, folder):
    found = recorded(tiny, text="<script>window.ran = 1</script> <img src=x onerror=y> " * 8)
    path = folder / "<i>.html"
    path.write_text(page.html(replace(found, model='<i>"&')), encoding="utf-8")
    shown = Page(path)
    assert shown.tags.count("script") == 2
    assert not {"img", "i"} & set(shown.tags) - {"i"}
    assert "<img src=x" in shown.text
    assert '<i>"& with the policy inertiakv' in shown.text


def test_the_page_fetches_nothing(shown):
    links = [value for name, value in shown.attributes if name in ("src", "href", "data", "action")]
    assert links == ["data:,"]
    assert "url(" not in shown.source
    assert "@import" not in shown.source
    (policy,) = (v for k, v in shown.attributes if k == "content" and "default-src" in (v or ""))
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_a_page_of_20_000_tokens_is_small(tiny, folder):
    path = folder / "long.txt"
    path.write_text("Once upon a time there was a cache. " * 560)  # of 36 bytes
    options = ["-t", 1, "-c", 32768, "-b", 512, "-n", 300, "--html", folder / "long.html"]
    invoke(path, "-m", tiny, *options)
    found = Page(folder / "long.html")
    assert found.data["n_tokens"][-1] > 20_000
    assert found.data["n_decoded"][-1] == 300
    assert len(found.source) < 1_000_000


# colours


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(a: str, b: str) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(scheme):
    style = (page.FOLDER / "page.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    found = dict(re.findall(r"--(\w+): (#\w{6})", light if scheme == "light" else dark))
    pairs = [(f"t{i}", f"b{i}") for i in range(page.N_LEVELS)]
    pairs += [
        (ink, back) for ink in ("ink", "faint", "accent", "other") for back in ("page", "panel")
    ]
    for ink, back in pairs:
        assert contrast(found[ink], found[back]) >= 4.5, (ink, back)
    shades = [luminance(found[f"b{i}"]) for i in range(page.N_LEVELS)]
    assert shades == sorted(shades, reverse=scheme == "light")  # further from the page is higher


def test_levels_are_the_same_everywhere():
    script = (page.FOLDER / "page.js").read_text()
    assert f"const N_LEVELS = {page.N_LEVELS};" in script
    style = (page.FOLDER / "page.css").read_text()
    assert len(re.findall(r"^\.k\d \{", style, re.MULTILINE)) == page.N_LEVELS


# the picture


def test_the_picture_is_one(tiny, prompt, folder):
    pytest.importorskip("matplotlib", reason="the extra `plot` is not installed")
    done = invoke(prompt, "-m", tiny, *RUN, "--png", folder / "odd.png")
    assert done.stdout == ""
    raw = (folder / "odd.png").read_bytes()
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", raw[16:24]) == (1320, 900)


@pytest.mark.parametrize("n_predict", [0, 1])
@pytest.mark.parametrize("policy", ["inertiakv", "full", "streaming-llm"])
def test_short_runs_are_shown_too(tiny, folder, n_predict, policy):
    path = folder / "short.txt"
    path.write_text("hi")
    html, png = folder / "short.html", folder / "short.png"
    options = ["-m", tiny, "-t", 1, "-n", n_predict, "--kv-policy", policy]
    invoke(path, *options, "--html", html, "--png", png)
    found = Page(html).data
    assert found["n_cells"] == found["n_tokens"] == [3, 4][: n_predict + 1]
    assert "nothing was dropped" in invoke(path, *options).stdout


# the terminal


def test_a_pipe_gets_marks_and_no_colour(tiny, prompt, cells):
    text = call("inspect", prompt, "-m", tiny, *RUN).stdout
    assert ESCAPE not in text
    body = text.partition("Prompt\n")[2].partition("\n\nAnswer\n")[0]
    whole = "<s>" + (ODD * 2).removesuffix("\n").translate(SHOWN)
    assert re.sub(r"\[-(.+?)-\]", r"\1", body, flags=re.DOTALL) == whole
    kept = {*cells[-1]["pos"].tolist()}
    expected, pos = "", 0
    for unit in ["<s>", *whole[3:]]:
        n = 1 if unit == "<s>" else len({"\u241b": "a", "\u2407": "a"}.get(unit, unit).encode())
        n = 2 if unit == "\ufffd" else n  # U+009B
        expected += unit if kept & {*range(pos, pos + n)} else f"[-{unit}-]"
        pos += n
    assert body == expected.replace("-][-", "")
    n_tokens = cells[-1]["pos"][-1] + 1
    dropped = n_tokens - len(kept)
    assert f"{dropped:,} of {n_tokens:,} tokens were dropped" in text
    last = text.strip().splitlines()[-1].split()
    assert last[:4] == [str(N_PREDICT), f"{n_tokens:,}", str(len(kept)), f"{dropped:,}"]


def printed(found, **environ: str) -> str:
    file = io.StringIO()
    console = Console(
        file=file, force_terminal=True, width=80, highlight=False,
        _environ={"TERM": "xterm-256color", **environ},
    )  # fmt: skip
    terminal.show(found, console)
    return file.getvalue()


def test_a_terminal_gets_colour_unless_it_must_not(tiny):
    found = recorded(tiny)
    coloured = printed(found)
    assert re.search(r"\x1b\[2;9m", coloured)  # dim and struck through
    assert "[-" not in coloured.replace(ESCAPE, "")
    plain = printed(found, NO_COLOR="1")
    assert not re.search(r"\x1b\[[\d;]*[349]\d*m", plain)
    assert "[-" in plain


# what goes wrong


def bad_inputs(tiny: Path, prompt: Path, folder: Path) -> dict[str, tuple[list, str]]:
    (folder / "empty.txt").write_text(" \n")
    (folder / "x.txt").write_text("x" * 100)
    no_model = ["-m", folder / "no.gguf"]  # outputs are looked at first
    return {
        "empty": ([folder / "empty.txt", "-m", tiny], "the prompt is empty"),
        "missing": ([folder / "no.txt", "-m", tiny], "no.txt: No such file"),
        "too long": ([folder / "x.txt", "-m", tiny, "-c", 64], "the prompt has 101 tokens"),
        "itself": ([prompt, "-m", tiny, "--html", prompt], "is what the command reads"),
        "the model": ([prompt, "-m", tiny, "--png", tiny], "is what the command reads"),
        "no folder": ([prompt, *no_model, "--html", folder / "no" / "a.html"], "cannot be written"),
        "folder": ([prompt, *no_model, "--png", folder], "(Is a directory)"),
        "same": (
            [prompt, *no_model, "--html", folder / "a", "--png", folder / "a"],
            "are the same file",
        ),
        "no model": ([prompt], "name one model"),
        "system": ([prompt, "-m", tiny, "--system", "S"], "the model has no chat template"),
        "steps": ([prompt, "-m", tiny, "-n", "-2"], "Invalid value"),
    }


@pytest.mark.parametrize(
    "what",
    [
        "empty",
        "missing",
        "too long",
        "itself",
        "the model",
        "no folder",
        "folder",
        "same",
        "no model",
        "system",
        "steps",
    ],
)
def test_what_cannot_be_is_one_readable_line(what, tiny, prompt, folder):
    args, says = bad_inputs(tiny, prompt, folder)[what]
    done = invoke(*args, code=2)
    assert says in " ".join(done.stderr.split())
    if not done.stderr.startswith("Usage"):
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1
    assert done.stdout == ""
    assert not (folder / "a").exists()


def test_a_missing_matplotlib_is_told_before_the_run(prompt, folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "pyinertia.inspect.plot", raising=False)
    monkeypatch.delattr("pyinertia.inspect.plot", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.axes", None)
    error = invoke(prompt, "-m", "no.gguf", "--png", folder / "p.png", code=2).stderr
    assert error == (
        "error: --png needs matplotlib; install it with: pip install 'pyinertia[plot]'\n"
    )
    assert not (folder / "p.png").exists()


def test_a_page_that_is_there_survives_a_run_that_fails(tiny, folder, prompt):
    path = folder / "old.html"
    path.write_text("old")
    invoke(prompt, "-m", tiny, "-c", 64, "--html", path, code=2)
    assert path.read_text() == "old"
