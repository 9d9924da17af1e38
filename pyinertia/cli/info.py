"""`pyinertia info`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from pyinertia.cli.options import ContextOptions, KVOptions, ModelOptions, SamplingOptions
from pyinertia.errors import CommandError

HELP = (
    "Show what a model is, whether the policy covers it, and what its cache costs: in full at -c, "
    "and with the policy. Nothing is computed."
)


@dataclass(frozen=True, kw_only=True)
class Info:
    """What there is to know of a model and its cache; bytes are those of K and V.

    Attributes:
        refusal: Why the policy cannot run on the model, "" if it can.
        n_ctx: Positions that the full cache is for.
        n_window: Positions that the layers with a sliding window see, 0 without such layers.
        n_cells: Cells of the policy's cache, the batch of a bounded prefill included.
        bytes_per_token: That a token adds to the full cache, beyond the window.
        bytes_full: Of the full cache at n_ctx. None where the engine cannot tell.
        bytes_policy: That are allocated under the policy. None where it cannot run.
        bytes_kept: Of n_budget cells, which is what stays of a long prompt.
    """

    file: str
    name: str
    architecture: str
    description: str
    n_params: int
    n_bytes: int
    n_ctx_train: int
    n_layer: int
    n_embd: int
    n_head: int
    n_head_kv: int
    n_window: int
    chat_template: bool
    kv_policy: str
    kv_budget: int | float
    kv_prefill: str
    refusal: str
    n_ctx: int
    cache_type_k: str
    cache_type_v: str
    n_cells: int | None
    bytes_per_token: int | None
    bytes_full: int | None
    bytes_policy: int | None
    bytes_kept: int | None


def main(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="MODEL", help="GGUF model, as with -m.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON, sizes in bytes.", rich_help_panel="Help")
    ] = False,
    *,
    model: ModelOptions,
    context: ContextOptions,
    kv: KVOptions,
) -> None:
    """Look, and show it."""
    if file is not None:
        if model.model is not None:
            msg = "two models, as an argument and as -m; leave one out"
            raise CommandError(msg)
        model = replace(model, model=file)
    found = look(model, context, kv)
    if as_json:
        sys.stdout.write(json.dumps(asdict(found), indent=1) + "\n")
        return
    for what, value in _rows(found):
        sys.stdout.write(f"{what:<21}{value}\n")


def look(model: ModelOptions, context: ContextOptions, kv: KVOptions) -> Info:
    """Load a model, try the policy on it and measure its cache.

    Raises:
        CommandError: Options do not go together.
        PyInertiaError: The model cannot be read.
    """
    import llama_cpp

    from pyinertia.cli.cache_size import CELL_PAD, CacheSize
    from pyinertia.cli.models import model_path, open_model

    policy = kv.policy()
    path = model_path(model)
    small = replace(context, ctx_size=max(CELL_PAD, context.batch_size))
    plain = open_model(model, small, KVOptions(kv_policy="full"), SamplingOptions())
    try:
        native, metadata = plain._model.model, plain.metadata
        n_ctx = context.ctx_size or plain._model.n_ctx_train()
        measured = CacheSize(plain, n_ctx)
        facts: dict[str, Any] = {
            "name": metadata.get("general.name", path.stem),
            "architecture": metadata.get("general.architecture", "unknown"),
            "description": plain._model.desc(),
            "n_params": llama_cpp.llama_model_n_params(native),
            "n_bytes": llama_cpp.llama_model_size(native),
            "n_ctx_train": plain._model.n_ctx_train(),
            "n_layer": llama_cpp.llama_model_n_layer(native),
            "n_embd": llama_cpp.llama_model_n_embd(native),
            "n_head": llama_cpp.llama_model_n_head(native),
            "n_head_kv": llama_cpp.llama_model_n_head_kv(native),
            "n_window": llama_cpp.llama_model_n_swa(native),
            "chat_template": "tokenizer.chat_template" in metadata,
        }
        refusal = measured.refusal(policy)
        n_cells = measured.n_cells(policy) if not refusal else None
        return Info(
            file=str(path),
            **facts,
            kv_policy=kv.kv_policy,
            kv_budget=policy.n_budget,
            kv_prefill=policy.prefill,
            refusal=refusal,
            n_ctx=n_ctx,
            cache_type_k=context.cache_type_k,
            cache_type_v=context.cache_type_v,
            n_cells=n_cells,
            bytes_per_token=measured.bytes_per_token,
            bytes_full=measured.n_bytes(n_ctx),
            bytes_policy=measured.n_bytes(n_cells) if n_cells else None,
            bytes_kept=(
                measured.n_bytes(min(policy.n_budget, n_ctx))
                if policy.evicts and n_cells and not isinstance(policy.n_budget, float)
                else None
            ),
        )
    finally:
        plain.close()


def _rows(info: Info) -> list[tuple[str, str]]:
    heads = f"{info.n_head} heads, {info.n_head_kv} of K and V"
    rows = [
        ("model", info.name),
        ("architecture", info.architecture),
        ("kind", info.description),
        ("parameters", f"{info.n_params:,}, {_size(info.n_bytes)}"),
        ("trained context", f"{info.n_ctx_train:,} positions"),
        ("layers", f"{info.n_layer} of {info.n_embd:,} wide, {heads}"),
    ]
    if info.n_window:
        rows.append(("sliding window", f"{info.n_window:,} positions in some of the layers"))
    rows.append(("chat template", "yes" if info.chat_template else "no, chat would use ChatML"))
    policy = f"{info.kv_policy}, budget {info.kv_budget}, prefill {info.kv_prefill}"
    if info.kv_policy == "full":
        rows.append(("policy", "full: nothing is dropped"))
    elif info.refusal:
        rows.append(("policy", f"{policy}: cannot run on this model: {info.refusal}"))
    else:
        rows.append(("policy", f"{policy}: runs on this model"))
    if info.bytes_per_token is None or info.bytes_full is None:
        return rows
    types = f"{info.cache_type_k} and {info.cache_type_v}"
    rows += [
        ("KV per token", f"{_size(info.bytes_per_token)}, K and V of {types}"),
        ("full cache", f"{_size(info.bytes_full)} for {info.n_ctx:,} positions"),
    ]
    if info.bytes_policy and info.n_cells and info.kv_policy != "full":
        saved = 1 - info.bytes_policy / info.bytes_full
        what = f"saves {saved:.0%}" if saved > 0 else "saves nothing"
        rows.append(
            ("with the policy", f"{_size(info.bytes_policy)} for {info.n_cells:,} cells: {what}")
        )
        if info.bytes_kept and info.kv_prefill == "full":
            rows.append(
                ("after the first cut", f"{_size(info.bytes_kept)} for {info.kv_budget:,} cells")
            )
    return rows


def _size(n_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n_bytes < 1024:
            return f"{n_bytes:,.4g} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:,.4g} GiB"
