"""Where documents are summarised: in this process, or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pyinertia.cli.options import ModelOptions
from pyinertia.errors import CommandError

if TYPE_CHECKING:
    from pyinertia.batch import Summary

LOCAL, RAY = ENGINES = ("local", "ray")
NEEDED = ("ray", "pandas", "pyarrow")  # ray[data]
PANEL = "Beyond one machine"


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Which engine, and what each of Ray's workers has."""

    engine: Annotated[
        str,
        typer.Option(
            metavar="|".join(ENGINES),
            help="ray: on a Ray cluster, with a model per worker; the same results, in the same "
            "files. Needs pip install 'pyinertia\\[ray]'.",
            rich_help_panel=PANEL,
        ),
    ] = LOCAL
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most workers.",
            show_default="as many as there is room for",
            rich_help_panel=PANEL,
        ),
    ] = None
    cpus_per_worker: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="CPUs of a worker, and its threads unless -t is given.",
            show_default="all of a machine; 1 with GPUs",
            rich_help_panel=PANEL,
        ),
    ] = None
    gpus_per_worker: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="GPUs of a worker; -ngl says how many layers go there.",
            show_default="none",
            rich_help_panel=PANEL,
        ),
    ] = None
    ray_address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The cluster.",
            show_default="RAY_ADDRESS; else the one that runs here, else one of this machine alone",
            rich_help_panel=PANEL,
        ),
    ] = None

    def check(self, model: ModelOptions) -> None:
        """Refuse what has no meaning.

        Raises:
            CommandError: The engine is unknown, or not installed, or an option is not for it.
        """
        if self.engine not in ENGINES:
            msg = f"--engine {self.engine}: must be one of {', '.join(ENGINES)}"
            raise CommandError(msg)
        others = [one.name for one in fields(self) if one.name != "engine"]
        given = [name for name in others if getattr(self, name) is not None]
        if self.engine == LOCAL and given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            msg = f"{flags}: only for --engine ray"
            raise CommandError(msg)
        missing = [name for name in NEEDED if find_spec(name) is None]
        if self.engine == RAY and missing:
            msg = f"--engine ray needs {missing[0]}; pip install 'pyinertia[ray]'"
            raise CommandError(msg)
        if self.gpus_per_worker and not model.n_gpu_layers:
            msg = "--gpus-per-worker leaves the GPUs idle without -ngl; pass -ngl -1 for all layers"
            raise CommandError(msg)

    def summarise(self, model: ModelOptions) -> Callable[..., Iterator[Summary]]:
        """The engine, which takes documents and the keywords of `pyinertia.batch.summarise`."""
        if self.engine == LOCAL:
            from pyinertia import batch

            return batch.summarise
        from pyinertia.batch import ray_engine

        ours = {
            "n_workers": self.workers,
            "cpus_per_worker": self.cpus_per_worker,
            "gpus_per_worker": self.gpus_per_worker or 0,
            "address": self.ray_address,
            # as many as this machine has CPUs is no measure for the others
            "n_threads": model.threads,
            "n_threads_batch": model.threads,
        }

        def on_ray(texts: Iterator[str], **keywords: Any) -> Iterator[Summary]:
            return ray_engine.summarise(texts, **{**keywords, **ours})

        return on_ray
