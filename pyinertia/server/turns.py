"""One model, many clients: requests take turns, in the order in which they came."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from llama_cpp.server.model import LlamaProxy

T = TypeVar("T")


class CancelledTurn(Exception):
    """Nobody waits for the answer any more."""


@dataclass
class Turn:
    """What one request has of the model.

    Attributes:
        n_most: Tokens that may be generated, None for as many as the model wants.
        cancelled: Whether nobody waits for the answer any more.
        n_prompt: Tokens of the prompt.
        n_cached: How many of them needed no evaluation.
        n_completion: Tokens that were generated.
        n_evicted: Tokens that left the cache meanwhile.
        n_kept: Tokens of prompt and completion that are still in the cache.
        n_gone: Those that are not.
        t_prompt: Seconds until the first token.
        t_decode: Seconds from the first token on.
    """

    n_most: int | None = None
    cancelled: bool = False
    n_prompt: int = 0
    n_cached: int = 0
    n_completion: int = 0
    n_evicted: int = 0
    n_kept: int = 0
    n_gone: int = 0
    t_prompt: float = 0.0
    t_decode: float = 0.0

    def check(self) -> None:
        """Raise CancelledTurn if this turn is cancelled."""
        if self.cancelled:
            raise CancelledTurn


class Queue:
    """Requests before a model.

    Attributes:
        models: The models, of which one is loaded.
        n_waiting: Requests whose turn has not come.
        stopping: Whether the server ends.
    """

    def __init__(self, models: LlamaProxy) -> None:
        """Queue before these models."""
        self.models = models
        self.n_waiting = 0
        self.stopping = False
        self._lock = asyncio.Lock()
        self._known: dict[int, Turn] = {}
        # always the same thread: OpenMP has a team of threads for each that computes
        self._thread = ThreadPoolExecutor(1, "model")

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[LlamaProxy]:
        """Wait for a turn; the models are ours within."""
        self.n_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self.n_waiting -= 1
        try:
            yield self.models
        finally:
            self._lock.release()

    async def run(self, work: Callable[[LlamaProxy], T], turn: Turn) -> T:
        """Do work with the models in their thread, when its turn comes.

        Raises:
            CancelledTurn: The turn was cancelled.
        """
        self._known[id(turn)] = turn
        try:
            async with self.turn() as models:
                if self.stopping:
                    raise CancelledTurn
                turn.check()
                return await asyncio.get_running_loop().run_in_executor(self._thread, work, models)
        finally:
            del self._known[id(turn)]

    def stop(self) -> None:
        """Cancel all turns; safe in a signal handler."""
        self.stopping = True
        for turn in list(self._known.values()):
            turn.cancelled = True

    def close(self) -> None:
        """Wait until nobody uses the models."""
        self.stop()
        self._thread.shutdown()
