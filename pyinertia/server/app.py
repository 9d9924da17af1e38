"""The application: our endpoints, and those of llama_cpp.server that need no change."""

from __future__ import annotations

from collections.abc import AsyncIterator

import llama_cpp.server.app as upstream
from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse
from fastapi.routing import APIRoute
from llama_cpp.server.model import LlamaProxy
from llama_cpp.server.types import ModelList
from prometheus_client import CONTENT_TYPE_LATEST
from starlette_context.middleware import RawContextMiddleware
from starlette_context.plugins.request_id import RequestIdPlugin

from pyinertia import __version__
from pyinertia.server import completions, errors
from pyinertia.server.metrics import CountRequests, Metrics
from pyinertia.server.settings import ServerSettings
from pyinertia.server.turns import Queue

OURS = {
    "/v1/completions",
    "/v1/engines/copilot-codex/completions",
    "/v1/chat/completions",
    "/v1/models",
}


def create_app(settings: ServerSettings, queue: Queue) -> FastAPI:
    """Create the application, for the models of a queue."""
    metrics = Metrics(queue)
    app = FastAPI(title="pyinertia", version=__version__, root_path=settings.root_path)
    app.state.settings, app.state.queue, app.state.metrics = settings, queue, metrics
    app.add_middleware(RawContextMiddleware, plugins=(RequestIdPlugin(),))
    app.add_middleware(CountRequests, metrics=metrics)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"],
        allow_credentials=True,
        allow_methods=["*"],
        allow_headers=["*"],
    )
    errors.handle(app)
    app.include_router(completions.router)
    app.include_router(_about(queue, metrics))
    app.include_router(_upstream())

    async def turn() -> AsyncIterator[LlamaProxy]:
        async with queue.turn() as models:
            yield models

    app.dependency_overrides[upstream.get_llama_proxy] = turn
    upstream.set_server_settings(settings)  # where its authenticate() looks
    return app


def _about(queue: Queue, metrics: Metrics) -> APIRouter:
    """What must answer while the model works."""
    router, authenticated = APIRouter(), [Depends(upstream.authenticate)]

    @router.get("/health", summary="Health", tags=["Operation"])
    async def health() -> dict[str, str]:
        """The server runs, and its model is loaded. Needs no API key."""
        return {"status": "ok"}

    @router.get(
        "/metrics",
        summary="Metrics",
        tags=["Operation"],
        dependencies=authenticated,
        response_class=PlainTextResponse,
    )
    async def prometheus() -> PlainTextResponse:
        """Counters for Prometheus."""
        return PlainTextResponse(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/models", summary="Models", tags=["OpenAI V1"], dependencies=authenticated)
    async def models() -> ModelList:
        """The models of this server."""
        found: ModelList = await upstream.get_models(queue.models)
        return found

    return router


def _upstream() -> APIRouter:
    """The other endpoints of llama_cpp.server, without its own way to tell of errors."""
    router = APIRouter()
    for route in upstream.router.routes:
        if isinstance(route, APIRoute) and route.path not in OURS:
            router.add_api_route(
                route.path,
                route.endpoint,
                methods=list(route.methods or ()),
                dependencies=route.dependencies,
                summary=route.summary,
                tags=route.tags,
            )
    return router
