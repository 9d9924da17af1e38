"""Summarise a long text in a bounded KV cache, and show what was kept of it.

python scripts/demo.py                         on a fresh machine: builds first, minutes
python scripts/demo.py --budget 1024 --policy inertiakv-lazy
python scripts/demo.py --text book.txt --model other.gguf
"""

from __future__ import annotations

import argparse
import math
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import bootstrap

if TYPE_CHECKING:
    from pyinertia import Llama

N_TOKENS = 4500  # of the default text
N_SUMMARY = 120
COLUMNS = 72
SYSTEM = "You are a helpful assistant. You summarise texts in a few plain sentences."
ASK = "Summarise the following text about the Python language.\n\n{text}\n\nWrite a short summary."


def default_text() -> str:
    """The language reference that every Python installation carries for help()."""
    import pydoc_data.topics

    topics = pydoc_data.topics.topics
    names = ["execmodel", "naming", "classes", "exceptions", "objects", "types"]
    return "\n".join(topics[name] for name in names if name in topics)


def chat(llm: Llama, text: str, n_most: int) -> tuple[list[dict[str, str]], int]:
    """A chat about the first n_most tokens of the text, and how many there are."""
    tokens = llm.tokenize(text.encode(), add_bos=False)[:n_most]
    ask = ASK.format(text=llm.detokenize(tokens).decode(errors="ignore"))
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}], len(tokens)


def watch(llm: Llama, n: int, label: str, done: threading.Event) -> None:
    """Show how many of n tokens have been read, until done."""
    while not done.wait(0.2) and sys.stdout.isatty():
        bar(label, min(llm.n_tokens, n), n, "")
    bar(label, n, n, "\n")


def bar(label: str, n_read: int, n: int, end: str) -> None:
    filled = 40 * n_read // n
    line = f"{label}: reading [{'#' * filled:40}] {n_read}/{n} tokens"
    print(f"\r{line}", end=end, flush=True)


def summarise(
    llm: Llama, messages: list[dict[str, str]], n: int, label: str
) -> tuple[str, float, float]:
    """The summary, and tokens per second of reading and of writing; n tokens are expected."""
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(llm, n, label, done))
    watcher.start()
    summary, start = "", time.perf_counter()
    try:
        stream = llm.create_chat_completion(
            messages, stream=True, max_tokens=N_SUMMARY, temperature=0.0, repeat_penalty=1.15
        )
        for chunk in stream:
            if not done.is_set():
                n_read, first = llm.n_tokens, time.perf_counter()
                done.set()
                watcher.join()
            summary += chunk["choices"][0]["delta"].get("content", "")
    finally:
        done.set()
    end = time.perf_counter()
    return summary.strip(), n_read / (first - start), (llm.n_tokens - n_read) / (end - first)


def picture(kept: set[int], n: int) -> str:
    """One character per run of positions, darker where more of it was kept."""
    shades = " .:*#"
    if (sys.stdout.encoding or "").lower().startswith("utf"):
        shades = " \u2591\u2592\u2593\u2588"
    n_run = max(1, -(-n // (6 * COLUMNS)))
    cells = ""
    for i in range(0, n, n_run):
        run = range(i, min(n, i + n_run))
        share = sum(pos in kept for pos in run) / len(run)
        cells += shades[math.ceil(share * (len(shades) - 1))]
    rows = [cells[i : i + COLUMNS].ljust(COLUMNS) for i in range(0, len(cells), COLUMNS)]
    frame = "+" + "-" * COLUMNS + "+"
    legend = f"{n_run} tokens a character, kept: none [{shades[0]}] ... all [{shades[-1]}]"
    return "\n".join([frame, *(f"|{row}|" for row in rows), frame, legend])


def passages(llm: Llama, ids: list[int], kept: set[int], n: int = 4) -> list[str]:
    """The longest runs of text that were kept whole."""
    runs, run = [], []
    for pos in range(len(ids)):
        if pos in kept:
            run.append(pos)
        elif run:
            runs.append(run)
            run = []
    out = []
    for run in sorted(sorted(runs, key=len, reverse=True)[:n]):
        text = llm.detokenize([ids[pos] for pos in run]).decode(errors="ignore")
        out.append(f"{run[0]}: {' '.join(text.split())}")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF (default: SmolLM2-135M-Instruct Q4_1)")
    parser.add_argument("--text", type=Path, help="text file (default: Python's own reference)")
    parser.add_argument("--policy", default="inertiakv", metavar="NAME")
    parser.add_argument("--budget", type=int, default=512, metavar="N", help="KV cells to keep")
    parser.add_argument("--tokens", type=int, default=N_TOKENS, metavar="N", help="of the text")
    options = parser.parse_args()
    bootstrap.enter()
    bootstrap.build_libs()
    model = options.model or bootstrap.smollm2()

    from pyinertia import Llama, PyInertiaError, resolve_policy

    try:
        resolve_policy(options.policy, options.budget)
    except (PyInertiaError, ValueError) as error:
        parser.error(str(error))
    text = options.text.read_text(encoding="utf-8") if options.text else default_text()
    common = {"n_ctx": options.tokens + N_SUMMARY + 256, "flash_attn": True, "verbose": False}

    full = Llama(model, **common)
    messages, n = chat(full, text, options.tokens)
    print(f"\n{model.name} reads {n} tokens; the answer is written twice.\n")
    _, full_prefill, full_decode = summarise(full, messages, n, "full cache")
    full_stats = full.kv_stats()
    full.close()

    llm = Llama(model, kv_policy=options.policy, kv_budget=options.budget, **common)
    label = f"budget {options.budget}"
    summary, prefill, decode = summarise(llm, messages, n, label)
    ids = llm.input_ids[: llm.n_tokens].tolist()
    stats, kept = llm.kv_stats(), set(llm.kv_cells()["pos"].tolist())

    print(f"\nSummary, written from {stats.n_used} of {stats.n_tokens} cells ({options.policy}):\n")
    print(textwrap.fill(" ".join(summary.split()), COLUMNS + 2))
    bytes_per_cell = stats.kv_bytes / stats.n_cells / 2**20
    print(f"\n{'':16}{'reading t/s':>12}{'writing t/s':>12}{'KV cells':>10}{'MiB in use':>12}")
    for label, t_read, t_write, n_used in [
        ("full cache", full_prefill, full_decode, full_stats.n_used),
        (options.policy, prefill, decode, stats.n_used),
    ]:
        size = n_used * bytes_per_cell
        print(f"{label:16}{t_read:12.0f}{t_write:12.1f}{n_used:10}{size:12.1f}")
    print(f"\nwriting is {decode / full_decode:.1f} times as fast\n")
    print("What is left of the text, first token top left:\n")
    print(picture(kept, len(ids)))
    print("\nLongest passages that were kept whole (position: text):\n")
    for line in passages(llm, ids, kept):
        print(textwrap.shorten(line, 2 * COLUMNS, placeholder=" ..."))


if __name__ == "__main__":
    main()
