"""pyinertia: llama.cpp with a KV cache that keeps only the cells worth keeping."""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from pyinertia import _native
from pyinertia.errors import ModelError, NativeLibraryError, PolicyError, PyInertiaError
from pyinertia.policy import POLICIES, KVPolicy, resolve_policy
from pyinertia.stats import KVStats

if TYPE_CHECKING:
    from pyinertia.llama import Llama

__all__ = [
    "POLICIES",
    "KVPolicy",
    "KVStats",
    "Llama",
    "ModelError",
    "NativeLibraryError",
    "PolicyError",
    "PyInertiaError",
    "resolve_policy",
]

try:
    __version__ = metadata.version("pyinertia")
except metadata.PackageNotFoundError:  # a checkout on sys.path
    __version__ = "0+unknown"

_native.set_library_path()


def __getattr__(name: str) -> Any:
    # policies and `python -m pyinertia` must work when the native library does not load
    if name == "Llama":
        from pyinertia.llama import Llama

        return Llama
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
