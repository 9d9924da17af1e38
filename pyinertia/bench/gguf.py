"""What a decode step must read of a GGUF file.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (version 3, little
endian). Sizes are the distances between tensors, so no table of quantisation types is needed.
"""

from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

# value type of the metadata -> struct code; 8 is a string, 9 an array
_SCALARS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}


def bytes_per_token(path: Path) -> int:
    """Return the bytes of weights that one decode step reads.

    That is every tensor but the token embedding, of which one row is read, unless it is the output
    matrix too; and of a mixture the share of experts that a token uses.
    """
    metadata, sizes = read(path)
    architecture = metadata["general.architecture"]
    n_expert = metadata.get(f"{architecture}.expert_count", 0)
    share = metadata.get(f"{architecture}.expert_used_count", 0) / n_expert if n_expert else 1.0
    if "output.weight" in sizes:
        sizes.pop("token_embd.weight", None)
    return int(sum(size * (share if "_exps." in name else 1) for name, size in sizes.items()))


def read(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the metadata, and the bytes of every tensor."""
    with path.open("rb") as file:
        magic, version, n_tensors, n_values = _unpack(file, "4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            msg = f"{path} is not a GGUF file of version 2 or 3"
            raise ValueError(msg)
        metadata = {_string(file): _value(file, _unpack(file, "I")[0]) for _ in range(n_values)}
        offsets = dict(_tensor(file) for _ in range(n_tensors))
        alignment = metadata.get("general.alignment", 32)
        start = -(-file.tell() // alignment) * alignment
    ends = [*sorted(offsets.values()), path.stat().st_size - start]
    following = dict(pairwise(ends))
    return metadata, {name: following[offset] - offset for name, offset in offsets.items()}


def _unpack(file: BinaryIO, codes: str) -> tuple[Any, ...]:
    form = "<" + codes
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: BinaryIO) -> str:
    return file.read(_unpack(file, "Q")[0]).decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == 8:
        return _string(file)
    if kind == 9:
        kind, n = _unpack(file, "IQ")
        return [_value(file, kind) for _ in range(n)]
    return _unpack(file, _SCALARS[kind])[0]


def _tensor(file: BinaryIO) -> tuple[str, int]:
    name = _string(file)
    n_dims = _unpack(file, "I")[0]
    return name, _unpack(file, f"{n_dims}QIQ")[-1]
