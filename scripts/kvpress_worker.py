"""Answers prompts with a press of kvpress, in an environment that has it; see kvpress_compare.py.

The model is the GGUF file's, its weights made f32. A request is a line of JSON:

    {"model": path, "n_threads": n}                                     the first: load it
    {"press": name or null, "budget": cells, "tokens": [...],           an answer, greedily
     "n_predict": n, "stop": [...]}

A press cuts the prompt to the budget once it was evaluated (a ratio of it, rounded up to a whole
cell), and its decoding form keeps the answer within it. It picks cells by layer and KV head.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from kvpress import (
    DecodingPress,
    KeyDiffPress,
    PrefillDecodingPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)
from transformers import AutoModelForCausalLM, DynamicCache

PRESSES: dict[str, Callable[[], Any]] = {
    "snapkv": SnapKVPress,
    "tova": TOVAPress,
    "keydiff": KeyDiffPress,
    "streaming-llm": StreamingLLMPress,
}


def main() -> None:
    """Serve until the input ends."""
    model: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if model is None:
                model = load(**request)
                answer: dict[str, Any] = {}
            else:
                answer = generate(model, **request)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


def load(model: str, n_threads: int) -> Any:
    """Load a GGUF file."""
    torch.set_num_threads(n_threads)
    path = Path(model)
    loaded = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="sdpa"
    )
    return loaded.eval()


def generate(
    model: Any,
    press: str | None,
    budget: int,
    tokens: list[int],
    n_predict: int,
    stop: list[int],
) -> dict[str, Any]:
    """Answer greedily; positions are those of the whole text, as kvpress has them."""
    cache = DynamicCache()
    answer: list[int] = []
    with torch.no_grad(), pressed(model, press, budget, len(tokens)):
        ids = torch.tensor([tokens])
        positions = torch.arange(len(tokens))[None]
        while True:
            logits = model(
                input_ids=ids, past_key_values=cache, position_ids=positions, logits_to_keep=1
            ).logits
            token = int(logits[0, -1].argmax())
            if token in stop:
                break
            answer.append(token)
            if len(answer) == n_predict:
                break
            positions = positions[:, -1:] + 1
            ids = torch.tensor([[token]])
    return {"tokens": answer, "n_cells": cache.get_seq_length()}


def pressed(model: Any, name: str | None, budget: int, n_prompt: int) -> Any:
    """The press around a model; nothing for a prompt that the budget holds."""
    if name is None or n_prompt <= budget:
        return contextlib.nullcontext()
    press = PRESSES[name]()
    # kvpress keeps int(n (1 - ratio)) cells, which must not round down to one too few
    press.compression_ratio = 1 - (budget + 0.5) / n_prompt
    # SnapKV ranks by a window of queries, which an interval has to hold
    interval = max(8, getattr(press, "window_size", 0) + 1)
    decoding = DecodingPress(
        base_press=PRESSES[name](), compression_interval=interval, target_size=budget
    )
    return PrefillDecodingPress(prefilling_press=press, decoding_press=decoding)(model)


if __name__ == "__main__":
    main()
