"""LoRA adapters: loaded, named by what is in them, and freed with their model."""

from __future__ import annotations

import ctypes
import hashlib
import os
from pathlib import Path

import numpy as np

from pyinertia.binding import llama_cpp
from pyinertia.errors import ModelError


def load_adapter(llm: llama_cpp.Llama, path: str | os.PathLike[str]) -> str:
    """Give a model an adapter, at its lora_scale.

    Returns:
        A name that tells this adapter and scale from others.

    Raises:
        ModelError: There is no such file, or it is no adapter for this model.
    """
    if not Path(path).exists():
        msg = f"lora_path={path!r} does not exist"
        raise ModelError(msg)
    # the parent would use a null pointer, and free it by a closure that keeps the model alive
    adapter = llama_cpp.llama_adapter_lora_init(llm.model, os.fsencode(path))
    if adapter:
        llm._stack.callback(llama_cpp.llama_adapter_lora_free, adapter)
        adapters = (llama_cpp.llama_adapter_lora_p_ctypes * 1)(adapter)
        scales = (ctypes.c_float * 1)(llm.lora_scale)
        if llama_cpp.llama_set_adapters_lora(llm.ctx, adapters, 1, scales) == 0:
            digest = hashlib.blake2b(np.memmap(path, np.uint8, "r").data, digest_size=8)
            return f"{Path(path).name} {digest.hexdigest()} x {llm.lora_scale}"
    msg = f"lora_path={path!r} is not a LoRA adapter for this model"
    raise ModelError(msg)
