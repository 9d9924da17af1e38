"""The environment of OpenVINO GenAI: a Python of its own, because its libraries are a rival's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from pyinertia.errors import BenchError

PACKAGE = "openvino-genai"


def environment() -> Path:
    """Return where `--openvino auto` keeps its environment: in the user's cache."""
    home = Path.home()
    if sys.platform == "win32":
        cache = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        cache = home / "Library" / "Caches"
    else:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return cache / "pyinertia" / "openvino"


def python() -> Path:
    """Return the Python of that environment, whether it is there or not."""
    return environment() / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install() -> Path:
    """Make the environment if it is missing, about 300 MB; return its Python."""
    path = python()
    if not _version(path):
        _run([sys.executable, "-m", "venv", "--clear", str(environment())])
        _run([str(path), "-m", "pip", "install", "--quiet", PACKAGE])
    return path


def check(path: str) -> str:
    """Return the version of OpenVINO GenAI that a Python has.

    Raises:
        BenchError: It has none, or there is no such Python.
    """
    if version := _version(Path(path)):
        return version
    msg = (
        f"--openvino {path}: this is not a Python with {PACKAGE}; pass one, or --openvino auto, "
        f"which installs it into {environment()}"
    )
    raise BenchError(msg)


def _version(path: Path) -> str:
    code = f"from importlib.metadata import version; print(version({PACKAGE!r}))"
    try:
        done = subprocess.run([path, "-I", "-c", code], capture_output=True, text=True)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        msg = f"--openvino auto: {' '.join(command)} failed: {' '.join(last)}"
        raise BenchError(msg)
