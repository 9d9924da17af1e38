"""The native library is found, and refused with advice when it is not ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyinertia import POLICIES, NativeLibraryError, _native


def python(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_python_m_pyinertia_reports():
    result = python("-m", "pyinertia")
    assert result.returncode == 0, result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["llama-cpp-python", _native.LLAMA_CPP_PYTHON] in lines
    assert any(line[:1] == ["CPU"] for line in lines)
    assert {line[0] for line in lines if line} > set(POLICIES)


def test_python_m_pyinertia_fails_readably_without_a_library(tmp_path):
    result = python("-m", "pyinertia", LLAMA_CPP_LIB_PATH=str(tmp_path))
    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert str(tmp_path) in result.stderr
    assert "rebuild" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("first", "advice"),
    [("import llama_cpp", "import pyinertia before it"), ("pass", "unset LLAMA_CPP_LIB_PATH")],
)
def test_a_stock_library_is_refused(stock_lib_dir, first, advice):
    code = f"{first}\nfrom pyinertia import Llama"
    result = python("-c", code, LLAMA_CPP_LIB_PATH=str(stock_lib_dir))
    assert "NativeLibraryError" in result.stderr
    assert advice in result.stderr


def test_another_version_is_refused():
    code = "import pyinertia, llama_cpp; llama_cpp.__version__ = '0.3.1'; pyinertia.Llama"
    result = python("-c", code)
    assert "llama_cpp_python 0.3.1 is installed" in result.stderr
    assert f"llama_cpp_python=={_native.LLAMA_CPP_PYTHON}" in result.stderr


def test_child_processes_get_their_own_libraries():
    code = "import os; from pyinertia import Llama; print('LLAMA_CPP_LIB_PATH' in os.environ)"
    assert python("-c", code).stdout == "False\n"


def test_another_abi_is_refused(monkeypatch):
    monkeypatch.setattr(_native, "ABI_VERSION", 99)
    with pytest.raises(NativeLibraryError, match="this pyinertia needs 99; rebuild it"):
        _native.load.__wrapped__()
