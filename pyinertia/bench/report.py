"""Tables for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MIB = 2**20
WIDE = 240  # characters that hold all columns
Columns = dict[str, tuple[str, Callable[[float], str]]]

# metric -> head and format; a cell is the median over repeats, and least to most if they differ
DECODE: Columns = {
    "decode_ms": ("decode\nms/token", "{:.2f}".format),
    "decode_per_second": ("decode\ntokens/s", "{:.1f}".format),
    "x_stock": ("x stock", "{:.2f}".format),
    "x_stock_at_budget": ("x stock at\nthe budget", "{:.2f}".format),
    "bandwidth_share": ("of peak\nread", "{:.0%}".format),
}
PROMPT: Columns = {
    "prefill_per_second": ("prefill\ntokens/s", "{:.0f}".format),
    "x_stock_prefill": ("prefill\nx stock", "{:.2f}".format),
    "first_token_s": ("first\ntoken, s", "{:.2f}".format),
    "cut_ms": ("first cut\nms", "{:.1f}".format),
}
MEMORY: Columns = {
    "rss_peak": ("peak RSS\nMiB", lambda x: f"{x / MIB:.0f}"),
    "kv_bytes": ("KV\nMiB", lambda x: f"{x / MIB:.1f}"),
    "kv_bytes_resident": ("KV resident\nMiB", lambda x: f"{x / MIB:.1f}"),
    "kv_bytes_used": ("KV used\nMiB", lambda x: f"{x / MIB:.1f}"),
}

LEGEND = """\
A cell is the median over the repeats, with the least and the most in brackets.
decode       a turn of the sides is {n_block} tokens that count after one that does not; mean of a
             turn, median over turns
x stock      how many times as fast as stock in the same turns; stock at the budget is stock with
             a context of that many cells, the limit for any budget of that size
of peak read the time that the weights and the used KV cells, which a step must read, take at the
             {bandwidth} GB/s that numpy reads with as many threads, over the step's own time
first token  from the start of the prompt to the logits behind it, without the first cut
first cut    what its step takes beyond an ordinary one: readback, choice, compaction
peak RSS     of the side's process; the pages of the model file and Python are in it
KV           bytes of K and V that are allocated; resident: in physical memory at the end, where
             our engine knows; used: of the cells in use at the end
openvino     the same file, prompt and KV type (q8_0 is its u8); it decodes its own greedy tokens"""


DOCUMENTS_LEGEND = """\
at a time    documents that share a context; the sides took turns of a few documents
decode       tokens a second of the calls that decode, sampling included, of all that decode
prefill      tokens of prompts a second of the calls that evaluate them; the instruction, which all
             documents share, is not evaluated again
peak RSS     of the side's process; the pages of the model file and Python are in it
KV           bytes of K and V that are allocated"""


def show(console: Console, results: dict[str, Any]) -> None:
    """Print the tables of a benchmark, and what their numbers are."""
    if "windows" in results:
        _show_steady(console, results)
    elif "rows" in results:
        _show_documents(console, results)
    else:
        _show_groups(console, results)


def _show_groups(console: Console, results: dict[str, Any]) -> None:
    settings = results["settings"]
    for group in results["groups"]:
        attention = "on" if settings["flash_attn"] else "off"
        console.print(
            f"{Path(settings['model']).name}, prompt {group['n_prompt']}, "
            f"KV {group['type_k']}/{group['type_v']}, flash attention {attention}, "
            f"{group['n_threads']} threads of {results['machine']['cpu']}",
            style="bold",
            highlight=False,
        )
        wide = console.width >= WIDE
        for columns in [DECODE | PROMPT | MEMORY] if wide else [DECODE, PROMPT, MEMORY]:
            console.print(_table(console, group["sides"], columns))
    bandwidth = ", ".join(f"{value / 1e9:.1f}" for value in results["read_bandwidth"].values())
    console.print(
        LEGEND.format(n_block=settings["n_block"], bandwidth=bandwidth or "-"),
        highlight=False,
        style="dim",
    )


def _table(console: Console, sides: list[dict[str, Any]], columns: Columns) -> Table:
    heads = ["side", "budget", *(head for head, _ in columns.values())]
    # the reasons stand once, beside the columns that need least
    any_failed = "rss_peak" in columns and any(side["failed"] for side in sides)
    heads += ["failed"] if any_failed else []
    table = _empty(console, heads)
    for side in sides:
        cells = [_cell(side["summary"].get(name), form) for name, (_, form) in columns.items()]
        # file names without their folders; the JSON file has all of it
        cells += [escape(re.sub(r"/\S+/", "", side["failed"]))] if any_failed else []
        table.add_row(side["name"], str(side["budget"] or "-"), *cells)
    return table


def _show_documents(console: Console, results: dict[str, Any]) -> None:
    settings, rows = results["settings"], results["rows"]
    console.print(
        f"{Path(settings['model']).name}, {settings['documents']} documents, answers of "
        f"{settings['n_tokens']} tokens, budget {settings['budgets'][0]}, KV "
        f"{settings['types_k'][0]}, {settings['threads'][0]} threads of "
        f"{results['machine']['cpu']}",
        style="bold",
        highlight=False,
    )
    heads = ["side", "at a\ntime", "done", "documents\nan hour", "x full\ncache"]
    heads += ["decode\ntokens/s", "x full\ncache", "prefill\ntokens/s", "KV\nMiB"]
    heads += ["peak RSS\nMiB", *(["failed"] if any(row["failed"] for row in rows) else [])]
    table = _empty(console, heads)
    full: dict[str, Any] = next((row for row in rows if row["name"] == "full cache"), {})
    rates: dict[str, tuple[str, str]] = {
        "documents": ("n_documents", "seconds"),
        "decode": ("n_decode", "t_decode"),
        "prefill": ("n_prompt", "t_prompt"),
    }
    for row in rows:
        rate = {name: _rate(row, *keys) for name, keys in rates.items()}
        cells = [row["name"], str(row["n_parallel"]), str(row["n_documents"])]
        for name, form in (("documents", "{:.0f}"), ("decode", "{:.1f}")):
            value, unit = rate[name], 3600 if name == "documents" else 1
            ratio = value / of_full if (of_full := _rate(full, *rates[name])) else 0.0
            cells += [form.format(unit * value) if value else "-", f"{ratio:.2f}" if ratio else "-"]
        cells += [f"{rate['prefill']:.0f}" if rate["prefill"] else "-"]
        cells += [
            f"{row[name] / MIB:.0f}" if name in row else "-" for name in ("kv_bytes", "rss_peak")
        ]
        table.add_row(*cells, *([escape(row["failed"])] if "failed" in heads else []))
    console.print(table)
    console.print(DOCUMENTS_LEGEND, highlight=False, style="dim")


def _rate(row: dict[str, Any], count: str, seconds: str) -> float:
    return row[count] / row[seconds] if row.get(seconds) else 0.0


def _show_steady(console: Console, results: dict[str, Any]) -> None:
    settings = results["settings"]
    console.print(
        f"{Path(settings['model']).name}, {settings['policies'][0]}, "
        f"prompt {settings['prompts'][0]}, budget {settings['budgets'][0]}, "
        f"KV {settings['types_k'][0]}, {settings['threads'][0]} threads of "
        f"{results['machine']['cpu']}",
        style="bold",
        highlight=False,
    )
    heads = ["tokens\nup to", "mean\nms/token", "median\nms/token", "longest\nms", "RSS\nMiB"]
    heads += ["cells\nin use", "evicted\na token", "moved\na token", "graphs reused\na token"]
    table = _empty(console, heads)
    for window in results["windows"]:
        times = (f"{window[name]:.2f}" for name in ("mean_ms", "median_ms", "max_ms"))
        rss = f"{window['rss'] / MIB:.1f}" if window["rss"] else "-"
        counters = (f"{window[name]:.3f}" for name in ("n_evicted", "n_moved", "n_reused"))
        table.add_row(f"{window['n_tokens']}", *times, rss, f"{window['n_used']}", *counters)
    console.print(table)


def _empty(console: Console, heads: list[str]) -> Table:
    """A table to be filled; in a pipe it is Markdown."""
    terminal = console.is_terminal
    table = Table(box=box.ROUNDED if terminal else box.MARKDOWN)
    for head in heads:
        table.add_column(
            head if terminal else head.replace("\n", " "),
            justify="left" if head in ("side", "failed") else "right",
            overflow="fold",
        )
    return table


def _cell(cell: dict[str, float] | None, form: Callable[[float], str]) -> str:
    if cell is None:
        return "-"
    middle, least, most = (form(cell[name]) for name in ("median", "min", "max"))
    return middle if least == most else f"{middle} ({least} - {most})"  # may wrap
