"""The process: a port, the model, and an end on Ctrl-C and SIGTERM."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
from contextlib import closing
from pathlib import Path
from types import FrameType

import uvicorn

from pyinertia.cli.group import say
from pyinertia.cli.models import check_file
from pyinertia.errors import CommandError
from pyinertia.server.app import create_app
from pyinertia.server.model import Models
from pyinertia.server.settings import ModelSettings, ServerSettings
from pyinertia.server.turns import Queue

END_WITHIN = 10  # seconds for the answers that are on their way when the server ends


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, queue: Queue) -> None:
        super().__init__(config)
        self._queue = queue

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._queue.stop()
        super().handle_exit(sig, frame)


def serve(settings: ServerSettings, models: list[ModelSettings]) -> None:
    """Serve models until a signal ends it.

    Raises:
        CommandError: The port cannot be had, or settings do not go together.
        PyInertiaError: The first model cannot be read, or the policy cannot run on it.
    """
    if bool(settings.ssl_keyfile) != bool(settings.ssl_certfile):
        msg = "--ssl-keyfile and --ssl-certfile need each other; pass both, or none"
        raise CommandError(msg)
    for model in models:
        model.policy()
        if model.hf_model_repo_id is None:
            check_file(Path(model.model))
    # before the model is loaded: that takes long, a port that is in use is found at once
    with closing(_listen(settings)) as listener:
        host = listener.getsockname()[0]
        if settings.api_key is None and not ipaddress.ip_address(host).is_loopback:
            say(
                f"warning: whoever reaches {host} can use this server; pass --api-key, or "
                "--host 127.0.0.1"
            )
        loaded = Models([*models])
        queue = Queue(loaded)
        try:
            _run(settings, queue, listener, verbose=any(model.verbose for model in models))
        finally:
            queue.close()
            loaded.free()  # type: ignore[no-untyped-call]


def _run(settings: ServerSettings, queue: Queue, listener: socket.socket, verbose: bool) -> None:
    app = create_app(settings, queue)
    app.state.metrics.look(queue.models())
    if not verbose:
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # a client that left is no news
    config = uvicorn.Config(
        app,
        log_level="info" if verbose else "warning",
        ssl_keyfile=settings.ssl_keyfile,
        ssl_certfile=settings.ssl_certfile,
        timeout_graceful_shutdown=END_WITHIN,
    )
    try:
        config.load()
    except OSError as error:  # ssl's own errors are some
        msg = f"--ssl-keyfile, --ssl-certfile: {error}"
        raise CommandError(msg) from error
    host, port = listener.getsockname()[:2]
    name = f"[{host}]" if ":" in host else host
    scheme = "https" if config.is_ssl else "http"
    # uvicorn raises the signals again that ended it, and that would end us before the model
    before = {one: signal.signal(one, _ignore) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        say(f"listening on {scheme}://{name}:{port}, Ctrl-C ends")
        _Server(config, queue).run(sockets=[listener])
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _ignore(_: int, __: FrameType | None) -> None:
    pass


def _listen(settings: ServerSettings) -> socket.socket:
    host, port = settings.host, settings.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # localhost may be both
        family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        return socket.create_server(address[:2], family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        msg = f"cannot listen on {host}:{port}: {why}; pass another --port or --host"
        raise CommandError(msg) from error
