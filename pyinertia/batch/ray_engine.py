"""`summarise` beyond one machine: a Ray Data pipeline of workers, one model each.

Ray decides what runs where, starts a worker that died anew and gives it its documents again. Here
documents become blocks, one each, so that a result comes as soon as there is one, and what a worker
takes with it is no more than the documents it had at that moment.
"""

from __future__ import annotations

import logging
import math
import os
import pickle
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from pyinertia.batch import documents as here
from pyinertia.batch.arguments import check_count, check_items
from pyinertia.batch.documents import Summary
from pyinertia.batch.ray_worker import Worker
from pyinertia.errors import ClusterError

try:
    import pyarrow as pa
    import ray
    import ray.data
    from ray.util.annotations import RayDeprecationWarning
except ModuleNotFoundError as error:
    msg = f"Ray needs {error.name}; pip install 'pyinertia[ray]'"
    raise ModuleNotFoundError(msg, name=error.name) from error

# A pipeline has a window of the pile, so nobody must hold all of it. The first one is small, for
# work to begin at once; while a window is worked on, the next one is read.
N_FIRST, N_MORE = 8, 4  # documents per slot of the first window; of the next one, per result
N_WINDOW, N_BYTES = 16_384, 2**30  # most of a window
N_RETRIES = 3  # of a document whose worker died; it may be what kills them


def summarise(
    documents: Iterable[str],
    *,
    model: str | os.PathLike[str],
    n_workers: int | None = None,
    cpus_per_worker: float | None = None,
    gpus_per_worker: float = 0,
    address: str | None = None,
    n_parallel: int = 8,
    n_threads: int | None = None,
    n_threads_batch: int | None = None,
    **kwargs: Any,
) -> Iterator[Summary]:
    """Summarise documents on a Ray cluster; results are those of `pyinertia.batch.summarise`.

    Each worker is a process with a model and n_parallel slots of its own, wherever Ray has room for
    it. A worker that dies is started anew, and its documents are done again: each document gives
    one summary, one that outlives no worker gives an error. A connection to Ray that is open
    already is used.

    Args:
        documents: As in `pyinertia.batch.summarise`; they are read some way ahead.
        model: Path to the GGUF file, the same on every machine.
        n_workers: Most workers. None: as many as the cluster has room for.
        cpus_per_worker: CPUs that Ray reserves for one. None: all of the smallest machine, or one
            if it has GPUs.
        gpus_per_worker: GPUs that Ray reserves for one; n_gpu_layers says what they are used for.
        address: Of the cluster, "host:6379". None: RAY_ADDRESS, the one that runs on this machine,
            or one of this machine alone, for as long as it takes.
        n_parallel: Most documents or parts at a time, of each worker.
        n_threads: Threads of each worker. None: as many as its CPUs.
        n_threads_batch: The same, for prompts.
        **kwargs: As in `pyinertia.batch.summarise`.

    Returns:
        An iterator of summaries, in the order in which they are done.

    Raises:
        ClusterError: There is no such cluster.
        TypeError, ValueError, PolicyError, ModelError: As in `pyinertia.batch.summarise`.
    """
    keywords = {"model": Path(model).absolute(), "n_parallel": n_parallel, **kwargs}
    here.summarise((), **keywords)  # its errors, before anything is started
    if n_workers is not None:
        check_count("n_workers", n_workers, 1)
    if (cpus_per_worker is not None and cpus_per_worker <= 0) or gpus_per_worker < 0:
        msg = (
            f"cpus_per_worker={cpus_per_worker!r}, gpus_per_worker={gpus_per_worker!r}: a worker "
            "needs more than no CPU, and not less than no GPU"
        )
        raise ValueError(msg)
    items = check_items("documents", documents)

    def run() -> Iterator[Summary]:
        with _connected(address, bool(kwargs.get("verbose"))):
            cpus, n = _shares(n_workers, cpus_per_worker, gpus_per_worker)
            threads = max(1, math.floor(cpus))
            keywords["n_threads"] = n_threads or threads
            keywords["n_threads_batch"] = n_threads_batch or keywords["n_threads"]
            pipeline = _Pipeline(keywords, n, cpus, gpus_per_worker)
            yield from pipeline.run(_Ahead(items))

    return run()


@contextmanager
def _connected(address: str | None, verbose: bool) -> Iterator[None]:
    if ray.is_initialized():  # by our caller, who ends it, too
        yield
        return
    with nullcontext() if verbose else _quiet():
        try:
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=verbose,
                logging_level=logging.INFO if verbose else logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = "RAY_ADDRESS" if address is None else address
            msg = f"there is no Ray cluster at {where}: {error}; `ray start --head` starts one"
            raise ClusterError(msg) from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray tells a lot, and all of it stays in its own files."""
    log, variable = logging.getLogger("ray.data"), "RAY_BACKEND_LOG_LEVEL"
    level, was_set = log.level, variable in os.environ
    log.setLevel(logging.CRITICAL)
    os.environ.setdefault(variable, "fatal")
    try:
        yield
    finally:
        log.setLevel(level)
        if not was_set:
            del os.environ[variable]


def _shares(n: int | None, cpus: float | None, gpus: float) -> tuple[float, int]:
    """CPUs of a worker, and the number of workers."""
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    machines = [one for one in machines if one.get("CPU", 0) and one.get("GPU", 0) >= gpus]
    if cpus is None:
        cpus = 1 if gpus else min((one["CPU"] for one in machines), default=1)
    wanted = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    n_room = sum(math.floor(min(one[k] / wanted[k] for k in wanted)) for one in machines)
    if not n_room:
        named = " and ".join(f"{count:g} {kind}s" for kind, count in wanted.items())
        msg = f"no machine of the Ray cluster has {named}, which a worker is to have; ask for fewer"
        raise ClusterError(msg)
    return cpus, min(n or n_room, n_room)


class _Ahead:
    """Reads documents ahead, and leaves them with Ray; after an exception there are no more."""

    def __init__(self, documents: Iterator[Any]) -> None:
        self._numbered: Iterator[tuple[int, Any]] = enumerate(documents)
        self._window: dict[int, Any] = {}
        self._n_bytes = 0
        self.failure: Exception | None = None

    def read(self, n: int) -> None:
        """Read n documents more, if the window has room for them."""
        for _ in range(n):
            if len(self._window) >= N_WINDOW or self._n_bytes >= N_BYTES:
                return
            try:
                number, document = next(self._numbered, (-1, None))
            except Exception as error:  # raised again when those before it are done
                self.failure, self._numbered = error, iter(())
                return
            if number < 0:
                return
            data = pickle.dumps(document)
            self._n_bytes += len(data)
            self._window[number] = ray.put(pa.table({"number": [number], "document": [data]}))

    def take(self) -> dict[int, Any]:
        """The window, number -> block; the next one is empty."""
        window, self._window, self._n_bytes = self._window, {}, 0
        return window


class _Pipeline:
    """Workers over windows of documents."""

    def __init__(self, keywords: dict[str, Any], n: int, cpus: float, gpus: float) -> None:
        self._keywords, self._n, self._cpus, self._gpus = keywords, n, cpus, gpus

    def run(self, ahead: _Ahead) -> Iterator[Summary]:
        """Yield a summary of each document that can be read."""
        ahead.read(N_FIRST * self._n * self._keywords["n_parallel"])
        while window := ahead.take():
            for summary in self._summaries(window):
                yield summary
                ahead.read(N_MORE)
        if ahead.failure is not None:
            raise ahead.failure

    def _summaries(self, window: dict[int, Any]) -> Iterator[Summary]:
        for data in self._results([*window.values()]):
            result = pickle.loads(data)
            if isinstance(result, Exception):
                raise result
            if window.pop(result.index, None) is not None:
                yield result
        for number in sorted(window):
            yield _lost(number)

    def _results(self, blocks: list[Any]) -> Iterator[bytes]:
        n_parallel = self._keywords["n_parallel"]
        context = ray.data.DataContext.get_current().copy()
        context.enable_progress_bars = context.print_on_execution_start = False
        context.max_errored_blocks = -1  # what is lost for good is told by its absence
        with ray.data.DataContext.current(context), warnings.catch_warnings():
            # max_task_retries will have no place in Ray 2.64, see pyproject.toml
            warnings.simplefilter("ignore", RayDeprecationWarning)
            pipeline = ray.data.from_arrow_refs(blocks).map_batches(
                Worker,
                batch_size=None,
                fn_constructor_kwargs={"keywords": self._keywords},
                compute=ray.data.ActorPoolStrategy(
                    size=min(self._n, len(blocks)),
                    max_tasks_in_flight_per_actor=n_parallel,
                    max_concurrent_calls_per_actor=n_parallel,
                    enable_true_multi_threading=True,
                ),
                num_cpus=self._cpus,
                num_gpus=self._gpus,
                max_task_retries=N_RETRIES,
            )
        # prefetching would hold each result back until there is another
        for batch in pipeline.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        ):
            yield from batch.column("result").to_pylist()


def _lost(number: int) -> Summary:
    error = (
        f"its worker died, and again in {N_RETRIES} more tries; is there memory for the model? It "
        "may also be this document"
    )
    return Summary(
        index=number,
        text="",
        finish_reason="error",
        n_tokens=0,
        n_parts=0,
        n_levels=0,
        n_prompt=0,
        n_generated=0,
        n_evicted=0,
        seconds=0.0,
        error=error,
    )
