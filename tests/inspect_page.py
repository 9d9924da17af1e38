"""What the tests of `pyinertia inspect` share: a prompt, a run by hand, a page taken apart."""

from __future__ import annotations

import base64
import json
from contextlib import closing
from html.parser import HTMLParser
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from typer.testing import CliRunner

from pyinertia import Llama
from pyinertia.cli import app

N_BATCH, N_BUDGET, N_PREDICT = 256, 128, 40
RUN = ["-t", "1", "-c", "1024", "-b", N_BATCH, "--kv-budget", N_BUDGET, "-n", N_PREDICT]

# markup, characters of several tokens, combining ones, a joined emoji, right to left, controls
ODD = (
    "The quick fox <script>window.ran = 1</script> & </script> <!-- <b>bold</b>\n"
    "Ünïcödé ☃ 👩‍👩‍👧 한국어 日本語 e\u0301 {{ 7 * 7 }} ${x} \\u003c &lt;\n"
    "مرحبا بالعالم، هذا نص من اليمين إلى اليسار.\n"
    "\x1b[31mred\x07\x9b \u2028 end\t\n"
)
SHOWN = str.maketrans({"\x1b": "\u241b", "\x07": "\u2407", "\x9b": "\ufffd"})


def invoke(*args: Any, code: int = 0):
    done = CliRunner().invoke(app, ["inspect", *map(str, args)])
    assert done.exit_code == code, done.output + repr(done.exception)
    return done


def by_hand(path: Path, text: str, n_predict: int = N_PREDICT, **policy: Any) -> list[np.ndarray]:
    """The resident cells after the prompt and every decode step, without pyinertia.inspect."""
    text = text.removesuffix("\n")
    policy = policy or {
        "kv_policy": "inertiakv", "kv_budget": N_BUDGET, "kv_prefill": "bounded",
    }  # fmt: skip
    llm = Llama(
        path, n_ctx=1024, n_batch=N_BATCH, n_ubatch=N_BATCH, n_threads=1, n_threads_batch=1,
        flash_attn=True, verbose=False, **policy,
    )  # fmt: skip
    tokens = llm.tokenize(text.encode(), special=True)
    with closing(llm.generate(tokens, temp=0)) as stream:
        cells = [llm.kv_cells() for _ in islice(stream, n_predict + 1)]
    llm.close()
    return cells


class Page(HTMLParser):
    """A page: its elements, its text without scripts, and its data decoded."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._in_script = False
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.data = json.loads(self.scripts[0])

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        self._in_script = tag in ("script", "style")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        self._in_script = False

    def handle_data(self, text):
        if not self._in_script:
            self.text += text
        elif self.tags[-1] == "script":
            self.scripts[-1] += text

    def positions(self, step: int) -> np.ndarray:
        """Those that the page shows as kept."""
        lost = np.array(self.data["lost"])[: self.data["n_tokens"][step]]
        return np.flatnonzero((lost < 0) | (lost > step))

    def scores(self, step: int) -> np.ndarray:
        """Those of the kept positions; 0 for not above 0."""
        start = sum(self.data["n_cells"][:step])
        n_cells = self.data["n_cells"][step]
        raw = np.frombuffer(base64.b64decode(self.data["scores"]), np.uint8)[start:][:n_cells]
        low, high, log = (self.data["scale"][key] for key in ("low", "high", "log"))
        share = (raw.astype(float) - 1) / 254
        values = low * (high / low) ** share if log else low + (high - low) * share
        return np.where(raw == 0, 0, values)
