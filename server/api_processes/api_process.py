"""One of several HTTP processes. It serves the parent's address with the engines that the parent has started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any

import uvloop

from model.inputs.words import described, is_worded
from server.api import peers
from server.api.routes.admin import aborted_by_administrator
from server.api.state import ServerState
from server.api.tracing import make_tracer
from server.app import create_app
from server.bus import TIMEOUT_S, Bus, NoReplyError
from server.engine.child_process import end_with_parent
from server.engine.group import EngineGroup, ServerEngine
from server.engine.protocol import EngineFailedError
from server.engine.remote import RemoteEngine
from server.engine.routing import Router
from server.http.descriptors import connection_limit, raise_limit
from server.http.listener import BACKLOG, listener_beside
from server.http.server import HttpServer
from server.http.signals import Shutdown, first_of
from server.http.tls import TlsContext
from server.logs import configure_log
from server.serve_until_end import EXIT_OK, load_state, serve
from server.settings import Settings
from server.shared_counts import PrefixTable, Row, SharedCounts

logger = logging.getLogger("pallas_serve")

EXIT_NOT_STARTED = 1
BUS = "bus"  # the name of the parent's socket
COUNTS_INTERVAL_S = 1.0  # a process that is killed loses its counts since the last report


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessArgs:
    """The arguments of one HTTP process among several."""

    settings: Settings
    listener: socket.socket
    number: int  # its row of the shared counts
    api_server: int  # no other process has had this number
    replaces: bool  # whether it takes the place of a process that has ended
    engines: Sequence[str]  # the addresses at which the engines take commands
    folder: Path  # has the private sockets
    shared_counts: SharedCounts
    log_level: int
    is_logging: bool  # whether the parent's log is configured


def main(args: ProcessArgs) -> None:
    """The entry point of the spawned process. The parent decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if args.is_logging:
        configure_log(args.log_level, args.settings.log_format, process=f"http {args.number}")
    logger.setLevel(args.log_level)
    sys.exit(uvloop.run(_serve(args)))


async def _serve(args: ProcessArgs) -> int:
    process = _ApiProcess(args)
    try:
        return await process.serve()
    except Exception as error:
        if args.settings.debug or not is_worded(error):
            traceback.print_exc()
        with contextlib.suppress(NoReplyError):  # the parent sees that this process ends
            await process.bus.ask(peers.NotStarted(described(error), is_worded(error)), NoneType)
        return EXIT_NOT_STARTED
    finally:
        process.bus.close()


class _ApiProcess:
    def __init__(self, args: ProcessArgs) -> None:
        self._args = args
        self._row = Row(args.shared_counts, args.number)
        self._ending = Shutdown()
        self.bus = Bus(args.folder / BUS, args.api_server, peers.ToHttpProcess, self._answer)
        # These are there before the parent asks anything.
        self._engines: list[RemoteEngine] = []
        self._state: ServerState | None = None

    async def serve(self) -> int:
        args = self._args
        settings = args.settings
        raise_limit()
        tls = None
        if settings.tls is not None:  # while other processes serve, this one waits for files that can be used
            tls = await TlsContext.when_usable(settings.tls) if args.replaces else TlsContext(settings.tls)
        tracer = make_tracer(settings)
        engines = self._engines = [
            RemoteEngine(
                commands,
                f"ipc://{args.folder}/e{number}-{args.api_server}",
                api_server=args.api_server,
                on_load=partial(self._row.set_open, number),
            )
            for number, commands in enumerate(args.engines)
        ]
        engine: ServerEngine = engines[0]
        if len(engines) > 1:  # all processes choose engines by what all of them have sent there
            engine = EngineGroup(engines, Router(PrefixTable(args.shared_counts)), self._row)
        try:
            state = await asyncio.to_thread(load_state, settings, engine, args.folder)
            state.peers = peers.Peers(self.bus, self._row)
            state.tracer, state.drained = tracer, args.shared_counts.drained
            self._state = state
            app = create_app(state)
            if not await self._engine_is_ready(engine):
                return EXIT_OK
            if not args.replaces:  # later, a model without its files is no reason not to serve the others
                await state.models.read_all()
            asked = settings.max_connections
            own = None if asked is None else -(-asked // settings.api_server_count)
            server = HttpServer(app, settings, connection_limit(own), tls)
            async with contextlib.nullcontext() if tls is None else tls.refreshed():
                listener = listener_beside(args.listener)
                listener.listen(BACKLOG)  # clients wait here until this process may accept
                await self._tell(peers.Started(), timeout_s=None)  # answered when it may accept
                counting = asyncio.create_task(self._count(state))
                with contextlib.closing(state):
                    code = await serve(state, engine, server, self._ending, listener, lambda: None)
                counting.cancel()
            return code
        finally:
            await engine.stop()
            if tracer is not None:
                tracer.close()

    async def _engine_is_ready(self, engine: ServerEngine) -> bool:
        """Waits until the engine is ready. Returns False if this process must end before that."""
        starting = asyncio.create_task(engine.start())
        await first_of(asyncio.wait([starting]), self._ending.stop.wait())
        if not starting.done():
            starting.cancel()
            return False
        try:
            await starting
        except EngineFailedError:  # the parent hears it, too, and ends this process
            await self._ending.stop.wait()
            return False
        return True

    async def _count(self, state: ServerState) -> None:
        while True:
            await self._tell(peers.Counted(state.metrics.counts(), asks=False))
            await asyncio.sleep(COUNTS_INTERVAL_S)

    async def _tell(self, message: object, *, timeout_s: float | None = TIMEOUT_S) -> None:
        try:
            await self.bus.ask(message, NoneType, timeout_s=timeout_s)
        except NoReplyError as error:
            logger.warning("the parent process has not taken a message: %s", error)

    async def _answer(self, question: Any, sender: int) -> object:
        """The reply to a question of the parent."""
        match question:
            case peers.End():
                self._ending.ask()
            case peers.EngineDied(engine=number, reason=reason):
                self._engines[number].die(reason)
            case peers.AdapterChanges(numbers=numbers):
                for engine, number in zip(self._engines, numbers, strict=True):
                    await engine.wait_for_adapters(number)
            case peers.AbortRequests(request_ids=request_ids):
                assert self._state is not None
                return self._state.abort(request_ids, aborted_by_administrator())
            case peers.SetLogLevel(level=level):
                logger.setLevel(level)
        return None
