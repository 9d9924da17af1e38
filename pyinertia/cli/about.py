"""Versions, devices and policies."""

from __future__ import annotations

import sys
from importlib import metadata

import pyinertia
from pyinertia import _native
from pyinertia.policy import COLUMNS, POLICIES, KVPolicy


def main() -> int:
    """Print the report; return 1 if the native library does not load."""
    try:
        library = _native.load()
    except pyinertia.NativeLibraryError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    lines = [
        f"pyinertia         {pyinertia.__version__}",
        f"llama-cpp-python  {metadata.version('llama_cpp_python')}",
        f"llama.cpp         {_native.LLAMA_CPP_COMMIT[:9]}, patched",
        f"library           {library._name}, eviction ABI {_native.ABI_VERSION}",
        "",
        "devices",
        *(f"  {d.name}  {d.description}, {d.n_total / 2**30:.1f} GiB" for d in _native.devices()),
        "",
        "policies",
        *_table(),
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


def _table() -> list[str]:
    rows = [["policy", *COLUMNS], *(_row(name, policy) for name, policy in POLICIES.items())]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _row(name: str, policy: KVPolicy) -> list[str]:
    if not policy.evicts:
        return [name, policy.scorer, *["-"] * (len(COLUMNS) - 1)]
    return [name, *(_text(getattr(policy, column)) for column in COLUMNS)]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "auto" if value is None else str(value)
