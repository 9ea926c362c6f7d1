"""Starts and ends the engine's process and the HTTP server. `run` is the entry point for `scripts`.

Modules that the engine does not need are imported after its process has been started, which saves a third of a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import uvloop

from server.engine.group import spawn_engines
from server.engine.protocol import EngineFailedError
from server.engine.routing import Router
from server.http.descriptors import connection_limit, raise_limit
from server.http.listener import BACKLOG, address_in_error, bind, removed, url_of
from server.http.signals import Signals, first_of
from server.settings import Settings

if TYPE_CHECKING:
    from server.api.tracing import Tracer
    from server.http.tls import TlsContext


def run(
    settings: Settings,
    engine_target: str,
    engine_args: object,
    *,
    more_engines: Sequence[object] = (),
    router: Router | None = None,
    report: Callable[[str], None] = print,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Serves until SIGTERM or SIGINT. Returns the process's exit code, which is non-zero if the engine has died.

    With several engines the server ends when one of them dies, as in vLLM. The requests of the others may finish within
    `settings.death_linger_s`. After a signal new requests are refused with 503. Running requests may finish within
    `settings.grace_period_s`, and are then aborted. A second signal ends the wait.

    Args:
        engine_target: the factory of the engine, "package.module:function". It is called in the engine's process as
            `function(engine_args, report)` and returns `(engine, EngineInfo)`, where the engine is a
            `batcher.engine.Engine` that is warmed up and not started.
        engine_args: the factory's argument, which must pickle.
        more_engines: the arguments of further engines, each in its own process.
        router: chooses an engine for each request, in place of the usual one. Only with one HTTP process.
        report: called with each line of the factory's report.
        on_ready: called with the server's URL when it serves.

    Raises:
        OSError: the address is not available, or no folder can hold the engine's sockets. The address is checked before
            anything is loaded; another process may still take it before the server listens.
        ValueError: the tokenizer or the chat template of a model is unusable, or the certificate, there are too few
            descriptors, or packages for traces are missing.
        EngineFailedError: the engine cannot start.
    """
    raise_limit()
    if settings.api_server_count > 1:
        from server.api_processes.parent import run_api_processes

        return run_api_processes(
            settings, engine_target, [engine_args, *more_engines], report=report, on_ready=on_ready
        )
    tls = tracer = None
    if settings.tls is not None:
        from server.http.tls import TlsContext

        tls = TlsContext(settings.tls)
    if settings.otlp_traces_endpoint is not None:
        from server.api.tracing import make_tracer

        tracer = make_tracer(settings)
    try:
        with bind(settings) as listener, removed(settings.uds):
            engines = [engine_args, *more_engines]
            serving = _serve(settings, engine_target, engines, router, listener, tls, tracer, report, on_ready)
            return uvloop.run(serving)
    finally:
        if tracer is not None:
            tracer.close()


async def _serve(
    settings: Settings,
    engine_target: str,
    engines: Sequence[object],
    router: Router | None,
    listener: socket.socket,
    tls: TlsContext | None,
    tracer: Tracer | None,
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    signalled = Signals()
    engine = spawn_engines(engine_target, engines, report=report, debug=settings.debug, router=router)
    try:
        from server.app import create_app
        from server.http.server import HttpServer
        from server.serve_until_end import EXIT_OK, load_state, serve

        max_connections = connection_limit(settings.max_connections)
        starting = asyncio.create_task(engine.start())
        starting.add_done_callback(_see)  # if the tokenizer fails too, only its error is raised
        # This runs while the engine loads and compiles, so its errors are raised now and not after minutes.
        state = await asyncio.to_thread(load_state, settings, engine)
        with contextlib.closing(state):
            await first_of(asyncio.wait([starting]), signalled.stop.wait())
            if not starting.done():
                starting.cancel()  # a signal came before the engine was ready
                return EXIT_OK
            await starting
            await state.models.read_all()
            state.tracer = tracer
            server = HttpServer(create_app(state), settings, max_connections, tls)
            async with contextlib.nullcontext() if tls is None else tls.refreshed():
                with address_in_error(settings):
                    listener.listen(BACKLOG)  # not before the engine is ready; uvloop would hide a failure

                def on_started() -> None:
                    if on_ready is not None:
                        on_ready(url_of(listener, settings))

                return await serve(state, engine, server, signalled, listener, on_started)
    except EngineFailedError as error:
        raise error.after("The engine could not start") from error
    finally:
        await engine.stop()


def _see(task: asyncio.Task[Any]) -> None:
    """Marks a task's error as seen: asyncio logs unseen errors with a traceback."""
    if not task.cancelled():
        task.exception()
