"""What the process of a side runs: evaluate the next tokens of a text, and say how long it took.

It speaks lines of JSON: first a job, then requests {"do": "begin", "n_prompt": n, "n_tokens": n},
{"do": "prompt", "n": n}, {"do": "decode", "n": n} and {"do": "stats"}. A prompt's n tokens are one
batch, those of a decode one by one; the answer holds the milliseconds of each call. What goes wrong
is answered too, as {"error": text}, and ends the process.

The file also runs by its path in OpenVINO's environment, where there is no pyinertia: whatever is
not in Python itself is imported where it is needed.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

N_BATCH, N_WARM_UP = 512, 64

# OpenVINO's names of llama.cpp's cache types; one that it lacks is left to its default
OPENVINO_TYPES = {"f32": "f32", "f16": "f16", "bf16": "bf16", "q8_0": "u8", "q4_0": "u4"}
# cells of a block of its cache on CPUs, what eviction keeps at the start and, as in its
# examples, at the end; all must be multiples of a block
OPENVINO_BLOCK, OPENVINO_START, OPENVINO_RECENT = 32, 32, 128


class Engine(Protocol):
    """An inference engine with one sequence."""

    def begin(self, prompt: list[int], n_tokens: int) -> None:
        """Forget everything; this prompt follows, then n_tokens are decoded."""

    def evaluate(self, tokens: list[int]) -> None:
        """Evaluate tokens as one batch and wait for the result."""

    def stats(self) -> dict[str, Any]:
        """Return bytes and counters."""


def model_keywords(job: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords of `Llama` that a job says."""
    return {
        "n_batch": N_BATCH,
        "n_ubatch": N_BATCH,
        "n_threads_batch": job["n_threads"],
        **{name: job[name] for name in ("n_ctx", "n_threads", "flash_attn", "type_k", "type_v")},
    }


class LlamaCpp:
    """llama.cpp through llama-cpp-python: ours, or the unpatched build."""

    def __init__(self, job: dict[str, Any]) -> None:
        """Load the library and the model."""
        self.ours = job["kind"] == "pyinertia"
        library: Any = import_module("pyinertia" if self.ours else "llama_cpp")
        self.low: Any = import_module("llama_cpp")
        binding: Any = import_module("llama_cpp.llama_cpp")
        if not self.ours and hasattr(binding._lib, "llama_kv_evict_attach"):
            msg = f"{binding._lib._name} is a patched library, not stock"
            raise RuntimeError(msg)
        self.log: deque[str] = deque()
        self._callback = self.low.llama_log_callback(self._take_log)
        self.low.llama_log_set(self._callback, None)
        warnings.simplefilter("ignore")  # a small budget is the user's choice here
        policy = {}
        if job["policy"]:
            parse_policy = import_module("pyinertia.policy_text").parse_policy
            policy["kv_policy"] = parse_policy(job["policy"], job["budget"])
        try:
            self.llm = library.Llama(
                job["model"],
                **model_keywords(job),
                swa_full=False,
                verbose=False,
                **policy,
            )
        except ValueError as error:
            errors = [line.strip() for line in self.log if "error" in line.lower()]
            raise type(error)("; ".join([str(error), *errors[-1:]])) from error
        # llama_cpp has no call for their sizes, but a line per cache: two with sliding windows
        line = r" size = +([\d.]+) MiB \( *(\d+) cells"
        self.caches = [
            (int(float(mib) * 2**20), int(n_cells))
            for mib, n_cells in re.findall(line, "".join(self.log))
        ]
        self.log = deque(maxlen=0)  # it would grow

    def _take_log(self, _level: int, text: bytes, _data: Any) -> None:
        self.log.append(text.decode("utf-8", "replace"))

    def begin(self, prompt: list[int], n_tokens: int) -> None:
        """Forget everything and announce the prompt."""
        self.n_past = 0
        self.llm._ctx.kv_cache_seq_rm(-1, 0, -1)
        if self.ours:
            # once: the batches of a prompt are one prompt, which Llama.eval could not know
            import_module("pyinertia._native").prompt(self.llm.ctx, 0, len(prompt))

    def evaluate(self, tokens: list[int]) -> None:
        """Evaluate tokens as one batch, below Llama.eval, which stops at n_ctx."""
        self.llm._batch.set_batch(tokens, n_past=self.n_past, logits_all=False)
        self.llm._ctx.decode(self.llm._batch)
        self.llm._ctx.get_logits()  # waits for the result
        self.n_past += len(tokens)

    def stats(self) -> dict[str, Any]:
        """Bytes of K and V, and the counters of our engine."""
        if self.ours:
            stats = asdict(self.llm.kv_stats())
            return {name: value for name, value in stats.items() if not math.isnan(value)}
        return {
            "kv_bytes": sum(n_bytes for n_bytes, _ in self.caches),
            "kv_bytes_used": sum(
                n_bytes * min(self.n_past, n_cells) // n_cells for n_bytes, n_cells in self.caches
            ),
        }


class OpenVINO:
    """OpenVINO GenAI, which reads the GGUF itself. One step is one batch of the prompt, or a token.

    It decodes its own greedy tokens: a text cannot be forced on it.
    """

    def __init__(self, job: dict[str, Any]) -> None:
        """Load the library and the model."""
        genai: Any = import_module("openvino_genai")
        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = N_BATCH
        scheduler.enable_prefix_caching = False
        if job["budget"]:
            recent = min(OPENVINO_RECENT, job["budget"] // 4 // OPENVINO_BLOCK * OPENVINO_BLOCK)
            scheduler.use_cache_eviction = True
            scheduler.cache_eviction_config = genai.CacheEvictionConfig(
                OPENVINO_START,
                max(recent, OPENVINO_BLOCK),
                job["budget"],
                genai.AggregationMode.NORM_SUM,
            )
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": job["n_threads"]}
        if precision := OPENVINO_TYPES.get(job["kv_type"]):
            properties["KV_CACHE_PRECISION"] = precision
        self.genai, self.n_requests = genai, 0
        self.pipe = genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)

    def begin(self, prompt: list[int], n_tokens: int) -> None:
        """Forget everything and make a request of the prompt, whose steps are then asked for."""
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
        tensor, numpy = import_module("openvino").Tensor, import_module("numpy")
        config = self.genai.GenerationConfig()
        config.ignore_eos, config.do_sample = True, False
        config.max_new_tokens = n_tokens + 2  # the prompt makes one; one stays, to read the metrics
        ids = tensor(numpy.array([prompt]))
        # a handle that is dropped cancels its request
        self.request = self.pipe.add_request(self.n_requests, ids, config)
        self.n_requests += 1

    def evaluate(self, tokens: list[int]) -> None:
        """Evaluate the next batch of the prompt, or the next token."""
        if not self.pipe.has_non_finished_requests():
            msg = "OpenVINO ended the request early"
            raise RuntimeError(msg)
        self.pipe.step()

    def stats(self) -> dict[str, Any]:
        """Bytes of K and V."""
        metrics = self.pipe.get_metrics()
        kv_bytes = metrics.kv_cache_size_in_bytes
        return {"kv_bytes": kv_bytes, "kv_bytes_used": int(kv_bytes * metrics.cache_usage / 100)}


def process_memory() -> dict[str, int]:
    """Bytes of memory resident now and at most so far; what the system does not tell is left out.

    Both count the pages of the model file that were read.
    """
    with suppress(OSError):
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        kib = dict(re.findall(r"^(VmHWM|VmRSS):\s+(\d+) kB", status, re.MULTILINE))
        return {"rss": 1024 * int(kib["VmRSS"]), "rss_peak": 1024 * int(kib["VmHWM"])}
    with suppress(ImportError):
        resource: Any = import_module("resource")
        unit = 1 if sys.platform == "darwin" else 1024
        return {"rss_peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    return {}


def serve(engine: Engine, tokens: list[int], request: dict[str, Any], at: int) -> dict[str, Any]:
    """Answer a request; the next token of the text is tokens[at]."""
    if request["do"] == "begin":
        engine.begin(tokens[: request["n_prompt"]], request["n_tokens"])
        return {}
    if request["do"] == "stats":
        return {**engine.stats(), **process_memory()}
    wanted = [tokens[i % len(tokens)] for i in range(at, at + request["n"])]
    times = []
    for batch in [wanted] if request["do"] == "prompt" else [[token] for token in wanted]:
        start = time.perf_counter()
        engine.evaluate(batch)
        times.append(1e3 * (time.perf_counter() - start))
    return {"ms": times}


def work(requests: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Load and warm up, then answer requests one after the other."""
    job = json.loads(next(requests))
    engine: Engine = OpenVINO(job) if job["kind"] == "openvino" else LlamaCpp(job)
    tokens, at = job["tokens"], 0
    warm_up = tokens[: min(N_WARM_UP, job["n_prompt"])]
    engine.begin(warm_up, 1)
    engine.evaluate(warm_up)
    engine.evaluate(tokens[:1])
    yield {"ready": True}
    for line in requests:
        request = json.loads(line)
        at = 0 if request["do"] == "begin" else at
        yield serve(engine, tokens, request, at)
        at += request.get("n", 0)


def main(answers: Callable[[Iterator[str]], Iterator[dict[str, Any]]] = work) -> None:
    """Answer the lines of stdin; whatever libraries print goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        for answer in answers(iter(sys.stdin)):
            out.write(json.dumps(answer) + "\n")
            out.flush()
    except Exception as error:
        out.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        sys.exit(1)


if __name__ == "__main__":
    main()
