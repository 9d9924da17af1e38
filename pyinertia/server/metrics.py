"""What `/metrics` tells Prometheus."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pyinertia.server.model import ServedLlama
from pyinertia.server.turns import Queue, Turn

SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """Counters of one server."""

    def __init__(self, queue: Queue) -> None:
        """Count from 0."""
        self._registry = one = CollectorRegistry()
        ProcessCollector(registry=one)
        ours: dict[str, Any] = {"namespace": "pyinertia", "registry": one}
        by_path = ["path", "status"]
        self.requests = Counter("requests", "Requests that were answered.", by_path, **ours)
        self.seconds = Histogram(
            "request_seconds",
            "From a request to the end of its answer, waiting included.",
            ["path"],
            buckets=SECONDS,
            **ours,
        )
        waiting = Gauge("requests_waiting", "Requests that wait for the model.", **ours)
        waiting.set_function(lambda: queue.n_waiting)
        self.prompt = Counter("prompt_tokens", "Tokens of prompts.", **ours)
        self.cached = Counter(
            "prompt_cached_tokens", "Those of them that were in the cache already.", **ours
        )
        self.completion = Counter("completion_tokens", "Tokens that were generated.", **ours)
        self.t_prompt = Counter("prompt_seconds", "Time until first tokens.", **ours)
        self.t_decode = Counter("decode_seconds", "Time from first tokens to last ones.", **ours)
        self.evicted = Counter("kv_evicted_tokens", "Tokens that left the KV cache.", **ours)
        self.cells = Gauge("kv_cells", "Cells of the KV cache.", **ours)
        self.cells_used = Gauge("kv_cells_used", "Those of them in use.", **ours)
        self.kv_bytes = Gauge("kv_bytes", "Bytes of K and V.", **ours)

    def count(self, llm: ServedLlama, turn: Turn) -> None:
        """Count a turn that has ended; in the model's thread."""
        self.prompt.inc(turn.n_prompt)
        self.cached.inc(turn.n_cached)
        self.completion.inc(turn.n_completion)
        self.t_prompt.inc(turn.t_prompt)
        self.t_decode.inc(turn.t_decode)
        self.evicted.inc(turn.n_evicted)
        self.look(llm)

    def look(self, llm: ServedLlama) -> None:
        """Take the sizes of the cache."""
        if not llm._kv_refusal:
            stats = llm.kv_stats()
            self.cells.set(stats.n_cells)
            self.cells_used.set(stats.n_used)
            self.kv_bytes.set(stats.kv_bytes)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class CountRequests:
    """Middleware that counts requests by the route that answered them."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        """Count for this app."""
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and count."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, start = 500, time.perf_counter()

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        finally:
            # paths that nobody serves are one, else clients could make up labels
            path = getattr(scope.get("route"), "path", "other")
            self._metrics.requests.labels(path, status).inc()
            self._metrics.seconds.labels(path).observe(time.perf_counter() - start)
