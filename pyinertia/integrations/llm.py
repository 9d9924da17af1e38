"""A plugin of `llm`: `llm pyinertia add NAME model.gguf`, and NAME is one of its models.

The models are listed in pyinertia.json in llm's folder; their aliases and default options are llm's
own business. One is loaded with its first prompt and stays, so the turns of `llm chat` are appended
to its cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import llm
from pydantic import Field

if TYPE_CHECKING:  # llm starts sooner without it, and its other models need no library of ours
    from pyinertia.integrations.llm_llama import PromptedLlama


class Options(llm.Options):
    """What `llm -o` takes. None is the default of `pyinertia run`, as llm passes on all others."""

    kv_policy: str | None = Field(None, description="What stays, inertiakv; full keeps all.")
    kv_budget: int | float | None = Field(None, description="Most cells that stay, 1024.")
    kv_refresh: int | None = Field(None, ge=1, description="Decode steps between scored ones.")
    kv_prefill: Literal["full", "bounded"] | None = Field(
        None, description="bounded (the default): a long prompt is cut while it is read."
    )
    kv_positions: Literal["keep", "compact"] | None = Field(
        None, description="compact (the default where it can): go on when all are used up."
    )
    n_ctx: int | None = Field(None, ge=0, description="Positions, 0 for all that the model knows.")
    n_batch: int | None = Field(None, ge=1, description="Tokens of a prompt that enter at once.")
    n_threads: int | None = Field(None, ge=1, description="CPU threads, as many as CPUs.")
    n_gpu_layers: int | None = Field(None, ge=-1, description="Layers on the GPU, -1 for all.")
    flash_attn: bool | None = Field(None, description="Flash attention, on.")
    max_tokens: int | None = Field(None, ge=1, description="Most tokens of an answer.")
    temperature: float | None = Field(None, ge=0, description="0.8; 0 takes the likeliest token.")
    top_k: int | None = Field(None, ge=0, description="Only the 40 likeliest, 0 is off.")
    top_p: float | None = Field(None, ge=0, le=1, description="Only the likeliest with 0.95.")
    min_p: float | None = Field(None, ge=0, le=1, description="Only those with 0.05 of the best.")
    repeat_penalty: float | None = Field(None, ge=0, description="1 is off, above says less again.")
    seed: int | None = Field(None, ge=0, description="Seed of the answer.")


OF_ANSWER = {"max_tokens", "temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed"}


class Model(llm.Model):
    """A GGUF file, as `llm` sees it."""

    can_stream = True
    supports_schema = True
    Options = Options

    def __init__(self, name: str, path: str) -> None:
        """Load nothing yet."""
        self.model_id, self._path = name, path
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
        given = prompt.options.model_dump(exclude_none=True)
        llama = self._model({name: given[name] for name in given.keys() - OF_ANSWER})
        settings = {name: given[name] for name in given.keys() & OF_ANSWER}
        if prompt.schema:
            settings["response_format"] = {"type": "json_object", "schema": prompt.schema}
        with closing(llama.answer([*map(_spoken, prompt.messages)], **settings)) as pieces:
            yield from pieces
        response.set_usage(
            input=llama.n_prompt, output=llama.n_answer, details=llama.kept_and_evicted()
        )

    def _model(self, options: dict[str, Any]) -> PromptedLlama:
        from pyinertia.integrations.llm_llama import load

        if self._llama is not None and options == self._loaded:
            return self._llama
        if self._llama is not None:
            self._llama.close()
            self._llama = None
        self._llama, self._loaded = load(self._path, **options), options
        return self._llama


def _spoken(message: Any) -> dict[str, str]:
    if message.role == "tool" or not all(hasattr(part, "text") for part in message.parts):
        msg = "this model reads text only: no attachments, no tools"
        raise ValueError(msg)
    return {"role": message.role, "content": "".join(part.text for part in message.parts)}


# what is known, name -> path, and the commands that change it


def _list() -> Path:
    return Path(llm.user_dir()) / "pyinertia.json"


def _known() -> dict[str, str]:
    try:
        known: dict[str, str] = json.loads(_list().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        msg = f"{_list()} is damaged ({error}); mend it, or delete it and add the models again"
        raise click.ClickException(msg) from error
    return known


def _keep(known: dict[str, str]) -> None:
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
    for name, path in known.items():
        register(Model(name, path))


@llm.hookimpl
def register_commands(cli: click.Group) -> None:
    """Add `llm pyinertia`."""

    @cli.group()
    def pyinertia() -> None:
        """GGUF models whose KV cache keeps what attention still needs."""

    @pyinertia.command()
    @click.argument("name")
    @click.argument("path", type=click.Path(exists=True, dir_okay=False))
    def add(name: str, path: str) -> None:
        """Make a model of a GGUF file; `llm models options set` sets its defaults."""
        _keep({**_known(), name: str(Path(path).absolute())})

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
        """List the models and their files."""
        for name, path in _known().items():
            click.echo(f"{name}: {path}")
