"""The HTTP process's client of the engine: sends requests and aborts, receives outputs, and notices the engine's death.

All of it runs on the event loop's thread. The socket's readable callback passes each output to its request's sink by a
plain call (`sinks.py`). Nothing awaits, so a client that reads slowly delays neither the engine nor other clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Protocol

import msgspec
import zmq

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.engine import process as engine_process
from server.engine import wire
from server.engine.scratch_folder import NAME_LENGTH, ScratchFolder
from server.engine.sinks import Sink, Sinks

logger = logging.getLogger("pallas_serve")

LAST_WORDS_MS = 1000
READ_S = 0.005  # longest reading at a time: an engine that is faster than this process must not block the event loop
SOCKETS = ("commands", "events")
SHORT_FOLDERS = ("/tmp", "/var/tmp")  # if the system's temporary folder has too long a path for a socket


class EngineFailedError(RuntimeError):
    """The engine could not start, or has died."""


class WeightsError(Exception):
    """The weights cannot be changed, and the engine goes on with those it has."""


class EngineClient(Protocol):
    """The engine's interface for the routes. `ProcessEngineClient` implements it."""

    info: wire.EngineInfo

    @property
    def stats(self) -> EngineStats: ...

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Sink]]) -> None: ...

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """The requests' sinks get no more outputs. Unknown and finished ids are ignored."""

    def reset_prefix_cache(self) -> None:
        """No later prompt finds the pages of the earlier ones."""

    @property
    def death(self) -> str | None:
        """The reason of the engine's death; None while it lives."""

    @property
    def last_heartbeat(self) -> float:
        """The time of the engine's last statistics, by the monotonic clock."""


class ProcessEngineClient:
    """Spawns the engine process and exchanges messages with it. Call `start` before use, and `stop` in any case."""

    def __init__(self, target: str, engine_args: object, *, report: Callable[[str], None], debug: bool = False) -> None:
        self.info = wire.EngineInfo(max_model_len=0, vocab_size=0)
        self.stats = EngineStats()
        self.death: str | None = None
        self.died = asyncio.Event()  # also if it has ended as it should, without `death`
        self.last_heartbeat = time.monotonic()
        self.is_sleeping = False
        self._changes = asyncio.Lock()
        self._changed: asyncio.Future[str | None] | None = None
        self._report = report
        self._sinks = Sinks()
        self._ready: asyncio.Future[wire.EngineInfo] | None = None
        self._is_ready = False
        self._read_on: asyncio.Handle | None = None  # the rest of a reading that was cut short
        self._stopping = False
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(wire.Event).decode
        self._folder = ScratchFolder(_root_for_sockets())
        addresses = [f"ipc://{self._folder.path / name}" for name in SOCKETS]
        self._context = zmq.Context()
        self._commands = self._bind(zmq.PUSH, zmq.SNDHWM, addresses[0])
        self._events = self._bind(zmq.PULL, zmq.RCVHWM, addresses[1])
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_process.main, args=(tuple(addresses), target, engine_args, debug), name="engine"
        )
        _start_without_main(self.process)

    def _bind(self, kind: int, high_water_mark: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(high_water_mark, 0)  # unlimited: nothing is dropped, nothing blocks
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(address)
        return socket

    async def start(self) -> wire.EngineInfo:
        """Waits until the engine is ready. Raises EngineFailedError with the reason if it cannot start."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(int(self._events.getsockopt(zmq.FD)), self._on_readable)
        loop.add_reader(self.process.sentinel, self._on_exit)
        self._on_readable()  # the descriptor signals changes only: earlier messages would wait for the next one
        self.info = await self._ready
        return self.info

    @property
    def num_open(self) -> int:
        """Requests that have not had their last output."""
        return len(self._sinks)

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Sink]]) -> None:
        for request, sink in requests:
            self._sinks.add(request.request_id, sink)
        self._send(wire.Submit([request for request, _ in requests]))

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        known = [request_id for request_id in request_ids if self._sinks.remove(request_id)]
        if known and self.death is None:
            self._send(wire.Abort(known, reason))

    def reset_prefix_cache(self) -> None:
        if self.death is None:
            self._send(wire.ResetPrefixCache())

    async def change_weights(self, change: wire.WeightsChange, model: str | None = None) -> None:
        """Changes the weights between two steps, one change after the other. An engine that sleeps, or is awake, stays
        so. Requests wait until an engine that sleeps wakes up.

        Raises WeightsError if they cannot be changed.
        """
        await asyncio.shield(self._change_weights(change, model))  # to its end, also without a caller

    async def _change_weights(self, change: wire.WeightsChange, model: str | None) -> None:
        async with self._changes:
            if change is wire.WeightsChange.RELOAD and self.is_sleeping:
                raise WeightsError("the engine sleeps: wake it up before other weights are loaded")
            if change is (wire.WeightsChange.SLEEP if self.is_sleeping else wire.WeightsChange.WAKE_UP):
                return
            if self.death is not None:
                raise WeightsError(f"the engine has failed: {self.death}")
            self._changed = asyncio.get_running_loop().create_future()
            self._send(wire.ChangeWeights(change, model))
            error = await self._changed
            if error is not None:
                raise WeightsError(error)
            if change is not wire.WeightsChange.RELOAD:
                self.is_sleeping = change is wire.WeightsChange.SLEEP

    def abort_all(self) -> None:
        """Ends every open request with ABORT. Its sink gets that output."""
        if self.death is None:
            self._send(wire.Abort(self._sinks.request_ids))

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Ends the process: sends Stop, and kills it after `timeout_s`. Kills it at once if it is still starting."""
        self._stopping = True
        try:
            if self._is_ready and self.process.is_alive():
                self._send(wire.Stop())
                deadline = time.monotonic() + timeout_s
                while self.process.is_alive() and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
                if self.process.is_alive():
                    logger.warning("the engine process did not end within %g s: killing it", timeout_s)
        finally:
            self.process.kill()  # has no effect if it has ended
            self.process.join()
        loop = asyncio.get_running_loop()
        loop.remove_reader(int(self._events.getsockopt(zmq.FD)))
        loop.remove_reader(self.process.sentinel)
        if self._read_on is not None:
            self._read_on.cancel()
        self._commands.close()
        self._events.close()
        self._context.term()
        self._folder.cleanup()

    def _send(self, command: wire.Command) -> None:
        try:
            self._commands.send(self._encode(command), zmq.NOBLOCK)
        except zmq.Again:  # no process is connected; if the engine has died, `_on_exit` will report it
            logger.warning("the engine process did not take a command: %s", type(command).__name__)

    def _on_readable(self) -> None:
        if self._read_on is None:
            self._read_for_a_while()

    def _read_for_a_while(self) -> None:
        """Reads for at most READ_S. The descriptor signals changes only, so the loop's next turn reads the rest."""
        done = self._read(time.monotonic() + READ_S)
        self._read_on = None if done else asyncio.get_running_loop().call_soon(self._read_for_a_while)

    def _read(self, deadline: float = math.inf) -> bool:
        """Reads messages until `deadline`. Returns whether all that have arrived were read."""
        while int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._on_event(self._decode(self._events.recv()))
            if time.monotonic() >= deadline:
                return False
        return True

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Outputs():
                self._sinks.take(event)
            case wire.Stats(stats=stats):
                self.stats = stats
                self.last_heartbeat = time.monotonic()
            case wire.Report(line=line):
                self._report(line)
            case wire.Ready(info=info):
                self._is_ready = True
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case wire.Changed(error=error):
                self._answer_change(error)
            case wire.Failed(message=message):
                self._die(message)
            case wire.Ended():
                self._stopping = True
                self.died.set()

    def _answer_change(self, error: str | None) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(error)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.process.join()
        self._read()
        if self.process.exitcode == engine_process.EXIT_FAILED:  # its Failed message may not have arrived yet
            while self.death is None and self._events.poll(LAST_WORDS_MS):
                self._read()
        if not self._stopping:
            self._die(f"the engine process has ended (exit code {self.process.exitcode})")

    def _die(self, reason: str) -> None:
        """Ends every open request with an error, and sets `died`."""
        if self.death is not None:
            return
        self.death = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineFailedError(reason))  # `start` raises it
        else:
            logger.error("engine failure: %s", reason)
        self._sinks.fail_all(f"The engine has failed: {reason}")
        self._answer_change(f"the engine has failed: {reason}")
        self.died.set()


def _start_without_main(process: multiprocessing.process.BaseProcess) -> None:
    """Starts a process that does not import this process's main module.

    By default, a spawned process first imports it, and with it the HTTP server: half a second of every start. The
    engine's target and its arguments are in modules of their own.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main


def _root_for_sockets() -> Path:
    """The system's temporary folder, or a shorter one if a socket's path in it would be too long for the system.

    Raises OSError if there is none.
    """
    preferred = Path(tempfile.gettempdir())
    if _fits(preferred):
        return preferred
    for root in map(Path, SHORT_FOLDERS):
        if os.access(root, os.W_OK | os.X_OK):
            logger.warning("TMPDIR is too long for the path of a socket: the engine's sockets are in %s", root)
            return root
    raise OSError(
        f"TMPDIR is too long for the engine's sockets, whose paths have at most {zmq.IPC_PATH_MAX_LEN} bytes, and "
        f"neither of {', '.join(SHORT_FOLDERS)} can be written to: set TMPDIR to a shorter folder"
    )


def _fits(root: Path) -> bool:
    try:
        length = len(str(root).encode())
    except UnicodeEncodeError:  # zmq's addresses are text
        return False
    return length + 1 + NAME_LENGTH + 1 + max(map(len, SOCKETS)) <= zmq.IPC_PATH_MAX_LEN
