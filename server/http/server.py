"""uvicorn's server around the application, with this package's connections, limits and listener."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from server.http.connections import Connections
from server.http.listener import Listener
from server.http.protocol import HttpProtocol
from server.http.tls_connection import TlsConnection
from server.http.tls_contexts import TlsContexts
from server.settings import Settings
from server.shared_counts import Row

logger = logging.getLogger("pallas_serve")

FLUSH_S = 5.0  # for the last bytes of answers, before connections are cut


class HttpServer(uvicorn.Server):
    """Serves the sockets given to `serve` until `should_exit`. It installs no signal handlers."""

    def __init__(
        self,
        app: ASGIApp,
        settings: Settings,
        max_connections: int,
        tls: TlsContexts | None = None,
        neighbours: Row | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            server_header=False,
            access_log=False,
            log_config=None,
            log_level="warning",
            timeout_graceful_shutdown=int(FLUSH_S),
        )
        super().__init__(config)
        self._connections = Connections(settings, max_connections, neighbours)
        self._tls = tls
        self._is_private = is_private  # for this server's own processes

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        listeners = [Listener(listener, self._connections, self._connection) for listener in sockets or ()]
        self.servers = listeners  # type: ignore[assignment]  # uvicorn only closes them and waits
        self.started = True
        if not self._is_private:
            logger.info("at most %d connections", self._connections.max_connections)

    def drain(self) -> None:
        """Refuses requests that are not read completely. Answers go on. A new request is its connection's last one."""
        self._connections.draining = True
        for connection in list(self.server_state.connections):
            assert isinstance(connection, HttpProtocol)
            connection.drain()

    def _connection(self) -> asyncio.Protocol:
        if self._tls is None:
            return self._protocol()
        return TlsConnection(self._tls.current, self._connections, self._protocol)

    def _protocol(self) -> asyncio.Protocol:
        return HttpProtocol(
            connections=self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state={},
        )
