"""llama_cpp, imported after its library was found and checked."""

import functools
import threading
from typing import Any

from pyinertia import _native
from pyinertia.errors import NativeLibraryError

_native.load()

import llama_cpp as llama_cpp  # noqa: E402
from llama_cpp._utils import suppress_stdout_stderr  # noqa: E402
from llama_cpp.llama_cache import BaseLlamaCache as BaseLlamaCache  # noqa: E402
from llama_cpp.llama_cache import LlamaDiskCache as LlamaDiskCache  # noqa: E402
from llama_cpp.llama_cache import LlamaRAMCache as LlamaRAMCache  # noqa: E402
from llama_cpp.llama_grammar import LlamaGrammar as LlamaGrammar  # noqa: E402
from llama_cpp.llama_tokenizer import LlamaTokenizer as LlamaTokenizer  # noqa: E402

# all others are of these classes; what they call needs libmtmd
IMAGE_HANDLERS = (
    llama_cpp.llama_chat_format.Llava15ChatHandler,
    llama_cpp.llama_chat_format.MTMDChatHandler,
)


def _take_turns(redirection: Any) -> None:
    """Let one thread at a time redirect stdout: two that overlap would lose it for good."""
    lock = threading.RLock()
    enter, leave = redirection.__enter__, redirection.__exit__

    def __enter__(self: Any) -> Any:
        if self.disable:
            return enter(self)
        lock.acquire()
        try:
            return enter(self)
        except BaseException:  # there is nothing to leave
            lock.release()
            raise

    def __exit__(self: Any, *error: object) -> Any:
        try:
            return leave(self, *error)
        finally:
            if not self.disable:
                lock.release()

    redirection.__enter__, redirection.__exit__ = __enter__, __exit__


_take_turns(suppress_stdout_stderr)


def _explain_mtmd(handler: Any) -> None:
    """Let the constructor of a chat handler say which library it does not find."""
    construct = handler.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            construct(self, *args, **kwargs)
        except FileNotFoundError as error:
            msg = (
                f"{type(self).__name__} needs libmtmd, and the libraries of pyinertia are built "
                "without it: for images use llama_cpp.Llama, with a llama_cpp_python that has "
                "libraries of its own, in an environment without pyinertia"
            )
            raise NativeLibraryError(msg) from error

    handler.__init__ = __init__


for _handler in IMAGE_HANDLERS:
    _explain_mtmd(_handler)
