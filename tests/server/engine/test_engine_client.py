"""The HTTP process's end of the engine, with a real engine process at the other."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from importlib.util import find_spec

import msgspec
import pytest
import zmq

from batcher.stats import EngineStats
from server.engine import scratch_folder, wire
from server.engine.protocol import EngineFailedError
from server.engine.remote import RemoteEngine
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import ECHO, running_server


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


class EndlessSocket:
    """There is always one message more."""

    def __init__(self) -> None:
        self._message = msgspec.msgpack.encode(wire.Stats(EngineStats()))
        self.num_read = 0

    def getsockopt(self, option: int) -> int:
        return zmq.POLLIN

    def recv(self) -> bytes:
        self.num_read += 1
        return self._message


def test_an_engine_that_is_faster_than_its_reader_leaves_the_loop_to_others():
    async def read() -> int:
        client = RemoteEngine.spawn(ECHO, EchoConfig(), report=lambda line: None)
        await client.start()
        endless, events = EndlessSocket(), client.events
        client.events = endless
        client.on_readable()
        for _ in range(3):
            num_read = endless.num_read
            await asyncio.sleep(0)
            assert endless.num_read > num_read  # it goes on, turn by turn
        client.events = events
        await client.stop()
        return endless.num_read

    assert asyncio.run(asyncio.wait_for(read(), 60)) > 3


def test_the_last_words_of_an_engine_are_waited_for():
    async def start() -> None:
        client = RemoteEngine.spawn(ECHO, EchoConfig(fail_at_start="no room for weights"), report=lambda line: None)
        client.events = LateSocket(client.events)
        try:
            await client.start()
        finally:
            await client.stop()

    with pytest.raises(EngineFailedError, match="no room for weights"):
        asyncio.run(start())


def say_main(_: object, report: object) -> None:
    raise ValueError(f"main: {getattr(sys.modules['__main__'], '__file__', None)}")


def test_the_engines_process_does_not_import_the_main_module_of_the_servers(monkeypatch):
    """It would import the HTTP server with it, before anything else."""
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__spec__", find_spec("tests.server.support.launch"))

    async def start() -> None:
        client = RemoteEngine.spawn(f"{__name__}:say_main", None, report=lambda line: None)
        assert sys.modules["__main__"] is main
        try:
            await client.start()
        finally:
            await client.stop()

    with pytest.raises(EngineFailedError, match="main: None"):
        asyncio.run(start())


def test_a_long_tmpdir_is_no_obstacle(tmp_path):
    """The path of a UNIX socket has at most 107 bytes."""
    long = tmp_path / ("t" * 120)
    long.mkdir()
    environment = {**os.environ, "TMPDIR": str(long)}
    with running_server(tmp_path, ECHO, EchoConfig(), env=environment) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        assert server.log.count("TMPDIR is too long") == 1
        assert "/tmp" in server.log
        assert len(server.log.splitlines()) == 1


def test_where_no_folder_is_short_enough_tmpdir_is_named(tmp_path, monkeypatch):
    long = tmp_path / ("t" * 120)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(scratch_folder, "SHORT_FOLDERS", (str(tmp_path / "none"),))
    with pytest.raises(OSError, match=r"TMPDIR is too long .* set TMPDIR to a shorter folder"):
        RemoteEngine.spawn(ECHO, EchoConfig(), report=lambda line: None)
