"""What users install: an sdist that builds without network and git, and the wheel made from it.

Building takes minutes, so this is slow, unless dist/ has an sdist and a wheel to look at.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import bootstrap
import pytest

DIST = bootstrap.ROOT / "dist"
BUILT = any(DIST.glob("*.whl")) and any(DIST.glob("*.tar.gz"))
pytestmark = [] if BUILT else pytest.mark.slow


def run(*command: object, cwd: Path | None = None, **env: str) -> str:
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={k: v for k, v in os.environ.items() if k != "LLAMA_CPP_LIB_PATH"} | env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if BUILT:
        return max(DIST.glob("*.tar.gz"))
    folder = tmp_path_factory.mktemp("sdist")
    code = "import sys, scikit_build_core.build as build; build.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", code, folder, cwd=bootstrap.ROOT, PATH=bootstrap.tool_path())
    return next(folder.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the sdist, with a git that fails and with every proxy a closed port."""
    if BUILT:
        return max(DIST.glob("*.whl"))
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("git", "git.bat"):
        (folder / name).write_text("#!/bin/sh\nexit 1\n" if name == "git" else "@exit /b 1\n")
        (folder / name).chmod(0o755)
    env = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
    env |= {"PATH": os.pathsep.join([str(folder), bootstrap.tool_path()])}
    with tarfile.open(sdist) as tar:
        tar.extractall(folder / "source")
    source = next((folder / "source").iterdir())
    env["CMAKE_ARGS"] = "-DLLAMA_BUILD=OFF"  # as the README says; it must not reach our build
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--no-cache-dir"]
    run(sys.executable, "-m", "pip", "wheel", source, *options, "-w", folder, **env)
    return next(folder.glob("*.whl"))


def test_sdist_has_the_prepared_tree_and_no_products(sdist: Path) -> None:
    with tarfile.open(sdist) as tar:
        members = {m.name.partition("/")[2]: m for m in tar if not m.isdir()}
    for name in bootstrap.pq.overlay_files():
        assert members[f"vendor/llama.cpp/{name}"].isfile(), name
    assert {"LICENSE", "CMakeLists.txt", "scripts/vendor.py", "patches/series"} <= members.keys()
    assert {"vendor/llama.cpp.toml", "vendor/llama.cpp/.pyinertia-stamp"} <= members.keys()
    for folder in (".git/", "vendor/llama.cpp/.git/", "vendor/stock/", "vendor/cache/", "build/"):
        assert [name for name in members if name.startswith(folder)] == []
    assert [name for name in members if name.startswith("pyinertia/lib/")] == []


def test_wheel_has_libraries_and_licences(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        licences = {n.rpartition("/")[2]: archive.read(n) for n in names if "/licenses/" in n}
    libraries = [n for n in names if n.startswith("pyinertia/lib/") and not n.endswith(".toml")]
    for base in ("llama", "ggml", "ggml-base", "ggml-cpu"):
        stems = {Path(name).stem.removeprefix("lib") for name in libraries}
        assert base in stems, libraries
    outside = [n for n in names if not n.startswith("pyinertia/") and ".dist-info/" not in n]
    assert outside == []
    assert {f"pyinertia/inspect/page/page.{kind}" for kind in ("html", "css", "js")} <= {*names}
    assert "pyinertia/learned.npz" in names
    assert b"pyinertia authors" in licences["LICENSE"]
    assert b"ggml authors" in licences["LICENSE-llama.cpp"]
    assert b"Niels Lohmann" in licences["LICENSE-jsonhpp"]


def test_wheel_works_in_a_fresh_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    # the dependencies come from this environment; path entries do not, so not the checkout either
    dependencies = sysconfig.get_path("purelib")
    report = run(python, "-m", "pyinertia", cwd=tmp_path, PYTHONPATH=dependencies)
    assert str(tmp_path / "venv") in report
    assert "CPU" in report
