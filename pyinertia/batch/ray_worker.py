"""One model of many: what runs in each process of a Ray cluster, see ray_engine.py.

Ray calls a worker from as many threads as it has slots, with a document each. One more thread has
the model, and takes a document whenever a slot is free, so the slots are batched as they are in one
process.
"""

from __future__ import annotations

import pickle
import socket
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

from pyinertia.batch.documents import Numbered, Summary, summarise
from pyinertia.errors import PyInertiaError


class Inbox(Numbered):
    """Documents that come from many threads; each waits for its summary."""

    def __init__(self) -> None:
        """Be empty."""
        self._queue: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._waiting: defaultdict[int, deque[Future[Summary]]] = defaultdict(deque)
        self._lock = Lock()
        self._failure: Exception | None = None
        self._n_open = 0  # documents that the model has

    def ask(self, number: int, document: Any) -> Summary:
        """Wait for the summary of a document.

        Raises:
            Exception: The model cannot be loaded, or it failed.
        """
        future: Future[Summary] = Future()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting[number].append(future)
        self._queue.put((number, document))
        return future.result()

    def __next__(self) -> tuple[int, Any]:
        """The next document; StopIteration if there is none while the model has others."""
        try:
            document = self._queue.get(block=not self._n_open)
        except Empty:
            raise StopIteration from None
        self._n_open += 1
        return document

    def answer(self, summary: Summary) -> None:
        """Hand a summary to who waits for it."""
        self._n_open -= 1
        with self._lock:
            future = self._waiting[summary.index].popleft()
            if not self._waiting[summary.index]:
                del self._waiting[summary.index]
        future.set_result(summary)

    def fail(self, error: Exception) -> None:
        """Tell all who wait, and all who will come, that there is no model."""
        with self._lock:
            self._failure = error
            waiting = [future for futures in self._waiting.values() for future in futures]
        for future in waiting:
            future.set_exception(error)


class Worker:
    """A model in a process of its own, as `ray.data.Dataset.map_batches` takes it."""

    def __init__(self, keywords: Mapping[str, Any]) -> None:
        """Load a model.

        Args:
            keywords: Of `pyinertia.batch.summarise`.
        """
        self._inbox = Inbox()
        Thread(target=self._run, args=(keywords,), daemon=True).start()

    def _run(self, keywords: Mapping[str, Any]) -> None:
        try:
            for summary in summarise(self._inbox, **keywords):
                self._inbox.answer(summary)
        except Exception as error:
            self._inbox.fail(_told(error))

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[bytes]]:
        """Summarise a document.

        Args:
            batch: One row of `number` and `document`, a pickled text.

        Returns:
            One row of `result`: a pickled `Summary`, or the error that no document can help.
        """
        result: Summary | Exception
        try:
            result = self._inbox.ask(int(batch["number"][0]), pickle.loads(batch["document"][0]))
        except Exception as error:
            result = error
        return {"result": [pickle.dumps(result)]}


def _told(error: Exception) -> Exception:
    """The error, of a kind that every process knows, with the machine it came from."""
    kind: type[Exception] = RuntimeError
    if isinstance(error, PyInertiaError):
        kind = type(error)
    elif isinstance(error, ValueError):  # some of its kinds take more than a text
        kind = ValueError
    return kind(f"{error} (on {socket.gethostname()})")
