"""The server's connection to an engine: sends requests and aborts, receives outputs, and fails all requests when the
engine dies.

All of it runs on the event loop's thread. The socket's readable callback passes each output to its request's receiver
by a plain call. Nothing awaits, so a client that reads slowly delays neither the engine nor other clients.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import zmq

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.engine import wire

logger = logging.getLogger("pallas_serve")

RECONNECT_MS = 20  # until the engine has bound its socket
READ_S = 0.005  # longest reading at a time: an engine that is faster than this process must not block the event loop


class EngineFailedError(RuntimeError):
    """The engine could not start, or has died.

    Args:
        is_refusal: whether the reason is a setting, a path or a checkpoint that cannot be used.
    """

    def __init__(self, message: str, *, is_refusal: bool = False) -> None:
        super().__init__(message)
        self.is_refusal = is_refusal

    def after(self, words: str) -> EngineFailedError:
        """The same failure, with words before its message."""
        return EngineFailedError(f"{words}: {self}", is_refusal=self.is_refusal)


class Receiver(Protocol):
    """Receives the outputs of one request. The first token comes in an output. The last output has a finish reason."""

    def on_output(self, output: wire.Output) -> None: ...

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        """Takes tokens after which the request goes on."""

    def on_weight_version(self, version: str) -> None:
        """Takes the version of the weights of all later tokens. Called once at first, and after each change."""


class Receivers(dict[str, Receiver]):
    """The receivers of open requests, by request id. Outputs of a request that was removed are dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.id_of: dict[int, str] = {}  # number -> id of the requests that have their first output and not the last

    def take(self, outputs: wire.Outputs) -> None:
        for output in outputs.outputs:
            receiver = self.get(output.request_id)
            if output.finish_reason is None:
                self.id_of[output.number] = output.request_id
            else:
                self.id_of.pop(output.number, None)
                self.pop(output.request_id, None)
            if receiver is not None:
                receiver.on_output(output)
        if outputs.tokens is None:
            return
        for number, token_ids in outputs.tokens.rows():
            receiver = self.get(self.id_of[number])
            if receiver is not None:
                receiver.on_tokens(token_ids)

    def fail_all(self, error: str) -> None:
        receivers = self.copy()
        self.clear()
        for request_id, receiver in receivers.items():
            receiver.on_output(wire.failure(request_id, error, status=500))


class EngineLink:
    """Exchanges messages with an engine's process over two sockets. This end binds the socket for events, and the
    engine the one for commands. Commands wait here until the engine has bound it.

    Args:
        API server: the number of this process at the engine.
        on_load: called with the number of open requests whenever it may have changed.
    """

    def __init__(
        self,
        commands: str,
        events: str,
        *,
        api_server: int = 0,
        on_load: Callable[[int], None] = lambda num_open: None,
    ) -> None:
        self.info = wire.EngineInfo(max_model_len=0, vocab_size=0)
        self.stats = EngineStats()
        self.weight_version = wire.DEFAULT_VERSION  # of the tokens that come from now on
        self.adapters: Mapping[str, wire.Adapter] = {}  # by name
        self.adapter_changes = self.num_adapter_loads = 0  # since the engine's start
        self._adapters_told = asyncio.Event()
        self.death: str | None = None
        self.died = asyncio.Event()  # also if it has ended as it should, without `death`
        self.last_heartbeat = time.monotonic()
        self.on_output: Callable[[wire.Output], None] = lambda output: None  # gets each before the request's receiver
        self._api_server = api_server
        self._on_load = on_load
        self._receivers = Receivers()
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

    def _socket(self, kind: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(high_water_mark, 0)  # unlimited: nothing is dropped, nothing blocks
        socket.setsockopt(zmq.LINGER, 0)
        return socket

    def _begin(self) -> asyncio.Future[wire.EngineInfo]:
        """Starts to read events. The returned future gets its result when the engine is ready."""
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        loop.add_reader(int(self.events.getsockopt(zmq.FD)), self.on_readable)
        return self._ready

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(int(self.events.getsockopt(zmq.FD)))
        if self._read_on is not None:
            self._read_on.cancel()
        self._commands.close()
        self.events.close()
        self._context.term()

    @property
    def num_open(self) -> int:
        return len(self._receivers)

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        for request, receiver in requests:
            receiver.on_weight_version(self.weight_version)
            self._receivers[request.request_id] = receiver
        self._send(wire.Submit([request for request, _ in requests], self._api_server))
        self._on_load(self.num_open)

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        known = [request_id for request_id in request_ids if self._receivers.pop(request_id, None) is not None]
        if known and self.death is None:
            self._send(wire.Abort(known, reason))
        self._on_load(self.num_open)

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        if self.death is None:
            self._send(wire.ResetPrefixCache(reset_external))

    def abort_all(self) -> None:
        """Aborts every open request. Its receiver gets a last output, with ABORT."""
        if self.death is None:
            self._send(wire.Abort(list(self._receivers)))

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
            case wire.Outputs(outputs=outputs):
                for output in outputs:
                    self.on_output(output)
                self._receivers.take(event)
            case wire.WeightVersion(version=version):
                self.weight_version = version
                for receiver in self._receivers.values():
                    receiver.on_weight_version(version)
            case wire.Stats(stats=stats):
                self.stats = stats
                self.last_heartbeat = time.monotonic()
            case wire.Adapters(adapters=adapters, num_changes=num_changes, num_loads=num_loads):
                self.adapters = {adapter.name: adapter for adapter in adapters}
                self.adapter_changes, self.num_adapter_loads = num_changes, num_loads
                self._adapters_told.set()
            case wire.Ready(info=info):
                self._is_ready = True
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case wire.Failed(message=message, is_refusal=is_refusal):
                self.die(message, is_refusal=is_refusal)
            case wire.Ended():
                self.died.set()

    def die(self, reason: str, *, is_refusal: bool = False) -> None:
        """Ends every open request with an error, and sets `died`. Only the first call counts."""
        if self.death is not None:
            return
        self.death = reason
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(EngineFailedError(reason, is_refusal=is_refusal))  # `start` raises it
        else:
            logger.error("engine failure: %s", reason)
        self._receivers.fail_all(f"The engine has failed: {reason}")
        self.died.set()
        self._adapters_told.set()
