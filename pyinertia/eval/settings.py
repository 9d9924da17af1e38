"""How models are opened, and what identifies a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pyinertia.eval.arms import Arm

# enum ggml_type, those that a cache can have
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

Item = tuple[str, int]  # task and index


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all samples of a run have in common; `extra` is the evaluation's own."""

    model: Path
    model_sha256: str
    length: int
    seed: int
    n_threads: int
    n_gpu_layers: int = 0
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    extra: dict[str, Any] = field(default_factory=dict)

    def identity(self, evaluation: str, arm: Arm, item: Item) -> dict[str, Any]:
        """Everything that a result depends on."""
        return {
            "evaluation": evaluation,
            "task": item[0],
            "index": item[1],
            "policy": arm.name,
            "budget": arm.budget,
            "seed": self.seed,
            "length": self.length,
            "model": self.model_sha256,
            "flash_attn": self.flash_attn,
            "type_k": self.type_k,
            "type_v": self.type_v,
            **self.extra,
        }
