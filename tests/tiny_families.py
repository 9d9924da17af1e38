"""Random-weight GGUF files of every architecture that a table of metadata can describe.

llama.cpp itself knows the tensors: it is given the metadata alone, and asks for each tensor that a
model of this kind may have, optional ones included. Their names and shapes make the file.
"""

from __future__ import annotations

import ctypes
import textwrap
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
        rtol: What rounding may change of the logits, which eviction changes by a tenth and more.
            llama.cpp's GELU is a table in float16, where a last bit may become 1e-3.
    """

    metadata: dict[str, Any] = field(default_factory=dict)
    n_layer: int = 2
    scored: tuple[int, ...] | None = None
    kind: str = "decoder"
    rtol: float = 1e-3

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(range(self.n_layer)) if self.scored is None else self.scored


COMMON = {
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_epsilon": 1e-5,
    "attention.layer_norm_rms_epsilon": 1e-5,
}
MULTI_HEAD = {"attention.head_count_kv": 4}
MULTI_QUERY = {"attention.head_count_kv": 1}
NO_HEADS = {"attention.head_count": 0, "attention.head_count_kv": 0}
PARTIAL_ROPE = {"rope.dimension_count": 16}
M_ROPE = {"rope.dimension_sections": [8, 4, 4, 0]}
SCALES = {
    "logit_scale": 0.5,
    "residual_scale": 0.7,
    "embedding_scale": 3.0,
    "attention.scale": 0.25,
}
XIELU = {f"xielu.{name}": [0.8, 0.8] for name in ("alpha_n", "alpha_p", "beta", "eps")}

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
GROVE = {"expert_chunk_feed_forward_length": 32, "expert_group_scale": 0.5, "experts_per_group": 2}

WINDOW = {"attention.sliding_window": N_WINDOW}
PATTERN = {"attention.sliding_window_pattern": [True, False, True, False]}
GEMMA4 = {
    "attention.sliding_window_pattern": [True, False, True, False, True, False],
    "attention.key_length_swa": 32,
    "attention.value_length_swa": 32,
    "attention.shared_kv_layers": 2,
    "embedding_length_per_layer_input": 32,
}

MAMBA = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 2 * tiny_models.N_EMBD,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 8,
    "ssm.group_count": 1,
}
EVERY_SECOND = {"attention.head_count_kv": [0, 2, 0, 2]}  # layer has attention
MIXED = MAMBA | EVERY_SECOND
NEMOTRON = MIXED | {"feed_forward_length": [0, 0, 64, 0]}
DELTA = MAMBA | {
    "ssm.inner_size": 64,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
    "full_attention_interval": 2,
}
LIGHTNING = MULTI_HEAD | {"residual_scale": 0.7, "full_attention_interval": 2}
CONV = EVERY_SECOND | {"shortconv.l_cache": 3}

LORA = PARTIAL_ROPE | {
    "attention.kv_lora_rank": 32,
    "attention.q_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
}
FULL_LORA = LORA | MULTI_HEAD
MLA = LORA | MULTI_QUERY | {"attention.key_length_mla": 48, "attention.value_length_mla": 32}
INDEXER = {
    "attention.indexer.head_count": 2,
    "attention.indexer.key_length": 64,
    "attention.indexer.top_k": 16,
    "attention.indexer.block_size": 16,
    "attention.indexer.local_blocks": 1,
    "attention.indexer.types": [True, True],
}
HYPER = {
    "hyper_connection.count": 4,
    "hyper_connection.epsilon": 1e-6,
    "hyper_connection.magnitude": 1.0,
}
DOTS3 = {
    "attention.sliding_window_pattern": [True, False],
    "attention.kv_lora_rank_swa": 32,
    "attention.key_length_swa": 48,
    "attention.value_length_swa": 32,
    "attention.key_length_mla_swa": 48,
    "attention.value_length_mla_swa": 32,
    "rope.freq_base_swa": 10000.0,
}
KDA = {
    "ssm.conv_kernel": 4,
    "kda.head_dim": 32,
    "kda.safe_gate": True,
    "kda.gate_lower_bound": -5.0,
    "attention.head_count_kv": [0, 1],
    "attn_res.block_size": 2,
    "activation.situ_beta": 1.0,
    "activation.situ_linear_beta": 1.0,
}
RWKV = {
    "wkv.head_size": 32,
    "token_shift_count": 2,
    "time_mix_extra_dim": 32,
    "time_decay_extra_dim": 32,
    "attention.decay_lora_rank": 32,
    "attention.iclr_lora_rank": 32,
    "attention.value_residual_mix_lora_rank": 32,
    "attention.gate_lora_rank": 32,
}
ENCODER = {"attention.causal": False, "pooling_type": 1, "tokenizer.ggml.token_type_count": 2}
T5 = MULTI_HEAD | {"attention.relative_buckets_count": 32, "decoder_start_token_id": 0}

ADAPTERS = {
    "adapters.count": 2,
    "adapters.lora_rank": 4,
    "adapters.token_ids_activate": [65, 66],
    "adapters.token_ids_substitute": [67, 68],
}

BARE = {*XIELU, "tokenizer.ggml.token_type_count"}  # keys without the architecture


def window(metadata: dict[str, Any], n_layer: int, *scored: int, **fields: Any) -> Family:
    return Family(WINDOW | metadata, n_layer, scored, "window", **fields)


def wide(metadata: dict[str, Any], n_layer: int, *scored: int) -> Family:
    return Family(WINDOW | metadata, n_layer, scored, "wide")


def hybrid(metadata: dict[str, Any], n_layer: int, *scored: int) -> Family:
    return Family(metadata, n_layer, scored, "hybrid")


# where a name has something in parentheses, it is one of several models of an architecture
FAMILIES = {
    "llama": Family(),
    "llama (MoE)": Family(SOFTMAX_MOE),
    "llama4": wide(MOE, 4, 3),
    "deci": Family(),
    "falcon": Family(MULTI_QUERY),
    "grok": Family(SOFTMAX_MOE),
    "gpt2": Family(MULTI_HEAD),
    "gptneox": Family(MULTI_HEAD | PARTIAL_ROPE | {"use_parallel_residual": True}),
    "mpt": Family(MULTI_HEAD | {"attention.max_alibi_bias": 8.0}),
    "baichuan": Family(MULTI_HEAD),
    "baichuan (ALiBi)": Family(MULTI_HEAD, 40),
    "starcoder": Family(MULTI_QUERY),
    "refact": Family(MULTI_QUERY),
    "bloom": Family(MULTI_HEAD),
    "stablelm": Family(PARTIAL_ROPE | {"use_parallel_residual": False}),
    "qwen": Family(MULTI_HEAD | {"feed_forward_length": 128}),
    "qwen2": Family(),
    "qwen2moe": Family(SOFTMAX_MOE),
    "qwen2vl": Family(M_ROPE),
    "qwen3": Family(),
    "qwen3moe": Family(SOFTMAX_MOE),
    "qwen3next": hybrid(DELTA | SOFTMAX_MOE, 4, 1, 3),
    "qwen3vl": Family(M_ROPE),
    "qwen3vlmoe": Family(M_ROPE | SOFTMAX_MOE),
    "qwen35": hybrid(DELTA | M_ROPE, 4, 1, 3),
    "qwen35moe": hybrid(DELTA | M_ROPE | SOFTMAX_MOE, 4, 1, 3),
    "phi2": Family(PARTIAL_ROPE),
    "phi3": Family(),
    "phimoe": Family(SOFTMAX_MOE),
    "plamo": Family(MULTI_HEAD),
    "plamo2": hybrid(MIXED | {"ssm.group_count": 0}, 4, 1, 3),
    "plamo3": window({}, 8, 7),
    "codeshell": Family(),
    "orion": Family(),
    "internlm2": Family(),
    "minicpm": Family(SCALES),
    "minicpm3": Family(FULL_LORA),
    "gemma": Family(),
    "gemma2": window({"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}, 4, 1, 3),
    "gemma3": window({}, 6, 5),
    # keys that are not scaled down make more of rounding
    "gemma3n": window({}, 25, 4, 9, 14, 19, 24, rtol=5e-3),
    "gemma4": window(GEMMA4, 6, 1, 3, 5, rtol=5e-3),
    "starcoder2": Family(),
    "maple": window(SOFTMAX_MOE | PATTERN | {"swiglu_clamp_exp": [7.0] * 4}, 4, 1, 3),
    "jamba": hybrid(MIXED, 4, 1, 3),
    "falcon-h1": hybrid(MAMBA, 2, 0, 1),
    "xverse": Family(),
    "command-r": Family(SCALES),
    "cohere2": window(SCALES, 4, 3),
    "cohere2moe": window(SCALES | MOE, 5, 0, 4),
    "dbrx": Family(SOFTMAX_MOE | {"attention.clamp_kqv": 8.0}),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo2 (window)": window({}, 4, 3),
    "olmoe": Family(SOFTMAX_MOE | MULTI_HEAD),
    "muse-glimmer": window(SCALES, 4, 3),
    "openelm": Family(),
    "arctic": Family(SOFTMAX_MOE),
    "deepseek": Family(MOE | MULTI_HEAD),
    "deepseek2 (no MLA)": Family(FULL_LORA | MOE),
    "deepseek2-ocr": Family(MULTI_HEAD | MOE),
    "chatglm": Family(PARTIAL_ROPE),
    "glm4": Family(PARTIAL_ROPE),
    "glm4moe": Family(MOE),
    "bitnet": Family(),
    "jais": Family(MULTI_HEAD | {"attention.max_alibi_bias": 8.0}),
    "jais2": Family(),
    "nemotron": Family(PARTIAL_ROPE),
    "nemotron_h": hybrid(NEMOTRON, 4, 1, 3),
    "nemotron_h_moe": hybrid(NEMOTRON | SOFTMAX_MOE, 4, 1, 3),
    "exaone": Family(),
    "exaone4": Family(),
    "exaone-moe": window(MOE, 4, 3),
    "granite": Family(SCALES),
    "granitemoe": Family(SCALES | SOFTMAX_MOE),
    "granitehybrid": hybrid(MIXED | SCALES, 4, 1, 3),
    "granite_swa": window(SCALES | PATTERN, 4, 1, 3),
    "plm": Family(FULL_LORA),
    "bailingmoe": Family(SOFTMAX_MOE),
    "bailingmoe2": Family(MOE),
    "dots1": Family(MOE | MULTI_HEAD),
    "arcee": Family(),
    "afmoe": window(MOE, 4, 3),
    "laguna": window(MOE, 5, 0, 4),
    "ernie4_5": Family(),
    "ernie4_5-moe": Family(MOE),
    "hunyuan-moe": Family(SOFTMAX_MOE),
    "hunyuan-dense": Family(),
    "hunyuan_vl": Family(M_ROPE),
    "hy_v3": Family(MOE),
    "smollm3": Family({}, 4),
    "gpt-oss": window(SOFTMAX_MOE, 4, 1, 3),
    "lfm2": hybrid(CONV, 4, 1, 3),
    "lfm2moe": hybrid(CONV | MOE, 4, 1, 3),
    "smallthinker": wide(SOFTMAX_MOE, 5, 0, 4),
    "seed_oss": Family(),
    "grovemoe": Family(SOFTMAX_MOE | GROVE),
    "apertus": Family(XIELU),
    "minimax-01": hybrid(
        SCALES | SOFTMAX_MOE | MULTI_HEAD | {"full_attention_interval": 2}, 4, 1, 3
    ),
    "minimax-m2": Family(ALL_MOE),
    "hrm_text": Family({"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}, 6),
    "cogvlm": Family(MULTI_HEAD),
    "pangu-embedded": Family(),
    "mistral3": Family(),
    "mistral4 (no MLA)": Family(FULL_LORA | MOE),
    "paddleocr": Family(M_ROPE),
    "mimo2": window(ALL_MOE | PATTERN, 4, 1, 3),
    "step35": window(MOE | PATTERN | {"rope.freq_base_swa": 10000.0}, 4, 1, 3),
    "spark2_5": window(PATTERN, 4, 1, 3),
    "maincoder": Family(),
    "talkie": Family(SCALES),
    "mellum": window(SOFTMAX_MOE, 4, 3),
    "nanbeige": Family({"num_loops": 2}, 2, (0, 1, 2, 3)),
    "pockettts": Family(),
}

# what the engine does not serve, by what it says
REFUSED = {
    "has no KV cache": {
        "bert": Family(ENCODER),
        "modern-bert": Family(ENCODER | WINDOW),
        "nomic-bert": Family(ENCODER),
        "nomic-bert-moe": Family(ENCODER | SOFTMAX_MOE | {"moe_every_n_layers": 2}),
        "neo-bert": Family(ENCODER),
        "jina-bert-v2": Family(ENCODER | MULTI_HEAD),
        "jina-bert-v3": Family(ENCODER),
        "eurobert": Family(ENCODER),
        "gemma-embedding": Family(ENCODER | WINDOW),
        "dream": Family(),
        "llada": Family(),
        "llada-moe": Family(SOFTMAX_MOE),
        "rnd1": Family(SOFTMAX_MOE),
    },
    "has an encoder": {"t5": Family(T5), "t5encoder": Family(T5)},
    "attends to later tokens": {"llama-embed": Family(ENCODER)},
    "which adapter is on": {"graniteswitch": Family(SCALES | ADAPTERS)},
    "no further than a sliding window": {"lfm2 (windows only)": window(CONV, 4)},
    "recurrent": {
        "mamba": Family(MAMBA | NO_HEADS),
        "mamba2": Family(MAMBA | NO_HEADS),
        "rwkv6": Family(RWKV | NO_HEADS),
        "rwkv7": Family(RWKV | NO_HEADS),
        "arwkv7": Family(RWKV | {"token_shift_count": 1}),
    },
    "latent attention": {
        "deepseek2 (MLA)": Family(MLA | MOE),
        "mistral4 (MLA)": Family(MLA | MOE),
        "kimi-linear": Family(MLA | MOE | KDA),
        "kimi-k3": Family(MLA | MOE | KDA),
        "bailingmoe3": Family(MLA | MOE | KDA),
    },
    "mirror each other": {
        "minimax-m3": Family(MOE | INDEXER),
        "hy_v4": Family(MLA | MOE | INDEXER | HYPER),
        "deepseek32": Family(MLA | MOE | INDEXER),
        "glm-dsa": Family(MLA | MOE | INDEXER),
        "dots3note": Family(MLA | MOE | INDEXER | WINDOW | DOTS3),
    },
}


# what these tables cannot describe, drafts of other models, and names without a model
UNTESTED = (
    "chameleon", "clip", "deepseek4", "dflash", "eagle3", "gemma4-assistant", "glm5-next", "gptj",
    "qwen3tts", "qwen4exp", "rwkv6qwen2", "wavtokenizer-dec",
)  # fmt: skip


def architecture(name: str) -> str:
    return name.partition(" ")[0]


def coverage() -> str:
    """What docs/models.md says of the architectures."""
    kinds = {
        "decoder": "Attention in every layer",
        "window": "Sliding windows",
        "hybrid": "Hybrids, whose attention part evicts",
    }
    groups = {text: [] for text in kinds.values()}
    for name, family in FAMILIES.items():
        groups[kinds["window" if family.kind == "wide" else family.kind]].append(name)
    refused = [name for families in REFUSED.values() for name in families]
    groups |= {"Refused": refused, "Not tested": UNTESTED}
    return "\n".join(
        textwrap.fill(
            f"{text}: {', '.join(sorted(names))}.",
            width=120,
            initial_indent="- ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for text, names in groups.items()
    )


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
    model = llama.llama_model_init_from_user(metadata, ask, None, lc.llama_model_default_params())
    base.gguf_free(metadata)
    if not model:
        msg = f"llama.cpp does not load {path.name}"
        raise ValueError(msg)
    lc.llama_model_free(model)
    return shapes
