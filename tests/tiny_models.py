"""Random-weight GGUF files below 2 MB: models that no registry has to ship.

Every writer takes the path to write and returns it. The vocabulary is the 256 bytes, so any text
tokenizes; weights are seeded, so a file is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFWriter, RopeScalingType, TokenType

N_EMBD, N_HEAD, N_HEAD_KV, N_FF, N_LAYER, N_CTX = 128, 4, 2, 64, 2, 1024
BOS, EOS = 256, 257

# a turn begins with <s> and its role, and ends with </s>
CHAT_TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def write_llama(
    path: Path, n_layer: int = N_LAYER, n_head: int = N_HEAD, eos: str = "</s>"
) -> Path:
    """A plain decoder with grouped queries (llama)."""
    writer = start(path, "llama", n_layer, eos)
    return finish(writer, path, _decoder(writer, n_layer, n_head))


def write_chat(path: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A plain decoder with a chat template."""
    writer = start(path, "llama", N_LAYER)
    writer.add_chat_template(template)
    return finish(writer, path, _decoder(writer, N_LAYER))


LORA_RANK, LORA_ALPHA = 4, 16.0
LORA_TARGETS = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_down")


def write_lora(path: Path, seed: int = 0) -> Path:
    """A LoRA adapter for write_llama and write_chat."""
    n_kv = N_EMBD // N_HEAD * N_HEAD_KV
    sizes = {"attn_k": (N_EMBD, n_kv), "attn_v": (N_EMBD, n_kv), "ffn_down": (N_FF, N_EMBD)}
    writer = GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", LORA_ALPHA)
    rng = np.random.default_rng(seed)
    for il in range(N_LAYER):
        for target in LORA_TARGETS:
            n_in, n_out = sizes.get(target, (N_EMBD, N_EMBD))
            a, b = (
                rng.normal(0, n_in**-0.5, (LORA_RANK, n_in)),
                rng.normal(0, 0.1, (n_out, LORA_RANK)),
            )
            for part, values in (("a", a), ("b", b)):
                name = f"blk.{il}.{target}.weight.lora_{part}"
                writer.add_tensor(name, values.astype(np.float32))
    return _write(writer, path)


def write_longrope(path: Path, n_short: int) -> Path:
    """A llama whose RoPE factors differ above n_short positions."""
    writer = start(path, "llama", N_LAYER)
    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_orig_ctx_len(n_short)
    shapes = _decoder(writer, N_LAYER)
    shapes |= {
        f"rope_factors_{size}.weight": (N_EMBD // N_HEAD // 2,) for size in ("long", "short")
    }
    return finish(writer, path, shapes)


def write_gemma3(path: Path, n_window: int = 32) -> Path:
    """A decoder whose layers see a sliding window, but for every sixth (gemma3)."""
    writer = start(path, "gemma3", 6)
    writer.add_sliding_window(n_window)
    shapes = _decoder(writer, 6)
    for il in range(6):
        shapes |= {
            f"blk.{il}.attn_q_norm.weight": (N_EMBD // N_HEAD,),
            f"blk.{il}.attn_k_norm.weight": (N_EMBD // N_HEAD,),
            f"blk.{il}.post_attention_norm.weight": (N_EMBD,),
            f"blk.{il}.post_ffw_norm.weight": (N_EMBD,),
        }
    return finish(writer, path, shapes)


def write_deci(path: Path) -> Path:
    """A llama of which the middle layer has no attention, and the cache no cells for it (deci)."""
    writer = start(path, "deci", 3)
    shapes = _decoder(writer, 3, without=(1,))
    writer.add_rope_dimension_count(N_EMBD // N_HEAD)
    return finish(writer, path, {k: v for k, v in shapes.items() if "blk.1.attn" not in k})


def write_bert(path: Path) -> Path:
    """An encoder, which has no KV cache (bert)."""
    writer = start(path, "bert", N_LAYER)
    writer.add_head_count(N_HEAD)
    writer.add_layer_norm_eps(1e-5)
    writer.add_causal_attention(False)
    writer.add_token_type_count(2)
    shapes = {
        "token_embd.weight": (BOS + 2, N_EMBD),
        "token_types.weight": (2, N_EMBD),
        "position_embd.weight": (N_CTX, N_EMBD),
        **_affine("token_embd_norm", N_EMBD),
    }
    for il in range(N_LAYER):
        shapes |= {
            **_affine(f"blk.{il}.attn_q", N_EMBD, N_EMBD),
            **_affine(f"blk.{il}.attn_k", N_EMBD, N_EMBD),
            **_affine(f"blk.{il}.attn_v", N_EMBD, N_EMBD),
            **_affine(f"blk.{il}.attn_output", N_EMBD, N_EMBD),
            **_affine(f"blk.{il}.attn_output_norm", N_EMBD),
            **_affine(f"blk.{il}.ffn_up", N_FF, N_EMBD),
            **_affine(f"blk.{il}.ffn_down", N_EMBD, N_FF),
            **_affine(f"blk.{il}.layer_output_norm", N_EMBD),
        }
    return finish(writer, path, shapes)


def write_mamba(path: Path) -> Path:
    """A recurrent model, whose state has no cells to evict (mamba)."""
    n_inner, n_conv, n_state, dt_rank = 2 * N_EMBD, 4, 8, 4
    writer = start(path, "mamba", N_LAYER)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(n_conv)
    writer.add_ssm_inner_size(n_inner)
    writer.add_ssm_state_size(n_state)
    writer.add_ssm_time_step_rank(dt_rank)
    shapes = {"token_embd.weight": (BOS + 2, N_EMBD), "output_norm.weight": (N_EMBD,)}
    for il in range(N_LAYER):
        shapes |= {
            f"blk.{il}.attn_norm.weight": (N_EMBD,),
            f"blk.{il}.ssm_in.weight": (2 * n_inner, N_EMBD),
            **_affine(f"blk.{il}.ssm_conv1d", n_inner, n_conv),
            f"blk.{il}.ssm_x.weight": (dt_rank + 2 * n_state, n_inner),
            **_affine(f"blk.{il}.ssm_dt", n_inner, dt_rank),
            f"blk.{il}.ssm_a": (n_inner, n_state),
            f"blk.{il}.ssm_d": (n_inner,),
            f"blk.{il}.ssm_out.weight": (N_EMBD, n_inner),
        }
    return finish(writer, path, shapes)


def _decoder(
    writer: GGUFWriter, n_layer: int, n_head: int = N_HEAD, without: tuple[int, ...] = ()
) -> dict[str, tuple[int, ...]]:
    """Metadata and shapes; `without`: layers that have no attention."""
    n_embd_head = N_EMBD // n_head
    has = [il not in without for il in range(n_layer)]
    writer.add_head_count([n_head * h for h in has] if without else n_head)
    writer.add_head_count_kv([N_HEAD_KV * h for h in has] if without else N_HEAD_KV)
    writer.add_key_length(n_embd_head)
    writer.add_value_length(n_embd_head)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd.weight": (BOS + 2, N_EMBD), "output_norm.weight": (N_EMBD,)}
    for il in range(n_layer):
        shapes |= {
            f"blk.{il}.attn_norm.weight": (N_EMBD,),
            f"blk.{il}.attn_q.weight": (N_EMBD, N_EMBD),
            f"blk.{il}.attn_k.weight": (n_embd_head * N_HEAD_KV, N_EMBD),
            f"blk.{il}.attn_v.weight": (n_embd_head * N_HEAD_KV, N_EMBD),
            f"blk.{il}.attn_output.weight": (N_EMBD, N_EMBD),
            f"blk.{il}.ffn_norm.weight": (N_EMBD,),
            f"blk.{il}.ffn_gate.weight": (N_FF, N_EMBD),
            f"blk.{il}.ffn_up.weight": (N_FF, N_EMBD),
            f"blk.{il}.ffn_down.weight": (N_EMBD, N_FF),
        }
    return shapes


def _affine(name: str, *shape: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape, f"{name}.bias": shape[:1]}


def start(
    path: Path,
    architecture: str,
    n_layer: int,
    eos: str = "</s>",
    n_ff: int | list[int] = N_FF,
) -> GGUFWriter:
    """What all models share: sizes and the vocabulary of bytes."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(N_EMBD)
    writer.add_feed_forward_length(n_ff)
    writer.add_block_count(n_layer)
    writer.add_vocab_size(BOS + 2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*_byte_tokens(), "<s>", eos])
    writer.add_token_types([TokenType.NORMAL] * 256 + [TokenType.CONTROL] * 2)
    writer.add_token_merges(["< s"])  # the key must exist; no token is called "<s" alone
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    return writer


def _byte_tokens() -> list[str]:
    # byte-level BPE writes unprintable bytes as code points from 256 on
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(others)) for b in range(256)]


def finish(writer: GGUFWriter, path: Path, shapes: dict[str, tuple[int, ...]]) -> Path:
    """Give every tensor seeded weights and write the file."""
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        norm = "norm.weight" in name
        values = np.ones(shape) if norm else rng.normal(0, shape[-1] ** -0.5, shape)
        if name.endswith("ssm_a"):  # a decay must be negative
            values = -np.abs(values) - 0.1
        if name.startswith("rope_factors"):
            values = 1 + np.abs(values)
        writer.add_tensor(name, values.astype(np.float32))
    return _write(writer, path)


def _write(writer: GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
