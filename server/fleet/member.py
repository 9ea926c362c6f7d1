"""One of several HTTP processes: serves the inherited socket, with the engines that the parent has started."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import uvloop

from model.inputs.words import described, is_worded
from server.api.peers import PARENT, TIMEOUT_S, Counted, NotStarted, Peers, Started
from server.api.state import ServerState
from server.api.tracing import make_tracer
from server.app import create_app
from server.board import Row, SharedPrefixes
from server.engine.door import DoorClient
from server.engine.group import EngineGroup
from server.engine.link import EngineFailedError
from server.engine.orphans import end_with_parent
from server.engine.routing import Router
from server.fleet.member_app import member_app
from server.fleet.membership import Membership, events_name, socket_name
from server.http.connections import ConnectionLimits
from server.http.descriptors import raise_limit
from server.http.private import PrivateCallError, call, private_listener
from server.http.server import HttpServer, connection_limits
from server.http.signals import Ending, first_of
from server.http.tls.refresh import TlsContexts
from server.logs import FORMAT_OF_SEVERAL
from server.serving import EXIT_OK, load_state, serve
from server.settings import Settings, TlsFiles

logger = logging.getLogger("pallas_serve")

EXIT_NOT_STARTED = 1
COUNTS_INTERVAL_S = 1.0  # a killed process loses what it has counted since
PRIVATE_SHARE = 4  # one connection in so many is kept for requests that other processes send on


def main(membership: Membership) -> None:
    """The entry point of the spawned process. The parent decides when it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if membership.is_logging:
        line_format = FORMAT_OF_SEVERAL.format(number=membership.number)
        logging.basicConfig(level=membership.log_level, format=line_format)
    logger.setLevel(membership.log_level)
    sys.exit(uvloop.run(_run(membership)))


async def _run(membership: Membership) -> int:
    try:
        return await _Member(membership).run()
    except Exception as error:
        if membership.settings.debug or not is_worded(error):
            traceback.print_exc()
        message = NotStarted(membership.door, described(error), is_worded(error))
        with contextlib.suppress(PrivateCallError):  # the parent sees that this process ends
            await call(membership.folder / PARENT, "/not_started", msgspec.msgpack.encode(message), timeout_s=TIMEOUT_S)
        return EXIT_NOT_STARTED


class _Member:
    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._parent = membership.folder / PARENT
        self._row = Row(membership.board, membership.number)
        self._ending = Ending()

    async def run(self) -> int:
        given = self._membership
        settings = given.settings
        raise_limit()
        tls = None if settings.tls is None else await self._contexts(settings.tls)
        tracer = make_tracer(settings)
        engines = [self._engine(number) for number in range(len(given.engines))]
        client = engines[0] if len(engines) == 1 else self._group(engines)
        private = private_listener(given.folder / socket_name(given.door))
        try:
            state = await asyncio.to_thread(load_state, settings, client)
            state.peers = Peers(given.folder, given.door, self._row)
            state.tracer = tracer
            app = create_app(state)
            public_limits, private_limits = _limits(settings)
            inside = HttpServer(member_app(state, app, engines, self._ending), private_limits, is_private=True)
            serving_inside = asyncio.create_task(inside.serve(sockets=[private]))
            if not await self._engine_is_ready(client):
                return EXIT_OK
            is_total = settings.max_connections is not None
            server = HttpServer(app, public_limits, tls, self._row, limits_are_total=is_total)
            async with contextlib.nullcontext() if tls is None else tls.refreshed():
                await self._tell("/started", Started(given.door), timeout_s=None)
                self._row.set_connections(0)
                counting = asyncio.create_task(self._count(state))
                with contextlib.closing(state):
                    code = await serve(state, client, server, self._ending, given.listener, lambda: None)
                counting.cancel()
            inside.should_exit = True
            await serving_inside
            return code
        finally:
            await client.stop()
            if tracer is not None:
                tracer.close()

    async def _contexts(self, files: TlsFiles) -> TlsContexts:
        """Raises ValueError for files that cannot be used. While other processes serve, this one waits for such that
        can."""
        return await TlsContexts.when_usable(files) if self._membership.replaces else TlsContexts(files)

    async def _engine_is_ready(self, client: DoorClient | EngineGroup[DoorClient]) -> bool:
        """Waits until it is, and returns False if this process is to end before."""
        starting = asyncio.create_task(client.start())
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

    def _engine(self, number: int) -> DoorClient:
        given = self._membership

        def on_load(num_open: int) -> None:
            self._row.set_load(number, num_open)

        return DoorClient(given.engines[number], given.folder / events_name(number, given.door), given.door, on_load)

    def _group(self, engines: Sequence[DoorClient]) -> EngineGroup[DoorClient]:
        """All processes choose engines by what all of them have sent there."""
        return EngineGroup(engines, Router(SharedPrefixes(self._membership.board)), self._row.loads)

    async def _count(self, state: ServerState) -> None:
        """Tells the parent at intervals what this process has counted."""
        while True:
            await self._tell("/counts", Counted(self._membership.door, state.metrics.counts(), asks=False))
            await asyncio.sleep(COUNTS_INTERVAL_S)

    async def _tell(self, target: str, message: object, *, timeout_s: float | None = TIMEOUT_S) -> None:
        try:
            await call(self._parent, target, msgspec.msgpack.encode(message), timeout_s=timeout_s)
        except PrivateCallError as error:
            logger.warning("the parent process has not taken a message: %s", error)


def _limits(settings: Settings) -> tuple[ConnectionLimits, ConnectionLimits]:
    """Of clients' connections, and of those from other processes. A request that is sent on takes one more descriptor
    in each of the two processes."""
    public = connection_limits(settings)
    between = max(1, public.max_connections // PRIVATE_SHARE)
    if settings.max_connections is None:
        public = replace(public, max_connections=max(1, public.max_connections - 2 * between))
    return public, replace(public, max_connections=between)
