"""What the tests of the command line share: the real process, and a clean environment for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyinertia.cli.conversation import Conversation
from pyinertia.cli.options import SamplingOptions

COMMAND = [sys.executable, "-m", "pyinertia"]
ESCAPE = "\x1b"


def environment(**more: str) -> dict[str, str]:
    """One thread, no network, no colour that the tests' own surroundings ask for."""
    kept = {k: v for k, v in os.environ.items() if k not in {"FORCE_COLOR", "NO_COLOR", "COLUMNS"}}
    return {**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **more}


def call(
    *args: str | Path, stdin: str | bytes = b"", code: int | None = 0, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run pyinertia to its end; code None takes any."""
    env = environment(**more.pop("env", {}))
    data = stdin.encode() if isinstance(stdin, str) else stdin
    raw = subprocess.run(
        [*COMMAND, *map(str, args)], input=data, capture_output=True, timeout=120, env=env, **more
    )
    out, err = (text.decode("utf-8", "replace") for text in (raw.stdout, raw.stderr))
    done = subprocess.CompletedProcess(raw.args, raw.returncode, out, err)
    assert code is None or done.returncode == code, f"{done.returncode}: {out}\n{err}"
    return done


def start(*args: str | Path, **more: Any) -> subprocess.Popen[bytes]:
    """Start pyinertia, its streams piped."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    more = {**pipes, "env": environment(), **more}
    return subprocess.Popen([*COMMAND, *map(str, args)], **more)


def ask(talk: Conversation, text: str) -> str:
    """One turn."""
    return "".join(talk.ask(text))


def greedy(n_predict: int = 24) -> SamplingOptions:
    return SamplingOptions(temp=0, n_predict=n_predict)


def notices() -> tuple[list[str], Callable[[str], None]]:
    told: list[str] = []
    return told, told.append
