"""The HTTP server of a host that follows a leader. It answers /health and /live only."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from server.engine.protocol import Engine, EngineFailedError, fault_of
from server.engine.remote import RemoteEngine
from server.http.descriptors import connection_limit, raise_limit
from server.http.listener import BACKLOG, bind, removed, url_of
from server.http.request_error import NOT_FOUND, RequestError, unavailable
from server.http.server import HttpServer
from server.http.signals import Signals, first_of
from server.settings import Settings

logger = logging.getLogger("pallas_serve")

EXIT_OK = 0
EXIT_FAILED = 1
NO_API = "This host follows another one, which answers requests. Here are /health and /live."


def run_follower(
    settings: Settings,
    engine_target: str,
    engine_args: object,
    *,
    report: Callable[[str], None] = print,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Runs the engine's process until the leader ends it. Returns the exit code, which is non-zero if the engine has
    died. The arguments are those of `server.main.run`. Of the settings only the address and the times are used.

    After a signal this host waits up to `settings.grace_period_s` for the leader, which gets a signal too, to end it. A
    second signal ends this host at once, and with it the leader.

    Raises OSError if the address is not available, and ValueError for too few descriptors. Raises EngineFailedError if
    the engine cannot start.
    """
    raise_limit()
    with bind(settings) as listener, removed(settings.uds):
        return uvloop.run(_serve(settings, engine_target, engine_args, listener, report, on_ready))


async def _serve(
    settings: Settings,
    engine_target: str,
    engine_args: object,
    listener: socket.socket,
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    signals = Signals()
    client = RemoteEngine.spawn(engine_target, engine_args, report=report, debug=settings.debug)
    try:
        starting = asyncio.create_task(client.start())
        await first_of(asyncio.wait([starting]), signals.stop.wait())
        if not starting.done():
            starting.cancel()
            return EXIT_OK
        await starting
        listener.listen(BACKLOG)  # not before the engine is ready
        server = HttpServer(_app(client, signals, settings), settings, connection_limit(settings.max_connections))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        if on_ready is not None:
            on_ready(url_of(listener, settings))
        await first_of(signals.stop.wait(), client.died.wait(), asyncio.wait([serving]))
        if signals.stop.is_set() and not client.died.is_set():
            logger.info("shutting down: waiting for the leader to end this host")
            await _wait_for_the_leader(client, signals, settings.grace_period_s)
        server.should_exit = True
        await serving
        return EXIT_OK if client.death is None else EXIT_FAILED
    except EngineFailedError as error:
        raise error.after("The engine could not start") from error
    finally:
        await client.stop()


async def _wait_for_the_leader(client: RemoteEngine, signals: Signals, timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await first_of(client.died.wait(), signals.hurry.wait())


def _app(client: Engine, signals: Signals, settings: Settings) -> Starlette:
    def answer(fault: str | None) -> Response:
        if fault is None:
            return JSONResponse({"status": "ok"})
        return refusal(unavailable(fault))

    def refusal(error: RequestError) -> Response:
        return JSONResponse(error.body(), status_code=error.status)

    async def health(request: Request) -> Response:
        shutting_down = "The server is shutting down." if signals.stop.is_set() else None
        return answer(fault_of(client, settings.heartbeat_timeout_s) or shutting_down)

    async def live(request: Request) -> Response:
        return answer(fault_of(client, settings.heartbeat_timeout_s))

    async def nothing_else(request: Request, error: Exception) -> Response:
        return refusal(RequestError(404, NO_API, type=NOT_FOUND))

    app = Starlette(routes=[Route("/health", health), Route("/live", live)], exception_handlers={404: nothing_else})
    app.router.redirect_slashes = False
    return app
