"""An engine in another process. Its messages go over two ZeroMQ sockets (`wire.py`). The socket's readable callback
passes each output to its request's receiver by a plain call."""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess

import msgspec
import zmq

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.engine import process as engine_process
from server.engine import wire
from server.engine.child_process import start_without_main
from server.engine.client import EngineClient
from server.engine.protocol import EngineFailedError, Receiver
from server.engine.scratch_folder import ScratchFolder, folder_for_sockets
from server.logs import logs_json

logger = logging.getLogger("pallas_serve")

LAST_WORDS_MS = 1000
STOP_TIMEOUT_S = 10.0
RECONNECT_MS = 20  # until the engine has bound its socket
READ_S = 0.005  # longest reading at a time: an engine that is faster than this process must not block the event loop


class RemoteEngine(EngineClient):
    """An `Engine` in another process. Call `start` before use, and always call `stop`.

    This end binds the socket for events, and the engine the one for commands. Commands wait here until the engine has
    bound it. Further processes can send commands to the same engine: each has a `RemoteEngine` with the address
    `commands`, as an API server of the engine. The process that has spawned the engine is API server 0. Only there the
    engine can be asked, and only there `stop` ends it.

    Args:
        commands: the address at which the engine takes commands.
        events: the address of the socket that this end binds.
        api_server: a number that no other process has had; 0: the process that has spawned the engine.
        on_load: called with the number of open requests whenever it may have changed.
    """

    death: str | None = None
    stats = EngineStats()
    last_heartbeat = 0.0

    def __init__(
        self,
        commands: str,
        events: str,
        *,
        api_server: int = 0,
        on_load: Callable[[int], None] = lambda num_open: None,
    ) -> None:
        super().__init__()
        self._adapters_told = asyncio.Event()
        self.died = asyncio.Event()  # also if it has ended as it should, without `death`
        self.last_heartbeat = time.monotonic()
        self.commands = commands
        self.api_server = api_server
        self._on_load = on_load
        self._process: BaseProcess | None = None  # the engine's, if this process has spawned it
        self._folder: ScratchFolder | None = None  # of the sockets
        self._report: Callable[[str], None] = lambda line: None
        self._stopping = False
        self._ready: asyncio.Future[wire.EngineInfo] | None = None
        self._is_ready = False
        self._read_on: asyncio.Handle | None = None  # the rest of a reading that was cut short
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.Event).decode
        self._context = zmq.Context()
        self._commands = self._socket(zmq.PUSH, zmq.SNDHWM)
        self._commands.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self._commands.connect(commands)
        self.events = self._socket(zmq.PULL, zmq.RCVHWM)
        self.events.bind(events)
        self._events_address = events

    @classmethod
    def spawn(
        cls, target: str, engine_args: object, *, report: Callable[[str], None], debug: bool = False
    ) -> RemoteEngine:
        """Starts the engine's process. The arguments are those of `server.engine.group.spawn_engines`."""
        folder = folder_for_sockets()
        commands, events = (f"ipc://{folder.path / name}" for name in ("commands", "events"))
        engine = cls(commands, events)
        engine._folder, engine._report = folder, report
        args = (commands, events, target, engine_args, debug, logs_json())
        engine._process = multiprocessing.get_context("spawn").Process(
            target=engine_process.main, args=args, name="engine"
        )
        start_without_main(engine._process)
        return engine

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(high_water_mark, 0)  # unlimited: nothing is dropped, nothing blocks
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    async def start(self) -> wire.EngineInfo:
        """Waits until the engine is ready. Raises EngineFailedError with the reason if it cannot start."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(int(self.events.getsockopt(zmq.FD)), self.on_readable)
        if self._process is None:
            self._send(wire.AddApiServer(self.api_server, self._events_address))
        else:
            loop.add_reader(self._process.sentinel, self._on_exit)
        self.on_readable()  # the descriptor signals changes only: earlier messages would wait for the next one
        self.info = await self._ready
        return self.info

    async def stop(self) -> None:
        """Closes the sockets. Ends the engine's process if this process has spawned it: sends Stop, and kills it after
        STOP_TIMEOUT_S, or at once if it is still starting."""
        self._stopping = True
        loop = asyncio.get_running_loop()
        if self._process is not None:
            await self._end(self._process)
            loop.remove_reader(self._process.sentinel)
        loop.remove_reader(int(self.events.getsockopt(zmq.FD)))
        if self._read_on is not None:
            self._read_on.cancel()
        self._commands.close()
        self.events.close()
        self._context.term()
        if self._folder is not None:
            self._folder.cleanup()

    async def _end(self, process: BaseProcess) -> None:
        try:
            if self._is_ready and process.is_alive():
                self._send(wire.Stop())
                deadline = time.monotonic() + STOP_TIMEOUT_S
                while process.is_alive() and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
                if process.is_alive():
                    logger.warning("the engine process did not end within %g s: killing it", STOP_TIMEOUT_S)
        finally:
            process.kill()  # has no effect if it has ended
            process.join()

    @property
    def replicas(self) -> Sequence[RemoteEngine]:
        return [self]

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        super().submit(requests)
        self._on_load(self.num_open)

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        super().abort(request_ids, reason)
        self._on_load(self.num_open)

    def abort_all(self) -> None:
        """Aborts every open request. Its receiver gets a last output, with ABORT."""
        if self.death is None:
            self._send(wire.Abort(list(self._receivers)))

    def remove_api_server(self, api_server: int) -> None:
        """Aborts the requests of an HTTP process that has ended."""
        if self.death is None:
            self._send(wire.RemoveApiServer(api_server))

    async def wait_for_adapters(self, num_changes: int) -> None:
        """Waits until the engine has reported at least `num_changes` changes of the adapters, or is dead."""
        while self.adapter_changes < num_changes and self.death is None:
            self._adapters_told.clear()
            await self._adapters_told.wait()

    def _send(self, command: wire.Command) -> None:
        self._commands.send(self._encode(command), zmq.NOBLOCK)

    def on_readable(self) -> None:
        if self._read_on is None:
            self._read_for_a_while()

    def _read_for_a_while(self) -> None:
        """Reads for at most READ_S. The descriptor signals changes only, so the loop's next turn reads the rest."""
        done = self._read(time.monotonic() + READ_S)
        self._read_on = None if done else asyncio.get_running_loop().call_soon(self._read_for_a_while)

    def _read(self, deadline: float = math.inf) -> bool:
        """Reads messages until `deadline`. Returns whether all that have arrived were read."""
        while int(self.events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_event(self._decode(self.events.recv()))
            self._on_load(self.num_open)
            if time.monotonic() >= deadline:
                return False
        return True

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Stats(stats=stats):
                self.stats = stats
                self.last_heartbeat = time.monotonic()
            case wire.Report(line=line):
                self._report(line)
            case wire.Ready(info=info):
                self._is_ready = True
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case wire.Failed(message=message, is_refusal=is_refusal):
                self.die(message, is_refusal=is_refusal)
            case wire.Ended():
                self._stopping = True
                self.died.set()
            case _:
                super()._on_event(event)
                if isinstance(event, wire.Adapters):
                    self._adapters_told.set()

    def _on_exit(self) -> None:
        process = self._process
        assert process is not None
        asyncio.get_running_loop().remove_reader(process.sentinel)
        process.join()
        self._read()
        if process.exitcode == engine_process.EXIT_FAILED:  # its Failed message may not have arrived yet
            while self.death is None and self.events.poll(LAST_WORDS_MS):
                self._read()
        if not self._stopping:
            code = process.exitcode
            killed = ": it was killed, as the system does when memory runs out" if code == -signal.SIGKILL else ""
            self.die(f"the engine process has ended (exit code {code}){killed}")

    def die(self, reason: str, *, is_refusal: bool = False) -> None:
        """Ends every open request with an error, and sets `died`. Only the first call counts. The engine reports its
        death itself, or the process that has spawned it reports it to the others."""
        if self.death is not None:
            return
        self.death = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineFailedError(reason, is_refusal=is_refusal))  # `start` raises it
        else:
            logger.error("engine failure: %s", reason)
        self._receivers.fail_all(f"The engine has failed: {reason}")
        self._asked.close_all(self._reply_of_the_dead())
        self.died.set()
        self._adapters_told.set()
