"""`/v1/completions` and `/v1/chat/completions`: an answer, whole or in pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response
from llama_cpp.server.app import authenticate, prepare_request_resources
from llama_cpp.server.model import LlamaProxy
from sse_starlette.sse import EventSourceResponse
from starlette.types import Receive, Scope, Send

from pyinertia.binding import llama_cpp
from pyinertia.server.errors import status_and_body
from pyinertia.server.metrics import Metrics
from pyinertia.server.model import ServedLlama
from pyinertia.server.requests import OWN_FIELDS, ChatRequest, CompletionRequest
from pyinertia.server.settings import ServerSettings
from pyinertia.server.turns import CancelledTurn, Queue, Turn

START_WITHIN = 5.0  # seconds until a stream begins, be its first piece there or not
CLIENT_GONE = 499  # as nginx counts them; nobody reads it

router = APIRouter(dependencies=[Depends(authenticate)], tags=["OpenAI V1"])


@router.post(
    "/v1/completions",
    summary="Completion",
    responses={200: {"model": llama_cpp.CreateCompletionResponse}},
)
@router.post("/v1/engines/copilot-codex/completions", include_in_schema=False)
async def create_completion(request: Request, body: CompletionRequest) -> Response:
    """Continue a text."""
    if "copilot-codex" in request.url.path:
        body.model = "copilot-codex"
    return await _Answer(request, body, ServedLlama.create_completion).response()


@router.post(
    "/v1/chat/completions",
    summary="Chat",
    responses={200: {"model": llama_cpp.CreateChatCompletionResponse}},
)
async def create_chat_completion(request: Request, body: ChatRequest) -> Response:
    """Continue a conversation; its leading system messages are never evicted."""
    return await _Answer(request, body, ServedLlama.create_chat_completion).response()


class _Answer:
    """One request: the model's thread puts pieces in, the client takes them out."""

    def __init__(
        self, request: Request, body: CompletionRequest | ChatRequest, call: Callable[..., Any]
    ) -> None:
        self._request, self._body, self._call = request, body, call
        state = request.app.state
        self._queue: Queue = state.queue
        self._metrics: Metrics = state.metrics
        self._settings: ServerSettings = state.settings
        self._turn = Turn()
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()  # None: the end
        self._started = asyncio.Event()
        self._task = asyncio.create_task(self._queue.run(self._work, self._turn))
        self._task.add_done_callback(self._end)

    # in the model's thread

    def _work(self, models: LlamaProxy) -> dict[str, Any]:
        body, turn = self._body, self._turn
        wanted = body.model_dump(exclude=OWN_FIELDS)
        llm: Any = prepare_request_resources(body, models, body.model, wanted)
        llm.begin(turn)
        try:
            _check(llm, wanted)
            return self._answer(llm, wanted)
        finally:
            llm.begin(Turn())  # what others do with the model cannot be cancelled by this one

    def _answer(self, llm: Any, wanted: dict[str, Any]) -> dict[str, Any]:
        turn = self._turn
        if "logits_processor" in wanted:
            wanted["logits_processor"] = _Processors(wanted["logits_processor"])
        if (wanted["max_tokens"] or 0) <= 0:
            # without an end of positions an answer needs one of its own
            wanted["max_tokens"] = llm.context_params.n_ctx if llm._kv_closes else None
        turn.n_most = wanted["max_tokens"]
        try:
            answer: Any = self._call(llm, **wanted)
            if self._body.stream:
                return self._stream(answer)
            told: dict[str, Any] = answer
            told["usage"] |= _kv_usage(turn)
            return told
        finally:
            self._metrics.count(llm, turn)

    def _stream(self, pieces: Any) -> dict[str, Any]:
        """Pass a generator's pieces on; return what tells the usage, {} if nobody asked."""
        options, piece = self._body.stream_options, {}
        tells_usage = options is not None and options.include_usage
        for piece in pieces:
            if tells_usage:
                piece["usage"] = None
            self._loop.call_soon_threadsafe(self._put, piece)
            if self._settings.interrupt_requests and self._queue.n_waiting:
                pieces.close()
                break
        turn = self._turn
        n_prompt, n_completion = turn.n_prompt, turn.n_completion
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_completion,
            "total_tokens": n_prompt + n_completion,
            **_kv_usage(turn),
        }
        return {**piece, "choices": [], "usage": usage} if tells_usage else {}

    # in the event loop

    def _put(self, piece: dict[str, Any] | None) -> None:
        self._pieces.put_nowait(piece)
        self._started.set()

    def _end(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled():
            task.exception()  # seen; whoever waits raises it
        self._put(None)

    async def response(self) -> Response:
        """Wait until it is known whether there is an answer, or nobody waits for it."""
        streams = self._body.stream
        gone = asyncio.create_task(_gone(self._request))
        ready: asyncio.Task[Any] = self._task
        if streams:
            ready = asyncio.create_task(self._started.wait())
        passed_on = False
        try:
            await asyncio.wait(
                {gone, ready},
                timeout=START_WITHIN if streams else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if gone.done() and not ready.done():
                return Response(status_code=CLIENT_GONE)
            if self._task.done():
                self._task.result()
            if not streams:
                return JSONResponse(self._task.result())
            passed_on = True
            return _Events(self._turn, self._events(), self._settings.disable_ping_events)
        finally:
            gone.cancel()
            if not passed_on:
                self._turn.cancelled = True

    async def _events(self) -> AsyncIterator[dict[str, str]]:
        while (piece := await self._pieces.get()) is not None:
            yield {"data": json.dumps(piece)}
        try:
            last = self._task.result()
        except (Exception, asyncio.CancelledError) as error:
            # the status is sent already; clients raise an error on this
            told = error if isinstance(error, Exception) else CancelledTurn()
            yield {"data": json.dumps(status_and_body(told)[1])}
            if isinstance(error, (ValueError, CancelledTurn, asyncio.CancelledError)):
                return
            raise
        if last:
            yield {"data": json.dumps(last)}
        yield {"data": "[DONE]"}


class _Events(EventSourceResponse):
    """A stream whose turn ends with it, however that is."""

    def __init__(self, turn: Turn, events: AsyncIterator[Any], silent: bool) -> None:
        # sse-starlette knows how to stop its pings only lately; empty ones are none
        ping: Any = bytes if silent else None
        super().__init__(events, sep="\n", ping_message_factory=ping)
        self._turn = turn

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._turn.cancelled = True


class _Processors(llama_cpp.LogitsProcessorList):
    """The parent takes what extend() returns for the list, and would lose all of them."""

    def extend(self, more: Any) -> Any:
        super().extend(more)
        return self


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _check(llm: ServedLlama, wanted: dict[str, Any]) -> None:
    """Raise ValueError for tokens that the model does not have."""
    if isinstance(wanted.get("prompt"), list):
        llm.check_tokens(wanted["prompt"])
    llm.check_tokens([int(token) for token in wanted["logit_bias"] or ()])


def _kv_usage(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_tokens_details": {"cached_tokens": turn.n_cached},
        "kv_tokens_kept": turn.n_kept,
        "kv_tokens_evicted": turn.n_gone,
    }
