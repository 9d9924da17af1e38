"""The types that cached keys and values can have, by the names of llama.cpp's own tools."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pyinertia.errors import CommandError

# the numbers are those of enum ggml_type (ggml.h)
KV_TYPES: Mapping[str, int] = MappingProxyType(
    {
        "f32": 0,
        "f16": 1,
        "bf16": 30,
        "q8_0": 8,
        "q5_1": 7,
        "q5_0": 6,
        "q4_1": 3,
        "q4_0": 2,
        "iq4_nl": 20,
    }
)
"""Name of a cache type -> its number, as `Llama(type_k=..., type_v=...)` takes it."""

UNQUANTISED = ("f32", "f16", "bf16")


def check_kv_types(type_k: str, type_v: str, flash_attn: bool) -> None:
    """Refuse unknown types, and quantised values without flash attention.

    Args:
        type_k: Name of the type of the keys, see `KV_TYPES`.
        type_v: Name of the type of the values.
        flash_attn: Whether flash attention is on.

    Raises:
        CommandError: A type is unknown, or the values are quantised and flash_attn is False.
    """
    for option, kind in (("-ctk", type_k), ("-ctv", type_v)):
        if kind not in KV_TYPES:
            msg = f"{option} {kind}: the cache types are {', '.join(KV_TYPES)}"
            raise CommandError(msg)
    if not flash_attn and type_v not in UNQUANTISED:
        msg = f"-ctv {type_v} with -fa off: quantised values need flash attention; pass -fa on"
        raise CommandError(msg)
