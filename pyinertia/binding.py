"""llama_cpp, imported after its library was found and checked."""

import threading
from typing import Any

from pyinertia import _native

_native.load()

import llama_cpp as llama_cpp  # noqa: E402
from llama_cpp._utils import suppress_stdout_stderr  # noqa: E402
from llama_cpp.llama_cache import BaseLlamaCache as BaseLlamaCache  # noqa: E402
from llama_cpp.llama_cache import LlamaDiskCache as LlamaDiskCache  # noqa: E402
from llama_cpp.llama_cache import LlamaRAMCache as LlamaRAMCache  # noqa: E402
from llama_cpp.llama_tokenizer import LlamaTokenizer as LlamaTokenizer  # noqa: E402


def _take_turns(redirection: Any) -> None:
    """Let one thread at a time redirect stdout: two that overlap would lose it for good."""
    lock = threading.RLock()
    enter, leave = redirection.__enter__, redirection.__exit__

    def __enter__(self: Any) -> Any:
        if not self.disable:
            lock.acquire()
        return enter(self)

    def __exit__(self: Any, *error: object) -> Any:
        try:
            return leave(self, *error)
        finally:
            if not self.disable:
                lock.release()

    redirection.__enter__, redirection.__exit__ = __enter__, __exit__


_take_turns(suppress_stdout_stderr)
