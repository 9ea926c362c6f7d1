"""The engine process: builds the engine, passes requests to it and sends its outputs, one message per step.

It has three threads in addition to the engine's own. The main thread reads commands. The sender thread owns the
outgoing sockets and sends all outputs since its last message together, so the outputs of a step share a message. The
watcher thread ends this process when the parent process has ended for any reason, so the engine never outlives its
server.

There is one outgoing socket, or with several HTTP processes one for each of them (`outbox.py`).
"""

from __future__ import annotations

import gc
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq

from batcher.delivery import Tokens
from batcher.errors import EngineClosedError, EngineDeadError, InvalidRequestError, QueueFullError
from batcher.request import FinishReason, Request, RequestOutput
from batcher.stats import EngineStats
from model.inputs.words import described
from server.engine import wire
from server.engine.adapters import NONE_OF, AdapterError, Adapters, kind_of
from server.engine.child_process import end_with_parent
from server.engine.outbox import ApiServer, Item, Sender, ZmqContext
from server.engine.weight_changes import WeightChanges
from server.logs import JSON, configure_log

STATS_INTERVAL_S = 1.0
EXIT_FAILED = 1


class ServedEngine(Protocol):
    """The methods of `batcher.engine.Engine` that this process uses."""

    def start(self) -> None: ...

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None: ...

    def add_request(self, request: Request, on_output: Callable[[RequestOutput], None]) -> None: ...

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None: ...

    def reset_prefix_cache(self, *, reset_external: bool) -> None: ...

    def stats(self) -> EngineStats: ...

    @property
    def death(self) -> BaseException | None: ...

    def shutdown(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """An engine that a factory has built, and what comes with it."""

    engine: ServedEngine
    info: wire.EngineInfo
    adapters: Adapters | None = None  # None: requests cannot name LoRA adapters
    weights: WeightChanges | None = None  # None: it cannot pause or change its weights
    after_shutdown: Callable[[], None] = lambda: None

    def listen(self, put: Callable[[Item], None]) -> None:
        """Registers `put`, which gets the tokens and events that concern all HTTP processes."""
        self.engine.listen(put)
        for changeable in self._changeable:
            changeable.listen(put)

    def stats(self) -> EngineStats:
        """The engine's statistics as they are now."""
        stats = self.engine.stats()
        if self.weights is not None:
            stats.sleep_states = self.weights.sleep_states
        return stats

    def tell(self, put: Callable[[wire.Event], None]) -> None:
        """Tells a new HTTP process of the adapters and the weights."""
        for changeable in self._changeable:
            changeable.tell(put)

    @property
    def _changeable(self) -> Iterator[Adapters | WeightChanges]:
        return filter(None, (self.adapters, self.weights))

    def take(self, command: wire.Command, put: Callable[[Item], None]) -> None:
        """Carries out a command. `put` gets the outputs of requests, and the replies."""
        match command:
            case wire.Submit(requests=requests):
                self.submit(wire.requests_from_wire(requests), put)
            case wire.Abort(request_ids=request_ids, reason=reason):
                for request_id in request_ids:
                    self.engine.abort(request_id, reason)
            case wire.ResetPrefixCache(reset_external=reset_external):
                self.engine.reset_prefix_cache(reset_external=reset_external)
            case wire.ChangePhase(change=change) if not isinstance(change, wire.ChangeWeights):
                if self.adapters is None:
                    put(wire.Reply(error=NONE_OF[kind_of(change)], number=command.number))
                else:
                    self.adapters.ask(command, put)
            case wire.ChangePhase() | wire.Pause() | wire.Resume() | wire.UpdateWeights():
                if self.weights is None:
                    error = "this engine cannot pause or change its weights while it serves"
                    put(wire.Reply(error=error, number=command.number))
                else:
                    self.weights.ask(command)

    def submit(self, requests: Sequence[Request], put: Callable[[RequestOutput | wire.Output], None]) -> bool:
        """Adds the requests of one HTTP request, all or none. A refusal of one aborts the others. Returns whether all
        were added."""
        add_request = (self.adapters or self.engine).add_request
        for i, request in enumerate(requests):
            try:
                add_request(request, put)
            except Exception as error:
                status, param = status_of(error)
                if status == 500:
                    traceback.print_exc()
                refusal = wire.failure(request.request_id, str(error), status=status, param=param)
                put(refusal)  # before the outputs of the aborts
                for added in requests[:i]:
                    self.engine.abort(added.request_id)
                return False
        return True


class Reporter:
    """Sends reports from a factory to the server. Calling it sends a line about the start. Thread-safe."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender

    def __call__(self, line: str) -> None:
        self._sender.put(wire.Report(line))

    def fail(self, message: str) -> None:
        """Ends this process and all its threads at once, because the engine cannot start or is dead."""
        self._exit(wire.Failed(message), EXIT_FAILED)

    def end(self) -> None:
        """Ends this process at once, because the engine has done its work. The server then ends as well."""
        self._exit(wire.Ended(), 0)

    def _exit(self, last: wire.Event, code: int) -> None:
        self._sender.put(last)
        self._sender.close()
        _exit_now(code)


EngineFactory = Callable[[object, Reporter], BuiltEngine]


def load_factory(target: str) -> EngineFactory:
    """Imports the function named `package.module:function`, which is called with `(engine_args, report)`."""
    if ":" not in target:
        raise ValueError(f"an engine factory is named as package.module:function: {target=}")
    factory: EngineFactory = pkgutil.resolve_name(target)
    return factory


def main(commands: str, events: str, target: str, engine_args: object, debug: bool, logs_json: bool) -> None:
    """The entry point of the spawned process.

    An error at the start is sent to the server as one line. With `debug` its traceback is also printed here. With
    `logs_json` its log has the format JSON.

    Args:
        commands: the address of the socket for commands. The engine binds it.
        events: the address of the socket for events. The process that starts the engine binds it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when this process ends
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent()
    if logs_json:
        configure_log("WARNING", JSON, process="engine")
    sender = Sender(events)
    try:
        factory = load_factory(target)
        # The collector reads every object that it knows, and JAX makes hundreds of thousands: a quarter of a second in
        # which no token leaves. Frozen objects are hidden from it, and are still freed when nothing refers to them.
        gc.freeze()  # the imported modules: a start makes enough objects for a full collection or two
        built = factory(engine_args, Reporter(sender))
        engine = built.engine
        built.listen(sender.put)
        engine.start()
        gc.freeze()
    except Exception as error:
        if debug:
            traceback.print_exc()
        # An error of the system without a file's name is of no setting: a host that does not come, a lost socket.
        is_refusal = isinstance(error, ValueError) or (isinstance(error, OSError) and error.filename is not None)
        sender.put(wire.Failed(described(error), is_refusal=is_refusal))
        sender.close()
        sys.exit(EXIT_FAILED)
    sender.put(wire.Ready(built.info))
    context = zmq.Context()
    try:
        _serve(context, commands, built, sender)
        engine.shutdown()
        built.after_shutdown()
    finally:
        if engine.death is not None:
            sender.put(wire.Failed(f"{type(engine.death).__name__}: {engine.death}"))
        sender.close()
        context.term()
    _exit_now(0 if engine.death is None else EXIT_FAILED)


def _exit_now(code: int) -> None:
    """Ends without `sys.exit`, in which the interpreter would wait for a stuck device or for the compiler."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(context: ZmqContext, commands: str, built: BuiltEngine, sender: Sender) -> None:
    """Handles commands until Stop or the engine's death. Sends the statistics every STATS_INTERVAL_S seconds."""
    engine, adapters, weights = built.engine, built.adapters, built.weights
    socket = context.socket(zmq.PULL)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(commands)
    api_servers: dict[int, ApiServer | None] = {}  # by number; None: it has ended
    decode = msgspec.msgpack.Decoder(wire.Command).decode
    next_stats = time.monotonic()
    num_programs_to_come = 0
    try:
        while engine.death is None:
            if time.monotonic() >= next_stats:
                stats = built.stats()
                sender.put(wire.Stats(stats))
                if stats.num_programs_to_come != num_programs_to_come:
                    num_programs_to_come = stats.num_programs_to_come
                    gc.freeze()  # what JAX keeps of the programs that have come
                if adapters is not None:
                    adapters.forget_unused()
                if weights is not None:
                    weights.abandon_overdue()
                next_stats = time.monotonic() + STATS_INTERVAL_S
            if not socket.poll(int(max(0, next_stats - time.monotonic()) * 1000)):
                continue
            match decode(socket.recv()):
                case wire.Submit(requests=requests, api_server=number) if number:
                    if (api_server := api_servers.get(number)) is not None:  # else it has ended since
                        ids = [request.request_id for request in requests]
                        api_server.open.update(ids)
                        if not built.submit(wire.requests_from_wire(requests), api_server.put):
                            api_server.open.difference_update(ids)
                case wire.AddApiServer(api_server=number) as added:
                    if number not in api_servers:  # else it has ended before this has come
                        api_server = api_servers[number] = ApiServer(number, sender.put)
                        sender.put(added)
                        built.tell(api_server.put)
                        api_server.put(wire.Ready(built.info))
                case wire.RemoveApiServer(api_server=number) as removed:
                    api_server, api_servers[number] = api_servers.get(number), None
                    for request_id in () if api_server is None else list(api_server.open):
                        engine.abort(request_id)
                    sender.put(removed)
                case wire.Stop():
                    return
                case command:
                    built.take(command, sender.put)
    finally:
        socket.close()


def status_of(error: Exception) -> tuple[int, str | None]:
    """The HTTP status of an engine's refusal, and the field at fault."""
    match error:
        case AdapterError():
            return error.status, "model"
        case InvalidRequestError():
            return 400, error.param
        case QueueFullError():
            return 429, None
        case EngineClosedError() | EngineDeadError():
            return 503, None
        case _:
            return 500, None
