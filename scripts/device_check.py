"""What tests without a GPU cannot show: are ops, scores and cuts right on a device, and how fast?

    CMAKE_ARGS=-DGGML_CUDA=ON python scripts/bootstrap.py   before it: libraries with CUDA
    python scripts/device_check.py                          ops, parity, speed: some minutes
    python scripts/device_check.py --no-speed               ops and parity only
    python scripts/device_check.py --device CPU --tiny      a dry run of this script

Prints what it found and then OK or FAILED. Exit codes: 0 all is right, 1 something is not, 2 there
is no such device. Speed is measured on a random-weight model with the shapes of an 8B Llama (32
layers, 32 heads, 8 KV heads, heads of 128), written to build/.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import bootstrap

# cases of patches/overlay/tests/test-kv-evict.h that the CUDA backend takes
OP_CASES = {"KV_MASS": 117, "KV_MOVE": 42}

Sizes = dict[str, int]
LARGE = {"n_layer": 32, "n_embd": 4096, "n_head": 32, "n_head_kv": 8, "n_ff": 14336}
TINY = {"n_layer": 2, "n_embd": 256, "n_head": 4, "n_head_kv": 2, "n_ff": 256}
N_VOCAB = 32000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", help="its name, by default the first that is no CPU")
    parser.add_argument("--no-speed", action="store_true", help="ops and parity only")
    parser.add_argument("--tiny", action="store_true", help="small shapes: to try this script")
    options = parser.parse_args()
    bootstrap.enter()

    from pyinertia import _native

    names = [device.name for device in _native.devices()]
    name = options.device or next((name for name in names if name != "CPU"), "")
    if name not in names:
        print(f"no such device: {name or 'a GPU'}; the libraries see {', '.join(names)}")
        return 2
    print(f"device {name}")
    failed = [what for what, check in CHECKS.items() if not check(name)]
    if not options.no_speed:
        speed(TINY if options.tiny else LARGE)
    print(f"FAILED: {', '.join(failed)}" if failed else "OK")
    return bool(failed)


# -- right? -----------------------------------------------------------------------------------


def ops(device: str) -> bool:
    """Upstream's op tester with our cases: the device against the CPU's reference."""
    binary, ok = bootstrap.op_tests(), True
    for op, least in OP_CASES.items():
        command = [str(binary), "test", "-b", device, "-o", op]
        done = subprocess.run(command, capture_output=True, text=True)
        found = re.search(r"(\d+)/(\d+) tests passed", done.stdout + done.stderr)
        passed, ran = map(int, found.groups()) if found else (0, 0)
        print(f"  {op}: {passed} of {ran} cases passed, {least} wanted")
        ok &= done.returncode == 0 and passed == ran >= least
    return ok


def same_logits(device: str) -> bool:
    """Until the first cut a policy changes no bit of the logits."""
    tokens = list(range(100, 400))
    ours, plain = (logits(tokens, kv_policy=name) for name in ("inertiakv", None))
    print(f"  largest difference of a logit: {abs(ours - plain).max():g}")
    return bool((ours == plain).all())


def same_cells(device: str) -> bool:
    """Scores and the cells that stay are those of the CPU, but for rounding near the cut."""
    import numpy as np

    cells = []
    for n_gpu_layers in (-1, 0):
        llm = small_model(n_gpu_layers=n_gpu_layers, kv_policy="inertiakv", kv_budget=256)
        tokens = llm.tokenize(("The quick brown fox. " * 300).encode())[:1000]
        list(itertools.islice(llm.generate(tokens, temp=0.0), 4))  # the first cut is made
        cells.append(llm.kv_cells())
        llm.close()
    gpu, cpu = cells
    common, i, j = np.intersect1d(gpu["pos"], cpu["pos"], return_indices=True)
    share = len(common) / max(len(gpu), len(cpu))
    error = np.abs(gpu["score"][i] - cpu["score"][j]).max() / cpu["score"].max()
    print(f"  {share:.3f} of the cells are the same, scores differ by {error:.4f} of the largest")
    return bool(share >= 0.97 and error <= 0.02)


CHECKS = {"ops": ops, "logits before a cut": same_logits, "cells and scores": same_cells}


def small_model(n_gpu_layers: int = -1, **kwargs: Any) -> Any:
    from pyinertia import Llama

    path = str(bootstrap.smollm2())
    fixed: dict[str, Any] = {"n_ctx": 2048, "flash_attn": True, "verbose": False}
    return Llama(path, n_gpu_layers=n_gpu_layers, **fixed, **kwargs)


def logits(tokens: list[int], **kwargs: Any) -> Any:
    import numpy as np

    llm = small_model(**kwargs)
    llm.eval(tokens)
    for token in range(50, 60):
        llm.eval([token])
    result = np.ctypeslib.as_array(llm._ctx.get_logits(), shape=(llm.n_vocab(),)).copy()
    llm.close()
    return result


# -- fast? ------------------------------------------------------------------------------------


def speed(sizes: Sizes) -> None:
    """Decode tokens per second after a long prompt, and as a ratio to the first line's."""
    path = write_model(bootstrap.BUILD / f"random-{sizes['n_embd']}.gguf", sizes)
    long = (8192, 32768) if sizes is LARGE else (1024,)
    arms: list[tuple[str, dict[str, Any]]] = [("full", {"kv_policy": None})]
    for n_budget, name in itertools.product(
        (512, 2048), ("inertiakv", "inertiakv-lazy", "score-free")
    ):
        arms.append((f"{name} {n_budget}", {"kv_policy": name, "kv_budget": n_budget}))
    for type_kv, n_prompt in itertools.product((1, 8), long):  # GGML_TYPE_F16, GGML_TYPE_Q8_0
        print(f"decode after {n_prompt} tokens, {'f16' if type_kv == 1 else 'q8_0'} KV")
        first = 0.0
        for name, kwargs in arms:
            rate = decode_rate(path, n_prompt, type_k=type_kv, type_v=type_kv, **kwargs)
            first = first or rate
            print(f"  {name:24} {rate:8.1f} tokens/s {rate / first:6.2f} x", flush=True)


def decode_rate(path: Path, n_prompt: int, n_tokens: int = 128, **kwargs: Any) -> float:
    from pyinertia import Llama

    fixed: dict[str, Any] = {"n_batch": 2048, "n_ubatch": 2048, "flash_attn": True}
    fixed |= {"n_ctx": n_prompt + 512, "n_gpu_layers": -1, "verbose": False}
    llm: Any = Llama(str(path), **fixed, **kwargs)
    llm.eval([i * 7919 % N_VOCAB for i in range(n_prompt)])
    for token in range(32):  # the first cut, and CUDA graphs
        llm.eval([token])
    start = time.perf_counter()
    for token in range(n_tokens):
        llm.eval([token])
        llm._ctx.get_logits()  # waits for the device
    seconds = time.perf_counter() - start
    llm.close()
    return n_tokens / seconds


def write_model(path: Path, sizes: Sizes) -> Path:
    """A llama of these sizes with random weights in Q4_0, and no vocabulary of use."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    if path.is_file():
        return path
    n_embd, n_ff, rng = sizes["n_embd"], sizes["n_ff"], np.random.default_rng(0)
    n_kv = n_embd // sizes["n_head"] * sizes["n_head_kv"]
    writer = GGUFWriter(path.with_suffix(".part"), "llama")
    writer.add_context_length(65536)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(sizes["n_layer"])
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(sizes["n_head"])
    writer.add_head_count_kv(sizes["n_head_kv"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(N_VOCAB)
    writer.add_tokenizer_model("no_vocab")

    def matrix(name: str, n_out: int, n_in: int) -> None:
        blocks = rng.integers(0, 256, (n_out, n_in // 32, 18), np.uint8)
        blocks[..., :2] = np.array([0.1 / n_in**0.5], np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(n_out, -1), raw_dtype=GGMLQuantizationType.Q4_0)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(n_embd, np.float32))

    matrix("token_embd.weight", N_VOCAB, n_embd)
    matrix("output.weight", N_VOCAB, n_embd)
    norm("output_norm.weight")
    for il in range(sizes["n_layer"]):
        norm(f"blk.{il}.attn_norm.weight")
        norm(f"blk.{il}.ffn_norm.weight")
        for part, n_out, n_in in (
            ("attn_q", n_embd, n_embd), ("attn_k", n_kv, n_embd), ("attn_v", n_kv, n_embd),
            ("attn_output", n_embd, n_embd), ("ffn_gate", n_ff, n_embd), ("ffn_up", n_ff, n_embd),
            ("ffn_down", n_embd, n_ff),
        ):  # fmt: skip
            matrix(f"blk.{il}.{part}.weight", n_out, n_in)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    sys.exit(main())
