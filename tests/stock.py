"""The oracle: an unpatched llama.cpp of the same source, in a process of its own.

`run(lib_dir, **job)` starts this file as a script with LLAMA_CPP_LIB_PATH=lib_dir and returns its
arrays; a `Process` takes many jobs. It uses llama-cpp-python's plain bindings only, nothing of
pyinertia.

A job is a dict with
    model       path of the GGUF
    context     fields of llama_context_params: n_ctx, n_threads, flash_attn, type_k, type_v
    steps       list of ["eval", tokens], ["rm", positions] and ["add", [p0, p1, shift]s]: the last
                of these also shifts the next position
    n_capture   queries at the end of every eval whose attention is captured, 0 for none
and the result has
    logits      float32 [n_eval, n_vocab], after the last token of every eval
    attention   float32 [n_captured, n_layer, n_head, n_kv], softmax (flash_attn off), the captured
                queries of all evals one after the other, n_kv of the last eval
    layers      int [n_layer], with attention: the layers that have it
    state       uint8, with attention: the cells after the last step, see cache_state.py
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np


def run(lib_dir: Path, **job) -> dict[str, np.ndarray]:
    with Process(lib_dir) as process:
        return process.run(**job)


class Process:
    """Takes one job after the other, until its with statement ends."""

    def __init__(self, lib_dir: Path) -> None:
        self.lib_dir = lib_dir
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Process:
        self.folder = tempfile.TemporaryDirectory()
        return self

    def __exit__(self, *_) -> None:
        if self.process:
            self.process.communicate()  # closes its input, and it ends
        self.folder.cleanup()

    def run(self, **job) -> dict[str, np.ndarray]:
        out, log = (Path(self.folder.name) / name for name in ("out.npz", "log"))
        if not self.process:
            env = {**os.environ, "LLAMA_CPP_LIB_PATH": str(self.lib_dir)}
            with log.open("w") as stderr:
                self.process = subprocess.Popen(
                    [sys.executable, __file__],
                    env=env,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=stderr,
                    text=True,
                )
        job = {"n_capture": 0, **job, "model": str(job["model"]), "out": str(out)}
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        if not self.process.stdout.readline():
            self.process.communicate()
            self.process = None  # the next job gets another one
            tail = log.read_text(errors="replace")[-3000:]
            msg = f"the stock build failed on {job['model']}:\n{tail}"
            raise RuntimeError(msg)
        return dict(np.load(out))


class Tensor(ctypes.Structure):
    """The head of struct ggml_tensor (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


class Attention:
    """Collects the softmax of every layer through cb_eval."""

    def __init__(self, base: ctypes.CDLL, n_capture: int) -> None:
        self.n_capture, self.rows, self.layers = n_capture, [], {}
        self.name = base.ggml_get_name
        self.name.restype, self.name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        self.get = base.ggml_backend_tensor_get
        self.get.restype = None
        self.get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]

    def __call__(self, tensor, ask, _):
        name = self.name(tensor).decode()
        if not name.startswith("kq_soft_max-"):
            return not ask
        if not ask:
            n_kv, n_tokens, n_head, _ = ctypes.cast(tensor, ctypes.POINTER(Tensor))[0].ne
            mass = np.empty((n_head, n_tokens, n_kv), np.float32)
            self.get(tensor, mass.ctypes.data, 0, mass.nbytes)
            last = mass[:, -self.n_capture :].swapaxes(0, 1)
            self.layers.setdefault(int(name.split("-")[1]), []).append(last)
        return True

    def end_batch(self) -> None:
        """Keep the last ubatch of the batch."""
        self.indices = sorted(self.layers)
        layers = [self.layers[il][-1] for il in self.indices]
        for t in range(len(layers[0])):
            self.rows.append([layer[t] for layer in layers])
        self.layers = {}

    def array(self) -> np.ndarray:
        n_kv = max(mass.shape[1] for row in self.rows for mass in row)
        n_head = len(self.rows[0][0])
        out = np.zeros((len(self.rows), len(self.rows[0]), n_head, n_kv), np.float32)
        for t, row in enumerate(self.rows):
            for il, mass in enumerate(row):
                out[t, il, :, : mass.shape[1]] = mass
        return out


def play(job: dict) -> dict[str, np.ndarray]:
    import llama_cpp as lc

    params = lc.llama_context_default_params()
    context = dict(job["context"])
    params.n_ctx = context.pop("n_ctx")
    params.n_threads = params.n_threads_batch = context.pop("n_threads", 2)
    params.n_batch = params.n_ubatch = context.pop("n_batch", 512)
    params.flash_attn_type = int(context.pop("flash_attn", False))
    params.type_k = context.pop("type_k", 1)
    params.type_v = context.pop("type_v", 1)
    params.swa_full = context.pop("swa_full", False)
    assert not context, context

    capture = None
    if job["n_capture"]:
        lib = Path(os.environ["LLAMA_CPP_LIB_PATH"])
        base = next(p for p in sorted(lib.iterdir()) if "ggml-base" in p.name)
        capture = Attention(ctypes.CDLL(str(base)), job["n_capture"])
        params.cb_eval = lc.ggml_backend_sched_eval_callback(capture)

    model = lc.llama_model_load_from_file(job["model"].encode(), lc.llama_model_default_params())
    ctx = lc.llama_init_from_model(model, params)
    memory = lc.llama_get_memory(ctx)
    n_vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))

    n_past, logits = 0, []
    for step, values in job["steps"]:
        if step == "rm":
            for pos in values:
                assert lc.llama_memory_seq_rm(memory, 0, pos, pos + 1)
            continue
        if step == "add":
            for p0, p1, shift in values:
                lc.llama_memory_seq_add(memory, 0, p0, p1, shift)
            n_past += values[-1][2]
            continue
        for i in range(0, len(values), params.n_batch):
            part = values[i : i + params.n_batch]
            batch = lc.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for j, token in enumerate(part):
                batch.token[j], batch.pos[j] = token, n_past + j
                batch.n_seq_id[j], batch.seq_id[j][0] = 1, 0
                batch.logits[j] = j == len(part) - 1
            assert lc.llama_decode(ctx, batch) == 0
            n_past += len(part)
            lc.llama_batch_free(batch)
        if capture:
            capture.end_batch()
        last = lc.llama_get_logits_ith(ctx, -1)
        logits.append(np.ctypeslib.as_array(last, shape=(n_vocab,)).copy())

    arrays = {"logits": np.array(logits)}
    if capture:
        arrays["attention"], arrays["layers"] = capture.array(), np.array(capture.indices)
        arrays["state"] = np.zeros(lc.llama_state_seq_get_size(ctx, 0), np.uint8)
        data = arrays["state"].ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        assert lc.llama_state_seq_get_data(ctx, data, arrays["state"].size, 0)
    lc.llama_free(ctx)
    lc.llama_model_free(model)
    return arrays


def main() -> None:
    import llama_cpp as lc

    lc.llama_backend_init()
    for line in sys.stdin:
        job = json.loads(line)
        np.savez(job.pop("out"), **play(job))
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
