"""A plugin of `llm`: `llm pyinertia add NAME model.gguf`, and NAME is one of its models.

The models are listed in pyinertia.json in llm's folder. One is loaded with its first prompt and
stays, so the turns of `llm chat` are appended to its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import llm
from pydantic import Field, ValidationError

if TYPE_CHECKING:  # llm starts sooner without it, and its other models need no library of ours
    from pyinertia.integrations.llm_llama import PromptedLlama


class Options(llm.Options):
    """What `llm -o` takes; the defaults are those of `pyinertia run`."""

    kv_policy: str = Field(default="inertiakv", description="What stays; full keeps everything.")
    kv_budget: int | float | None = Field(default=None, description="Most cells that stay.")
    kv_refresh: int | None = Field(default=None, description="Decode steps between scored ones.")
    kv_prefill: Literal["full", "bounded"] | None = Field(
        default=None, description="bounded: a long prompt is cut while it is read."
    )
    kv_positions: Literal["keep", "compact"] | None = Field(
        default=None, description="compact: go on when all positions are used up, where it can."
    )
    n_ctx: int = Field(default=0, ge=0, description="Positions, 0 for all the model knows.")
    n_batch: int = Field(default=512, ge=1, description="Tokens of a prompt that enter at once.")
    n_threads: int | None = Field(default=None, ge=1, description="CPU threads.")
    n_gpu_layers: int = Field(default=0, ge=-1, description="Layers on the GPU, -1 for all.")
    flash_attn: bool = Field(default=True, description="Flash attention.")
    max_tokens: int | None = Field(default=None, ge=1, description="Most tokens of an answer.")
    temperature: float = Field(default=0.8, ge=0, description="0 takes the likeliest token.")
    top_k: int = Field(default=40, ge=0, description="Only the k likeliest, 0 is off.")
    top_p: float = Field(default=0.95, ge=0, le=1, description="Only the likeliest of this share.")
    min_p: float = Field(default=0.05, ge=0, le=1, description="Only what has this share of them.")
    repeat_penalty: float = Field(default=1.0, ge=0, description="Above 1 says less again.")
    seed: int | None = Field(default=None, ge=0, description="Seed of this answer.")


OF_ANSWER = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"}


class Model(llm.Model):
    """A GGUF file, as `llm` sees it."""

    can_stream = True
    supports_schema = True
    Options = Options

    def __init__(self, name: str, path: str, options: dict[str, Any]) -> None:
        """Load nothing yet; `options` are the defaults of this model."""
        self.model_id, self._path, self._defaults = name, path, options
        self._llama: PromptedLlama | None = None
        self._loaded: dict[str, Any] = {}

    def execute(
        self,
        prompt: llm.Prompt,
        stream: bool,
        response: llm.Response,
        conversation: llm.Conversation | None,
    ) -> Iterator[str]:
        """Answer a prompt, after the turns before it."""
        given = prompt.options.model_dump(exclude_unset=True)
        options = Options(**{**self._defaults, **given}).model_dump()
        llama = self._model({name: options[name] for name in options.keys() - OF_ANSWER})
        settings = {name: options[name] for name in OF_ANSWER}
        if prompt.schema:
            settings["response_format"] = {"type": "json_object", "schema": prompt.schema}
        with closing(llama.answer([*map(_spoken, prompt.messages)], **settings)) as pieces:
            yield from pieces
        response.set_usage(
            input=llama.n_prompt, output=llama.n_answer, details=llama.kept_and_evicted()
        )

    def _model(self, keywords: dict[str, Any]) -> PromptedLlama:
        from pyinertia.integrations.llm_llama import load

        if self._llama is not None and keywords == self._loaded:
            return self._llama
        if self._llama is not None:
            self._llama.close()
            self._llama = None
        self._llama, self._loaded = load(self._path, keywords), keywords
        return self._llama


def _spoken(message: Any) -> dict[str, str]:
    if message.role == "tool" or not all(hasattr(part, "text") for part in message.parts):
        msg = "this model reads text only: no attachments, no tools"
        raise ValueError(msg)
    return {"role": message.role, "content": "".join(part.text for part in message.parts)}


# what is known, and the commands that change it


def _known() -> dict[str, dict[str, Any]]:
    path = _list()
    try:
        known: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        msg = f"{path} is damaged ({error}); mend it, or delete it and add the models again"
        raise click.ClickException(msg) from error
    return known


def _list() -> Path:
    return Path(llm.user_dir()) / "pyinertia.json"


def _keep(known: dict[str, dict[str, Any]]) -> None:
    from pyinertia.cli.whole import write_whole

    write_whole(_list(), [json.dumps(known, indent=1).encode() + b"\n"])


@llm.hookimpl
def register_models(register: Callable[..., None]) -> None:
    """Tell llm which models there are."""
    try:
        known = _known()
    except click.ClickException as error:  # the models of others are there all the same
        click.echo(f"pyinertia: {error.message}", err=True)
        return
    for name, one in known.items():
        register(Model(name, one["path"], one["options"]), aliases=one["aliases"])


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add `llm pyinertia`."""

    @cli.group()
    def pyinertia() -> None:
        """GGUF models whose KV cache keeps what attention still needs."""

    @pyinertia.command()
    @click.argument("name")
    @click.argument("path", type=click.Path(exists=True, dir_okay=False, resolve_path=True))
    @click.option("aliases", "-a", "--alias", multiple=True, help="Another name for it.")
    @click.option(
        "options",
        "-o",
        "--option",
        nargs=2,
        multiple=True,
        metavar="KEY VALUE",
        help="A default of this model, as kv_budget 2048.",
    )
    def add(
        name: str, path: str, aliases: Sequence[str], options: Sequence[tuple[str, str]]
    ) -> None:
        """Make a model of a GGUF file, or change it."""
        try:
            checked = Options(**dict(options))
        except ValidationError as error:
            first = error.errors()[0]
            key = first["loc"][0]
            msg = f"-o {key}: {first['msg']}; `llm models --options` lists what there is"
            raise click.ClickException(msg) from error
        kept = checked.model_dump(exclude_unset=True)
        _keep({**_known(), name: {"path": path, "aliases": [*aliases], "options": kept}})

    @pyinertia.command()
    @click.argument("name")
    def remove(name: str) -> None:
        """Forget a model; its file stays."""
        known = _known()
        if known.pop(name, None) is None:
            msg = f"there is no {name!r}; there is {', '.join(known) or 'none'}"
            raise click.ClickException(msg)
        _keep(known)

    @pyinertia.command("list")
    def show() -> None:
        """List the models and their defaults."""
        for name, one in _known().items():
            settings = " ".join(f"{key}={value}" for key, value in one["options"].items())
            click.echo(f"{name}: {one['path']} {settings}".rstrip())
