"""Errors as OpenAI's clients expect them: a status, and an object that says what is wrong."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from jinja2 import TemplateError
from starlette.exceptions import HTTPException as StarletteHTTPException

from pyinertia.errors import CommandError, ModelError
from pyinertia.server.turns import CancelledTurn

TOO_LONG = re.compile(r"exceed (the )?context window|exceed the \d+ cells")


def status_and_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status of an error, and the object that tells of it."""
    status, code, text = 500, None, str(error) or type(error).__name__
    if isinstance(error, StarletteHTTPException):
        status, text = error.status_code, str(error.detail)
        code = "invalid_api_key" if status == 401 else None
    elif isinstance(error, RequestValidationError):
        status, text = 400, _invalid(error)
    elif isinstance(error, CancelledTurn):
        status, text = 503, "the server is stopping"
    elif isinstance(error, (ModelError, CommandError)):
        pass  # a model that the server is to load, not what the client sent
    elif isinstance(error, (ValueError, TemplateError)) or "embedding=True" in text:
        status = 400
        code = "context_length_exceeded" if TOO_LONG.search(text) else None
    kind = "invalid_request_error" if status < 500 else "internal_server_error"
    return status, {"error": {"message": text, "type": kind, "param": None, "code": code}}


def _invalid(error: RequestValidationError) -> str:
    parts = []
    for one in error.errors():
        place = ".".join(str(part) for part in one["loc"] if part != "body")
        parts.append(f"{place}: {one['msg']}" if place else one["msg"])
    return "; ".join(dict.fromkeys(parts))


async def _respond(_: Request, error: Exception) -> JSONResponse:
    status, body = status_and_body(error)
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body, status, headers=headers)


def handle(app: FastAPI) -> None:
    """Let all errors of the app look alike."""
    for kind in (
        StarletteHTTPException,
        RequestValidationError,
        CancelledTurn,
        ValueError,
        TemplateError,
        Exception,
    ):
        app.add_exception_handler(kind, _respond)
