"""What every test may use: the libraries and the models, and a log header that explains itself."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import bootstrap
import hypothesis
import pytest
import tiny_models

import pyinertia  # noqa: F401 - first, so that every `import llama_cpp` gets our library

OP_CASES = pytest.StashKey[dict[str, int]]()  # op -> cases that ran and passed


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--require-op-cases", action="store_true", help="fail unless they all ran")
    parser.addoption("--samples", type=int, default=8, help="samples of the retrieval test")
    parser.addoption("--sequences", type=int, default=300, help="sequences of calls in C")
    parser.addoption("--files", type=int, default=300, help="malformed model files")
    parser.addoption("--threads", type=int, default=1, help="threads in the sequences of calls")
    parser.addoption("--tiny", action="store_true", help="leave out what loads a real model")
    parser.addoption("--build", default="local", help="folder in build/; or one of sanitize.py")


def pytest_configure(config: pytest.Config) -> None:
    # a job in a shell's background ignores Ctrl-C, and so would the processes that tests interrupt
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.stash[OP_CASES] = {}
    if config.getoption("--build") != "local":  # with a sanitizer each takes 20 times as long
        hypothesis.settings.register_profile("sanitizer", max_examples=20)
        hypothesis.settings.load_profile("sanitizer")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--tiny"):
        real = [item for item in items if takes_real_model(item)]
        config.hook.pytest_deselected(items=real)
        items[:] = [item for item in items if item not in real]


def takes_real_model(item: pytest.Item) -> bool:
    params = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return any(name in params or name in item.fixturenames for name in ("smollm2", "gemma3"))


def pytest_report_header(config: pytest.Config) -> list[str]:
    command = [sys.executable, "-m", "pyinertia"]
    done = subprocess.run(command, cwd=bootstrap.ROOT, capture_output=True, text=True)
    lines = (done.stdout or done.stderr).partition("\n\npolicies")[0].splitlines()
    return [f"pin: {bootstrap.pq.read_pin().requirement}", *(line for line in lines if line)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if missing_op_cases(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    config = terminalreporter.config
    if cases := [f"{op} {count}" for op, count in config.stash[OP_CASES].items()]:
        terminalreporter.write_line(f"native op cases passed: {', '.join(cases)}")
    if missing := missing_op_cases(config):
        terminalreporter.write_line(f"ERROR: native op cases did not run: {', '.join(missing)}")


def missing_op_cases(config: pytest.Config) -> list[str]:
    import test_backend_ops  # the bars stand there
    import test_cuda_ops

    if not config.getoption("--require-op-cases"):
        return []
    wanted, found = test_backend_ops.EXPECTED | test_cuda_ops.EXPECTED, config.stash[OP_CASES]
    return sorted(op for op, least in wanted.items() if found.get(op, 0) < least)


@pytest.fixture(scope="session")
def lib_dir() -> Path:
    """The folder of our libraries."""
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH") or bootstrap.LIB_DIR)
    if not any(folder.glob("*llama.*")):
        pytest.fail(f"{folder} has no libraries: run python scripts/bootstrap.py")
    return folder


@pytest.fixture(scope="session")
def stock_lib_dir(request: pytest.FixtureRequest, lib_dir: Path) -> Path:
    """The folder of the libraries of the same source without patches, built with the same flags.

    Under a sanitizer they are ours, which a job of stock.py runs without a policy: other flags give
    other bits, and what a build without patches gives is compared in an ordinary run.
    """
    is_local = request.config.getoption("--build") == "local"
    return bootstrap.build_stock_libs() if is_local else lib_dir


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct Q4_1: 30 layers, all with full attention."""
    return bootstrap.smollm2()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M Q4_K_M: most layers have a sliding window."""
    return bootstrap.gemma3()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    """A random-weight Llama, loaded through llama.cpp's own calls."""
    import llama_cpp as lc

    path = tiny_models.write_llama(tmp_path_factory.mktemp("tiny") / "llama.gguf")
    model = lc.llama_model_load_from_file(str(path).encode(), lc.llama_model_default_params())
    yield model
    lc.llama_model_free(model)
