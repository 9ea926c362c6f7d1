"""uvicorn's server around the application, with limits on connections and requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from server.http.limits import RequestLimits
from server.http.listener import BACKLOG
from server.http.protocol import ConnectionLimits, LimitedProtocol
from server.http.request_error import unavailable
from server.http.tls import TlsContext
from server.settings import Settings

logger = logging.getLogger("pallas_serve")

FLUSH_S = 5.0  # the time for the last bytes of answers before connections are closed


class HttpServer(uvicorn.Server):
    """Serves the sockets given to `serve` until `should_exit`. It installs no signal handlers."""

    def __init__(self, app: ASGIApp, settings: Settings, max_connections: int, tls: TlsContext | None = None) -> None:
        self._requests = RequestLimits(app, settings)
        self._connections = ConnectionLimits(settings, max_connections)
        self._tls = tls
        config = uvicorn.Config(
            self._requests,
            http=LimitedProtocol,
            ws="none",
            lifespan="off",
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="warning",
            backlog=BACKLOG,
            timeout_keep_alive=round(settings.idle_timeout_s) + 1,  # `LimitedProtocol.check` is exact
            timeout_graceful_shutdown=int(FLUSH_S),
        )
        super().__init__(config)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        tls = None if self._tls is None else self._tls.context
        handshake_s = None if tls is None else self._connections.settings.head_timeout_s
        self.servers = [
            await loop.create_server(
                self._connection, sock=listener, ssl=tls, ssl_handshake_timeout=handshake_s, backlog=BACKLOG
            )
            for listener in sockets or ()
        ]
        self.started = True
        logger.info("at most %d connections", self._connections.max_connections)

    async def on_tick(self, counter: int) -> bool:
        """Checks all connections. uvicorn calls it ten times a second."""
        now = asyncio.get_running_loop().time()
        for connection in list(self.server_state.connections):
            assert isinstance(connection, LimitedProtocol)
            connection.check(now)
        return await super().on_tick(counter)

    def drain(self) -> None:
        """Refuses requests that are not completely read. Running answers go on. Each connection closes after its next
        or current request."""
        self._connections.draining = True
        self._requests.unfinished.refuse_all(unavailable("The server is shutting down.", retry_after_s=5))
        for connection in self.server_state.connections:
            assert isinstance(connection, LimitedProtocol)
            connection.drain()

    def _connection(self) -> LimitedProtocol:
        return LimitedProtocol(
            limits=self._connections, config=self.config, server_state=self.server_state, app_state={}
        )
