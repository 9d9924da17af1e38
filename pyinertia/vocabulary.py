"""A GGUF file without its weights: tokenizer and metadata."""

from __future__ import annotations

import os

from pyinertia.binding import llama_cpp
from pyinertia.errors import ModelError


def open_vocabulary(path: str | os.PathLike[str]) -> llama_cpp._internals.LlamaModel:
    """Open the vocabulary and the metadata of a model.

    Raises:
        ModelError: There is no such file, or it is not a GGUF model.
    """
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    try:
        return llama_cpp._internals.LlamaModel(
            path_model=os.fspath(path), params=params, verbose=False
        )
    except ValueError as error:
        msg = f"{path} is not a GGUF model that this llama.cpp can read; download it again"
        raise ModelError(msg) from error
