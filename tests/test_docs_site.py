"""The site of docs/ is built, every link in it leads somewhere, and no page fetches anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pages
import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is missing")

# what a browser fetches by itself, unlike the target of a link
FETCHED = {"script": "src", "img": "src", "iframe": "src", "link": "href", "source": "src"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    quiet = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    closed = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=pages.ROOT,
        env=os.environ | quiet | closed,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Page(HTMLParser):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.ids: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids |= {values["id"]} if "id" in values else set()
        if values.get(FETCHED.get(tag, "")):
            self.fetched.append(values[FETCHED[tag]])


def test_no_page_fetches_anything_from_elsewhere(site):
    found = [*site.rglob("*.html")]
    assert len(found) > len(pages.PAGES) - 1
    for path in found:
        urls = Page(path).fetched
        assert urls
        assert [url for url in urls if re.match(r"(https?:)?//", url)] == [], path
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert "@import" not in styles
    assert "url(http" not in styles


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("llama", ["Llama", "Llama.kv_cells", "Llama.kv_evict", "Llama.kv_protect", "KVStats"]),
        ("policy", ["KVPolicy", "resolve_policy", "POLICIES"]),
        ("batch", ["batch.summarise", "batch.generate_many", "batch.Completion"]),
        ("state", ["state.LlamaState"]),
        ("errors", ["errors.PolicyError", "errors.ModelError"]),
        ("kv-types", ["kv_types.KV_TYPES"]),
    ],
)
def test_the_reference_has_what_is_public(site, page, names):
    assert {f"pyinertia.{name}" for name in names} <= Page(site / f"reference/{page}.html").ids


def test_the_c_header_is_on_its_page(site):
    text = (site / "reference/c-api.html").read_text(encoding="utf-8")
    assert "llama_kv_evict_attach" in text
