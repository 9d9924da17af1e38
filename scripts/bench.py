"""Speed against an unpatched build of the same source, in one run: all sides take turns.

    python scripts/bench.py                                   the table in the README
    python scripts/bench.py --prompt 2000 --budget 256 --tokens 64
    python scripts/bench.py --model other.gguf --policies inertiakv tova --no-flash-attn

Every side is a process of its own with its own library. They prefill the same text, one batch
each in turn, and then decode the same tokens, --block tokens each in turn. Times are medians over
tokens; ratios are medians over turns, so a slow phase of the machine hits all sides.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import asdict
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import bootstrap

STOCK, STOCK_SHORT, NONE = "stock", "stock, context = budget", "kv_policy=None"
POLICIES = ["inertiakv", "inertiakv-lazy", "score-free", "streaming-llm"]
N_BATCH = 512
N_SETTLE = 4  # first decode query, cut and compaction, new graph


class Side:
    """A process that evaluates the next tokens of the text on command."""

    def __init__(self, name: str, lib_dir: Path, job: dict[str, Any]) -> None:
        self.name, self.n_prompt = name, job["n_prompt"]
        self.prefill: list[float] = []
        self.settle: list[float] = []
        self.blocks: list[list[float]] = []
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--worker", json.dumps(job)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | {"LLAMA_CPP_LIB_PATH": str(lib_dir)},
        )  # fmt: skip
        self.ask(0)

    def ask(self, n: int) -> list[float]:
        """Evaluate n tokens one by one, or -n tokens as a batch; milliseconds of each call."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{n}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended, exit code {self.process.wait()}")
        return list(json.loads(line))

    def close(self) -> dict[str, Any]:
        """Stop the process; the counters of its engine, if it has one."""
        out, _ = self.process.communicate("stats\n")
        return dict(json.loads(out))


def worker(job: dict[str, Any]) -> None:
    import pydoc_data.topics
    from importlib import import_module

    stock, kv = job["policy"] == "stock", {}
    if not stock and job["policy"]:
        kv = {"kv_policy": job["policy"], "kv_budget": job["budget"]}
    library: Any = import_module("llama_cpp" if stock else "pyinertia")
    n, threads = job["n_ctx"], job["threads"]
    llm = library.Llama(
        job["model"],
        n_ctx=n,
        n_batch=N_BATCH,
        n_threads=threads,
        n_threads_batch=threads,
        flash_attn=job["flash_attn"],
        verbose=False,
        **kv,
    )
    parent: Any = import_module("llama_cpp").Llama
    text = "\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = llm.tokenize(text.encode()[: 8 * n])[:n]
    assert len(ids) == n, "the text is too short for this context"
    llm.eval(ids[:N_BATCH])  # warm up
    llm.reset()
    at = 0

    def evaluate(tokens: list[int]) -> float:
        start = time.perf_counter()
        if not stock:  # the batches are one prompt; our eval would take each for a prompt
            library._native.prompt(llm.ctx, 0, max(0, job["n_prompt"] - llm.n_tokens))
        parent.eval(llm, tokens)
        llm._ctx.get_logits()  # waits for the result
        return 1e3 * (time.perf_counter() - start)

    for line in sys.stdin:
        if line == "stats\n":
            stats = llm.kv_stats() if hasattr(llm, "kv_stats") else None
            print(json.dumps(asdict(stats) if stats else {}), flush=True)
            return
        n = int(line)
        parts = [ids[at : at - n]] if n < 0 else [[token] for token in ids[at : at + n]]
        at += abs(n)
        print(json.dumps([evaluate(part) for part in parts]), flush=True)


def measure(sides: list[Side], n_prompt: int, n_tokens: int, n_block: int) -> None:
    for start in range(0, n_prompt, N_BATCH):
        for side in turns(sides, start // N_BATCH):
            if start < side.n_prompt:
                side.prefill += side.ask(-min(N_BATCH, side.n_prompt - start))
        progress("prefill", min(start + N_BATCH, n_prompt), n_prompt)
    for side in sides:
        side.settle = side.ask(N_SETTLE)
    n_turns = (n_tokens - N_SETTLE) // n_block
    for i in range(n_turns):
        for side in turns(sides, i):
            side.blocks.append(side.ask(n_block))
        progress("decode", i + 1, n_turns)


def turns(sides: list[Side], i: int) -> list[Side]:
    return sides[i % len(sides) :] + sides[: i % len(sides)]


def progress(what: str, done: int, total: int) -> None:
    if sys.stderr.isatty():
        end = "\n" if done == total else ""
        print(f"\r{what} {done}/{total}", end=end, file=sys.stderr, flush=True)


def faster(side: Side, rival: Side) -> float:
    """How many times as fast as the rival the side decodes."""
    pairs = zip(side.blocks, rival.blocks, strict=True)
    return median(median(theirs) / median(ours) for ours, theirs in pairs)


def results(sides: list[Side]) -> dict[str, dict[str, float | None]]:
    by_name = {side.name: side for side in sides}
    stock, free = by_name[STOCK], by_name.get("score-free")
    out = {}
    for side in sides:
        ms, stats = median(t for block in side.blocks for t in block), side.close()
        out[side.name] = {
            "ms/token": ms,
            "x stock": faster(side, stock),
            "x context": faster(side, by_name[STOCK_SHORT]),
            "x score-free": faster(side, free) if free else None,
            "prefill t/s": 1e3 * side.n_prompt / sum(side.prefill),
            "x stock prefill": (
                median(map(truediv, stock.prefill, side.prefill))
                if side.n_prompt == stock.n_prompt
                else None
            ),
            # what the step with the cut takes beyond an ordinary one
            "cut ms": side.settle[1] - ms if stats.get("n_evicted") else None,
        }
    return out


def show(values: dict[str, dict[str, float | None]]) -> None:
    forms = {"prefill t/s": ".0f", "cut ms": ".1f", "x stock prefill": ".3f"}
    head = ["", *next(iter(values.values()))]
    rows = [head] + [
        [name, *("-" if v is None else format(v, forms.get(key, ".2f")) for key, v in row.items())]
        for name, row in values.items()
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for name, *cells in rows:
        cells = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        print("| " + " | ".join([name.ljust(widths[0]), *cells]) + " |")


def machine() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        worker(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number: dict[str, Any] = {"type": int, "metavar": "N"}
    parser.add_argument("--model", type=Path, help="GGUF (default: SmolLM2-135M-Instruct Q4_1)")
    parser.add_argument("--prompt", default=8000, help="prompt tokens", **number)
    parser.add_argument("--budget", default=512, help="n_budget", **number)
    parser.add_argument("--tokens", default=128, help="tokens to decode", **number)
    parser.add_argument("--block", default=4, help="tokens per turn", **number)
    parser.add_argument("--threads", default=2, **number)
    parser.add_argument("--policies", nargs="*", default=POLICIES, metavar="NAME")
    parser.add_argument("--no-flash-attn", dest="flash_attn", action="store_false")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    options = parser.parse_args()
    if options.tokens >= options.budget:
        parser.error(f"--tokens {options.tokens} must be below --budget {options.budget}")
    bootstrap.enter()
    ours, stock = bootstrap.build_libs(), bootstrap.build_stock_libs()
    model = options.model or bootstrap.smollm2()

    common = {
        "model": str(model),
        "n_ctx": options.prompt + options.tokens,
        "n_prompt": options.prompt,
        "budget": options.budget,
        "threads": options.threads,
        "flash_attn": options.flash_attn,
    }
    n_short = options.budget - options.tokens  # its context ends at the budget
    sides = [
        Side(STOCK, stock, common | {"policy": "stock"}),
        Side(STOCK_SHORT, stock, common | {"policy": "stock", "n_prompt": n_short}),
        Side(NONE, ours, common | {"policy": None}),
        *(Side(name, ours, common | {"policy": name}) for name in options.policies),
    ]
    measure(sides, options.prompt, options.tokens, options.block)
    values = results(sides)
    show(values)
    attention = "on" if options.flash_attn else "off"
    print(
        f"\n{model.name}, prompt {options.prompt}, budget {options.budget}, "
        f"{options.tokens} tokens, f16 KV, flash attention {attention}, "
        f"{options.threads} threads of {machine()}"
    )
    if options.json:
        options.json.write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
