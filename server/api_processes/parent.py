"""The parent process. It starts the engines and the HTTP processes, restarts HTTP processes that die, and ends all of
them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from server.api_processes.processes import ApiProcesses, ApiServerFailedError
from server.engine.group import spawn_engines
from server.engine.protocol import EngineFailedError
from server.engine.routing import Router
from server.engine.scratch_folder import folder_for_sockets
from server.http.listener import BACKLOG, address_in_error, bind, removed, url_of
from server.http.signals import Signals
from server.http.tls import TlsContext
from server.serve_until_end import EXIT_ENGINE_FAILED, EXIT_OK
from server.settings import Settings
from server.shared_counts import PrefixTable, SharedCounts


def run_api_processes(
    settings: Settings,
    engine_target: str,
    engine_args: Sequence[object],
    *,
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    """Serves with `settings.api_server_count` HTTP processes until SIGTERM or SIGINT. Returns the process's exit code.

    An HTTP process that dies loses its connections; its requests are aborted, and it is started again. If one cannot
    start, the server ends with ValueError if a setting is the reason, else with ApiServerFailedError. The arguments
    and the other errors are those of `server.main.run`.
    """
    if settings.tls is not None:
        TlsContext(settings.tls)  # faults are said before anything is loaded
    with bind(settings) as listener, removed(settings.uds), folder_for_sockets() as folder:
        return uvloop.run(_serve(settings, listener, folder.path, engine_target, engine_args, report, on_ready))


async def _serve(
    settings: Settings,
    listener: socket.socket,
    folder: Path,
    target: str,
    engine_args: Sequence[object],
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    signals = Signals()
    num_keys = len(settings.api_keys) + len(settings.admin_api_keys)
    shared_counts = SharedCounts.made(settings.api_server_count, len(engine_args), num_keys)
    router = Router(PrefixTable(shared_counts))
    engine = spawn_engines(target, engine_args, report=report, debug=settings.debug, router=router)
    processes = ApiProcesses(settings, listener, folder, shared_counts, engine)
    watching: list[asyncio.Task[None]] = []
    try:
        stopped: asyncio.Future[Any] = asyncio.ensure_future(signals.stop.wait())
        if not await _before(stopped, processes.failed, asyncio.gather(engine.start(), processes.start())):
            return EXIT_OK  # a signal came before the engine and the HTTP processes were ready
        watching = [asyncio.create_task(processes.watch(number)) for number in range(len(processes.engines))]
        watching.append(asyncio.create_task(processes.watch_all()))
        if settings.uds is not None:  # the processes share the socket; at an address each has its own
            with address_in_error(settings):
                listener.listen(BACKLOG)
        processes.let_accept()
        if on_ready is not None:
            on_ready(url_of(listener, settings))
        died = asyncio.ensure_future(engine.died.wait())
        try:
            await _before(stopped, processes.failed, died)
        finally:
            await processes.end(signals, is_dead=engine.died.is_set())
        return EXIT_ENGINE_FAILED if engine.died.is_set() else EXIT_OK
    except ApiServerFailedError:
        raise
    except EngineFailedError as error:
        raise error.after("The engine could not start") from error
    finally:
        processes.kill()
        for task in watching:
            task.cancel()
        processes.bus.close()
        await engine.stop()


async def _before(stopped: asyncio.Future[Any], failed: asyncio.Future[None], work: asyncio.Future[Any]) -> bool:
    """Waits until one of the futures is done. Returns whether `work` is done. Raises the error of `work` or
    `failed`."""
    await asyncio.wait([stopped, failed, work], return_when=asyncio.FIRST_COMPLETED)
    is_done = work.done()
    if not is_done:
        work.cancel()
    for future in (work if is_done else None, failed if failed.done() else None):
        if future is not None:
            await future
    return is_done
