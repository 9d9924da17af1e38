"""The patch queue keeps its rules, and scripts/vendor.py notices when it does not."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bootstrap
import patch_queue as pq
import pytest

import vendor

FOLDED = "0220-llama-graph-kv-mass.patch"  # the patch that the tests below alter


class Checkout:
    """A copy of what vendor.py reads, to be broken."""

    def __init__(self, root: Path) -> None:
        self.root, self.patches, self.tree = root, root / "patches", root / "vendor/llama.cpp"
        shutil.copytree(pq.PATCHES, self.patches)
        (root / "scripts").mkdir()
        for name in ("patch_queue.py", "upstream.py", "vendor.py"):
            shutil.copy(pq.ROOT / "scripts" / name, root / "scripts")
        shutil.copy(pq.PYPROJECT, root)
        (root / "vendor/cache").mkdir(parents=True)
        shutil.copy(pq.PIN_FILE, root / "vendor")
        sdist = vendor.download(pq.read_pin())
        os.link(sdist, root / "vendor/cache" / sdist.name)

    def vendor(self, *args: str, **env: str) -> tuple[int, str]:
        command = [sys.executable, str(self.root / "scripts/vendor.py"), *args]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | env)
        return done.returncode, done.stdout + done.stderr

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_bytes().decode()
        assert text.count(old) >= 1
        (self.root / path).write_bytes(text.replace(old, new, 1).encode())


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_rules_hold() -> None:
    assert pq.problems() == []
    assert len(pq.read_queue()) >= 4


def test_replaying_and_exporting_gives_the_same_bytes() -> None:
    assert vendor.check() == []


def test_pin_is_toml() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 has no tomllib")
    pin = pq.read_pin()
    assert tomllib.loads(pq.PIN_FILE.read_text(encoding="utf-8")) == vars(pin)
    project = tomllib.loads(pq.PYPROJECT.read_text(encoding="utf-8"))["project"]
    assert bootstrap.requirements("dependencies") == project["dependencies"]
    assert bootstrap.requirements("test") == project["optional-dependencies"]["test"]
    assert pin.requirement in project["dependencies"]


BROKEN = {
    "code altered": (f"patches/{FOLDED}", '+#include "llama-kv-evict-graph.h"', "+", "is not what"),
    "context altered": (f"patches/{FOLDED}", '\n #include "llama', '\n #include "lama', "apply"),
    "no trailer": (f"patches/{FOLDED}", "Drop-when: ", "When: ", "trailer Drop-when: is missing"),
    "unknown kind": (f"patches/{FOLDED}", "Kind: hook", "Kind: idea", "Kind: idea is not one of"),
    "other name": (f"patches/{FOLDED}", "Patch-Name: 0220", "Patch-Name: 0221", "Patch-Name: says"),
    "not listed": ("patches/series", f"{FOLDED}\n", "", "not in the series"),
    "no file": ("patches/series", FOLDED, f"{FOLDED}\n0230-x.patch", "0230-x.patch has no file"),
    "twice": ("patches/series", FOLDED, f"{FOLDED}\n{FOLDED}", "listed twice"),
    "other comments": ("patches/series", "# llama\n", "", "not as `vendor.py refresh` writes it"),
    "other pin": ("pyproject.toml", "llama-cpp-python==", "llama-cpp-python>=", "must name"),
    "not ASCII": ("patches/overlay/include/llama-kv-evict.h", "//", "// \u00e9", "only ASCII"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_check_finds(case: str, checkout: Checkout) -> None:
    path, old, new, message = BROKEN[case]
    checkout.edit(path, old, new)
    code, output = checkout.vendor("check")
    assert code == 1, output
    assert message in output


def test_check_finds_too_many_lines(checkout: Checkout) -> None:
    lines = "".join(f"+// {i}\n" for i in range(pq.MAX_INSERTED))
    checkout.edit(f"patches/{FOLDED}", '+#include "llama-kv', f'{lines}+#include "llama-kv')
    code, output = checkout.vendor("check", "--fast")
    assert code == 1
    assert re.search(r"inserts \d+ lines, the budget is 25", output)


def test_check_finds_a_shadow(checkout: Checkout) -> None:
    (checkout.patches / "overlay/src/llama.cpp").write_text("// a copy\n")
    code, output = checkout.vendor("check")
    assert code == 1
    assert "overlay/src/llama.cpp: shadows an upstream file" in output
    code, output = checkout.vendor("apply")
    assert code == 2
    assert "shadow" in output


def test_nobodys_git_config_matters(checkout: Checkout) -> None:
    config = "[apply]\nwhitespace=fix\n[core]\nautocrlf=true\n[commit]\ngpgsign=true\n"
    config += "[diff]\nnoprefix=true\ncontext=9\n[format]\nsignoff=true\nattach=true\n"
    config += "[user]\nname=Someone\nemail=someone@localhost\n"
    (checkout.root / ".gitconfig").write_text(config)
    env = {"HOME": str(checkout.root), "GIT_DIR": "nowhere", "GIT_AUTHOR_NAME": "Else"}
    assert checkout.vendor("check", **env) == (0, "vendor.py check: done\n")


def test_editing_a_hook(checkout: Checkout) -> None:
    """apply, edit, fold: the patch has the edit, and no other file of the tree was touched."""
    hook, other = "vendor/llama.cpp/src/llama-graph.cpp", "vendor/llama.cpp/src/llama-kv-cache.cpp"
    assert checkout.vendor("apply")[0] == 0
    assert checkout.vendor("apply") == (0, "vendor.py apply: done\n")
    before = {path: path.stat().st_mtime_ns for path in checkout.tree.rglob("*.[ch]*")}
    include = '#include "llama-kv-evict-graph.h"\n'
    checkout.edit(hook, include, include + "#include <cmath> // edited\n")

    checkout.edit("patches/series", "# tests", "# other")
    code, _ = checkout.vendor("apply")
    assert code == 0, "a changed comment is no change of the queue"
    checkout.edit("patches/series", "# other", "# tests")
    assert checkout.vendor("check")[0] == 1, "an edit that is in no patch"

    assert checkout.vendor("fold", "0220") == (0, "vendor.py fold: done\n")
    assert "+#include <cmath> // edited" in (checkout.patches / FOLDED).read_text()
    assert checkout.vendor("check") == (0, "vendor.py check: done\n")
    assert checkout.vendor("apply") == (0, "vendor.py apply: done\n")
    changed = {p for p, t in before.items() if p.stat().st_mtime_ns != t}
    assert changed == {checkout.root / hook}

    # the files go back to what they were, as by a pull: the tree follows, and only that file
    shutil.copy(pq.PATCHES / FOLDED, checkout.patches)
    assert checkout.vendor("apply") == (0, "vendor.py apply: done\n")
    assert "edited" not in (checkout.root / hook).read_text()
    assert (checkout.root / other).stat().st_mtime_ns == before[checkout.root / other]


def test_work_is_never_thrown_away(checkout: Checkout) -> None:
    hook = "vendor/llama.cpp/src/llama-graph.cpp"
    assert checkout.vendor("apply")[0] == 0
    checkout.edit(hook, '#include "llama-kv-evict-graph.h"', "#include <cmath>")
    checkout.edit(f"patches/{FOLDED}", "Drop-when: ", "Drop-when: if ")
    code, output = checkout.vendor("apply")
    assert code == 2
    assert "uncommitted edits" in output
    message = "edit\n\nKind: hook\nForwarded: no\nDrop-when: never"
    git = ["git", "-C", str(checkout.tree), "commit", "-q", "-a", "-m"]
    subprocess.run([*git, message], check=True)
    code, output = checkout.vendor("apply")
    assert code == 2
    assert "commits that are not in patches/" in output
    code, output = checkout.vendor("refresh")
    assert code == 2
    assert "trailer Patch-Name: is missing" in output
    subprocess.run([*git, f"{message}\nPatch-Name: 0230-a.patch", "--amend"], check=True)
    assert checkout.vendor("refresh")[0] == 0
    assert "0230-a.patch\n" in (checkout.patches / "series").read_text()
    assert checkout.vendor("check") == (0, "vendor.py check: done\n")
    assert "#include <cmath>" in (checkout.root / hook).read_text()
