"""The process of a side: it answers requests, a line of JSON each."""

from __future__ import annotations

import json
import subprocess
import tempfile
from contextlib import suppress
from typing import Any


class Process:
    """A process that does what it is asked for.

    Once it has failed, `failed` says why, and every further request does nothing.
    """

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.failed = ""
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=env,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for us alone
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Return the answer; it is empty if the process failed, now or before."""
        if self.failed:
            return {}
        assert self._process.stdin
        assert self._process.stdout
        line = ""
        with suppress(OSError):  # a broken pipe: the process has ended
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        answer: dict[str, Any] = (
            json.loads(line) if line.endswith("\n") else {"error": self._last_words()}
        )
        self.failed = " ".join(answer.pop("error", "").split())
        return answer

    def _last_words(self) -> str:
        code = self._process.wait()
        self._errors.seek(0)
        said = [line for line in self._errors if line.strip()]
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        return "; ".join([f"the process {how}", *said[-1:]])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            with suppress(OSError):  # what is left in a broken pipe
                if stream:
                    stream.close()
