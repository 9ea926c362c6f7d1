"""The HTTP process's end of the engine, with a real engine process at the other."""

from __future__ import annotations

import asyncio

import pytest
import zmq

from server.engine_client import EngineFailedError, ProcessEngineClient
from tests.server.echo_engine import EchoConfig
from tests.server.running import ECHO


class LateSocket:
    """A socket whose messages are still on their way until somebody waits for them."""

    def __init__(self, socket: zmq.Socket) -> None:
        self._socket = socket
        self._waited = False
        self.recv, self.close = socket.recv, socket.close

    def getsockopt(self, option: int) -> int:
        return 0 if option == zmq.EVENTS and not self._waited else self._socket.getsockopt(option)

    def poll(self, timeout_ms: int) -> int:
        self._waited = True
        return self._socket.poll(timeout_ms)


def test_the_last_words_of_an_engine_are_waited_for():
    async def start() -> None:
        client = ProcessEngineClient(ECHO, EchoConfig(fail_at_start="no room for weights"), report=lambda line: None)
        client._events = LateSocket(client._events)
        try:
            await client.start()
        finally:
            await client.stop()

    with pytest.raises(EngineFailedError, match="no room for weights"):
        asyncio.run(start())
