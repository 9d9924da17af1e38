"""llama.cpp's own log: silent, but for the last thing that it calls an error."""

from __future__ import annotations

from collections import deque
from typing import Any

from pyinertia import _native

_native.load()  # before llama_cpp is imported

import llama_cpp  # noqa: E402

ERROR = 4  # enum ggml_log_level

_errors: deque[str] = deque(maxlen=1)


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _keep(level: int, text: bytes, _: Any) -> None:
    if level == ERROR and text.strip():
        _errors.append(text.decode("utf-8", "replace").strip())


def silence() -> None:
    """Show none of it from now on."""
    llama_cpp.llama_log_set(_keep, None)


def last_error() -> str:
    """What llama.cpp says about its last error, "" if there was none."""
    return _errors[-1] if _errors else ""
