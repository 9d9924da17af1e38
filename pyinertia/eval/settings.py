"""How models are opened, and what identifies a sample."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyinertia
from pyinertia.eval.arms import Arm

Item = tuple[str, int]  # task and index


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all samples of a run have in common; `extra` is for the report alone."""

    model: Path
    model_sha256: str
    length: int
    seed: int
    n_threads: int
    n_gpu_layers: int = 0
    flash_attn: bool = True
    type_k: str = "f16"
    type_v: str = "f16"
    n_batch: int = 512
    extra: dict[str, Any] = field(default_factory=dict)

    def identity(self, evaluation: str, arm: Arm, item: Item, sample_sha256: str) -> dict[str, Any]:
        """Everything that a result depends on; `sample_sha256` is that of the sample as it is now.

        The data, the template and the seed are in the sample's tokens, answers and spans.
        """
        return {
            "evaluation": evaluation,
            "task": item[0],
            "index": item[1],
            "sample": sample_sha256,
            "policy": arm.name,
            "budget": arm.budget,
            "fields": asdict(arm.policy),
            "length": self.length,
            "model": self.model_sha256,
            "n_threads": self.n_threads,
            "n_gpu_layers": self.n_gpu_layers,
            "flash_attn": self.flash_attn,
            "type_k": self.type_k,
            "type_v": self.type_v,
            "n_batch": self.n_batch,
            "pyinertia": pyinertia.__version__,
        }
