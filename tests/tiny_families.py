"""Random-weight GGUF files of every architecture that a table of metadata can describe.

llama.cpp itself knows the tensors: it is given the metadata alone, and asks for each tensor that a
model of this kind may have, optional ones included. Their names and shapes make the file.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp as lc
import tiny_models
from stock import Tensor

N_WINDOW = 16  # of layers with a sliding window


@dataclass(frozen=True)
class Family:
    """What a tiny model of an architecture is made of.

    Attributes:
        metadata: Keys without the architecture, and their values; over those of COMMON.
        n_layer: Layers of the model.
        scored: The layers with cells that the engine ranks, None for all.
        kind: "decoder", "window" (the other layers see the N_WINDOW newest positions), "wide" (or
            more than these tests have, which llama.cpp fixes) or "hybrid" (they are recurrent).
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    n_layer: int = 2
    scored: tuple[int, ...] | None = None
    kind: str = "decoder"

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.n_layer)) if self.scored is None else self.scored


COMMON = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
MOE = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_count": 1,
    "expert_shared_feed_forward_length": 32,
    "expert_gating_func": 2,  # sigmoid
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 1,
    "interleave_moe_layer_step": 1,
}
ALL_MOE = MOE | {"leading_dense_block_count": 0}
SOFTMAX_MOE = ALL_MOE | {"expert_gating_func": 1}
MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * tiny_models.N_EMBD,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}
WINDOW = {"attention.sliding_window": N_WINDOW}
M_ROPE = {"rope.dimension_sections": [8, 4, 4, 0]}
SCALES = {
    "logit_scale": 0.5,
    "residual_scale": 0.7,
    "embedding_scale": 3.0,
    "attention.scale": 0.25,
}
MULTI_HEAD = {"attention.head_count_kv": 4}
XIELU = {f"xielu.{name}": [0.8, 0.8] for name in ("alpha_n", "alpha_p", "beta", "eps")}
BARE = {*XIELU}  # keys without the architecture


def every_second(value: int) -> list[int]:
    return [0, value, 0, value]


def window(metadata: dict[str, Any], n_layer: int, *scored: int) -> Family:
    return Family(WINDOW | metadata, n_layer, scored, "window")


def wide(metadata: dict[str, Any], n_layer: int, *scored: int) -> Family:
    return Family(WINDOW | metadata, n_layer, scored, "wide")


def hybrid(metadata: dict[str, Any], n_layer: int, *scored: int) -> Family:
    return Family(metadata, n_layer, scored, "hybrid")


# attention in every second layer
MIXED = MAMBA | {"attention.head_count_kv": every_second(2)}
DELTA = MAMBA | {"ssm.time_step_rank": 4, "ssm.group_count": 2, "full_attention_interval": 2}
DELTA["ssm.inner_size"] = 64

FAMILIES: dict[str, Family] = {
    "llama": Family(),
    "llama-moe": Family(SOFTMAX_MOE),
    "deci": Family(),
    "falcon": Family({"attention.head_count_kv": 1}),
    "gpt2": Family(MULTI_HEAD),
    "gptneox": Family(MULTI_HEAD | {"use_parallel_residual": True, "rope.dimension_count": 8}),
    "mpt": Family(MULTI_HEAD | {"attention.max_alibi_bias": 8.0}),
    "baichuan": Family(MULTI_HEAD),
    "baichuan-13b": Family(MULTI_HEAD, 40),
    "starcoder": Family({"attention.head_count_kv": 1}),
    "refact": Family({"attention.head_count_kv": 1}),
    "bloom": Family(MULTI_HEAD),
    "stablelm": Family({"rope.dimension_count": 8, "use_parallel_residual": False}),
    "qwen": Family(MULTI_HEAD | {"feed_forward_length": 128}),
    "qwen2": Family(),
    "qwen2moe": Family(SOFTMAX_MOE),
    "qwen2vl": Family(M_ROPE),
    "qwen3": Family(),
    "qwen3moe": Family(SOFTMAX_MOE),
    "qwen3vl": Family(M_ROPE),
    "qwen3vlmoe": Family(M_ROPE | SOFTMAX_MOE),
    "phi2": Family({"rope.dimension_count": 8}),
    "phi3": Family(),
    "phimoe": Family(SOFTMAX_MOE),
    "plamo": Family(MULTI_HEAD),
    "codeshell": Family(),
    "orion": Family(),
    "internlm2": Family(),
    "minicpm": Family(SCALES),
    "gemma": Family(),
    "gemma2": window({"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}, 4, 1, 3),
    "gemma3": window({}, 6, 5),
    "starcoder2": Family(),
    "xverse": Family(),
    "command-r": Family(SCALES),
    "cohere2": window(SCALES, 4, 3),
    "cohere2moe": window(SCALES | MOE, 5, 0, 4),
    "dbrx": Family(SOFTMAX_MOE | {"attention.clamp_kqv": 8.0}),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": window({}, 4, 3),
    "olmoe": Family(SOFTMAX_MOE | MULTI_HEAD),
    "openelm": Family(),
    "arctic": Family(SOFTMAX_MOE),
    "deepseek": Family(MOE | MULTI_HEAD),
    "chatglm": Family({"rope.dimension_count": 16}),
    "glm4": Family({"rope.dimension_count": 16}),
    "glm4moe": Family(MOE),
    "jais": Family(MULTI_HEAD | {"attention.max_alibi_bias": 8.0}),
    "jais2": Family(),
    "nemotron": Family({"rope.dimension_count": 16}),
    "exaone": Family(),
    "exaone4": window({}, 4, 3),
    "exaone-moe": window(MOE, 4, 3),
    "granite": Family(SCALES),
    "granitemoe": Family(SCALES | SOFTMAX_MOE),
    "bailingmoe": Family(SOFTMAX_MOE),
    "bailingmoe2": Family(MOE),
    "dots1": Family(MOE | MULTI_HEAD),
    "arcee": Family(),
    "afmoe": window(MOE, 4, 3),
    "ernie4_5": Family(),
    "ernie4_5-moe": Family(MOE),
    "hunyuan-moe": Family(SOFTMAX_MOE),
    "hunyuan-dense": Family(),
    "smollm3": Family({}, 4),
    "gpt-oss": window(SOFTMAX_MOE, 4, 1, 3),
    "smallthinker": wide(SOFTMAX_MOE, 5, 0, 4),
    "seed_oss": Family(),
    "grovemoe": Family(
        SOFTMAX_MOE
        | {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5, "experts_per_group": 2}
    ),
    "apertus": Family(XIELU),
    "minimax-m2": Family(ALL_MOE),
    "pangu-embedded": Family(),
    "mistral3": Family(),
    "mellum": window(SOFTMAX_MOE, 4, 3),
    "maincoder": Family(),
    "llama4": wide(MOE, 4, 3),
    "jamba": hybrid(MIXED, 4, 1, 3),
    "falcon-h1": hybrid(MAMBA, 2, 0, 1),
    "granitehybrid": hybrid(MIXED | SCALES, 4, 1, 3),
    "lfm2": hybrid({"shortconv.l_cache": 3, "attention.head_count_kv": every_second(2)}, 4, 1, 3),
    "lfm2moe": hybrid(
        MOE | {"shortconv.l_cache": 3, "attention.head_count_kv": every_second(2)}, 4, 1, 3
    ),
    "nemotron_h": hybrid(MIXED | {"feed_forward_length": [0, 0, 64, 0]}, 4, 1, 3),
    "plamo2": hybrid(MIXED | {"ssm.group_count": 0}, 4, 1, 3),
    "qwen3next": hybrid(DELTA | SOFTMAX_MOE, 4, 1, 3),
    "qwen35": hybrid(DELTA | M_ROPE, 4, 1, 3),
    "qwen35moe": hybrid(DELTA | M_ROPE | SOFTMAX_MOE, 4, 1, 3),
    "minimax-01": hybrid(SCALES | SOFTMAX_MOE | MULTI_HEAD | {"full_attention_interval": 2}, 4, 1, 3),
}

# a table may hold several models of an architecture
ARCHITECTURES = {
    "llama-moe": "llama",
    "baichuan-13b": "baichuan",
    "olmo3": "olmo2",
}


def architecture(name: str) -> str:
    return ARCHITECTURES.get(name, name)


def write(path: Path, name: str, family: Family) -> Path:
    """Write a model.

    Raises:
        ValueError: llama.cpp does not take the metadata.
    """
    shapes = _tensors(_close(_writer(path, name, family), path))
    return tiny_models.finish(_writer(path, name, family), path, shapes)


def _writer(path: Path, name: str, family: Family):
    arch = architecture(name)
    metadata = COMMON | family.metadata
    n_ff = metadata.pop("feed_forward_length", tiny_models.N_FF)
    writer = tiny_models.start(path, arch, family.n_layer, n_ff=n_ff)
    for key, value in metadata.items():
        _add(writer, key if key in BARE else f"{arch}.{key}", value)
    return writer


def _add(writer, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def _close(writer, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


class _InitParams(ctypes.Structure):
    """struct gguf_init_params (gguf.h)."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _tensors(path: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor that llama.cpp asks for, outermost first."""
    llama = lc.llama_cpp._lib
    folder = Path(llama._name).parent
    base = ctypes.CDLL(str(next(p for p in sorted(folder.iterdir()) if "ggml-base" in p.name)))
    base.gguf_init_from_file.restype = ctypes.c_void_p
    base.gguf_init_from_file.argtypes = [ctypes.c_char_p, _InitParams]
    base.gguf_free.argtypes = [ctypes.c_void_p]
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_n_dims.argtypes = [ctypes.c_void_p]

    shapes: dict[str, tuple[int, ...]] = {}
    set_data = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)

    @set_data
    def ask(tensor, _) -> None:
        n_dims = base.ggml_n_dims(tensor)
        ne = ctypes.cast(tensor, ctypes.POINTER(Tensor))[0].ne
        shapes[base.ggml_get_name(tensor).decode()] = tuple(ne[i] for i in reversed(range(n_dims)))

    llama.llama_model_init_from_user.restype = ctypes.c_void_p
    llama.llama_model_init_from_user.argtypes = [
        ctypes.c_void_p, set_data, ctypes.c_void_p, lc.llama_model_params,
    ]  # fmt: skip
    metadata = base.gguf_init_from_file(str(path).encode(), _InitParams(True, None))
    model = llama.llama_model_init_from_user(
        metadata, ask, None, lc.llama_model_default_params()
    )
    base.gguf_free(metadata)
    if not model:
        msg = f"llama.cpp does not load {path.name}"
        raise ValueError(msg)
    lc.llama_model_free(model)
    return shapes
