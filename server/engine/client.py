"""The engine as the routes see it, and the client that runs the engine's process and exchanges messages with it."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec

from batcher.request import FinishReason
from batcher.stats import EngineStats
from server.engine import process as engine_process
from server.engine import wire
from server.engine.adapters import AdapterError
from server.engine.changes import Changeable, to_its_end
from server.engine.child_process import start_without_main
from server.engine.link import EngineLink, Receiver
from server.engine.scratch_folder import folder_for_sockets

logger = logging.getLogger("pallas_serve")

LAST_WORDS_MS = 1000
STOP_TIMEOUT_S = 10.0


class WeightsError(Exception):
    """The weights cannot be changed, or the engine cannot pause. The engine continues unchanged."""


class EngineClient(Protocol):
    """The engine's interface for the routes. `ProcessEngineClient` implements it."""

    info: wire.EngineInfo

    @property
    def stats(self) -> EngineStats: ...

    @property
    def adapters(self) -> Mapping[str, wire.Adapter]:
        """The LoRA adapters that are loaded, by name."""

    @property
    def num_adapter_loads(self) -> int:
        """The number of LoRA adapters that have been loaded so far."""

    @property
    def weight_version(self) -> str:
        """The name of the weights that serve. Receivers get each change of it, in order with the tokens."""

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None: ...

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends requests. Their receivers get no more outputs. Unknown and finished ids are ignored."""

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        """Empties the prefix cache. `reset_external` also empties the tiers outside the device."""

    @property
    def death(self) -> str | None:
        """The reason why the engine is dead; None while it lives."""

    @property
    def last_heartbeat(self) -> float:
        """The time of the engine's last statistics, by the monotonic clock."""


class ProcessEngineClient(EngineLink, Changeable):
    """Spawns the engine process and exchanges messages with it. Call `start` before use, and always call `stop`.

    Further processes can send commands to the engine at the address `commands`.
    """

    def __init__(self, target: str, engine_args: object, *, report: Callable[[str], None], debug: bool = False) -> None:
        self.missing: Set[str] = frozenset()  # names in `wire.PARTS` of the parts that are not on the engine's devices
        self.is_paused = False
        Changeable.__init__(self)
        self._asked: dict[int, asyncio.Future[wire.Reply]] = {}  # by the number of the question
        self._numbers = count(1)
        self._report = report
        self._stopping = False
        self._folder = folder_for_sockets()
        self.commands, events = (f"ipc://{self._folder.path / name}" for name in ("commands", "events"))
        EngineLink.__init__(self, self.commands, events)
        self.process = multiprocessing.get_context("spawn").Process(
            target=engine_process.main, args=(self.commands, events, target, engine_args, debug), name="engine"
        )
        start_without_main(self.process)

    async def start(self) -> wire.EngineInfo:
        """Waits until the engine is ready. Raises EngineFailedError with the reason if it cannot start."""
        ready = self._begin()
        asyncio.get_running_loop().add_reader(self.process.sentinel, self._on_exit)
        self.on_readable()  # the descriptor signals changes only: earlier messages would wait for the next one
        self.info = await ready
        return self.info

    def remove_api_server(self, api_server: int) -> None:
        """Aborts the requests of an HTTP process that has ended."""
        if self.death is None:
            self._send(wire.RemoveApiServer(api_server))

    @property
    def is_sleeping(self) -> bool:
        return bool(self.missing)

    @to_its_end
    async def pause(self, mode: wire.PauseMode = wire.PauseMode.ABORT, clear_cache: bool = True) -> None:
        """Pauses the engine. Returns when no request runs. Later requests wait until `resume`, also while it sleeps.

        Raises WeightsError if `resume` is called before no request runs.
        """
        await self._ask_of_weights(wire.Pause(mode, clear_cache))
        self.is_paused = True

    @to_its_end
    async def resume(self) -> None:
        """Lets requests run again. Has no effect on an engine that is not paused."""
        await self._ask_of_weights(wire.Resume())
        self.is_paused = False

    @to_its_end
    async def update_weights(self, step: wire.UpdateStep, source: wire.WeightsSource | None = None) -> None:
        """Does one step of an update of the weights, whose `source` is for RECEIVE. `change_weights` ends it with
        UPDATE.

        Raises WeightsError: the step failed. After a failed BEGIN there is no update.
        """
        async with self._weight_changes:
            await self._ask_of_weights(wire.UpdateWeights(step, source))

    async def do(self, phase: wire.Phase, change: wire.Change) -> wire.Adapter | None:
        question = wire.ChangePhase(phase, change)
        if isinstance(change, wire.ChangeWeights):
            await self._ask_of_weights(question)
            return None
        reply = await self.ask(question)
        if reply.error is not None:
            raise AdapterError(reply.error, reply.status)
        return reply.adapter

    async def _ask_of_weights(self, question: wire.EngineQuestion) -> None:
        """Asks about the weights. Raises WeightsError if nothing has changed."""
        reply = await self.ask(question)
        if reply.missing is not None:
            self.missing = frozenset(reply.missing)
        if reply.error is not None:
            raise WeightsError(reply.error)

    async def ask(self, question: wire.EngineQuestion) -> wire.Reply:
        """Sends a question and waits for its reply. A dead engine's reply is an error with status 503."""
        number = next(self._numbers)
        if self.death is not None:
            return self._reply_of_the_dead(number)
        replied: asyncio.Future[wire.Reply] = asyncio.get_running_loop().create_future()
        self._asked[number] = replied
        self._send(msgspec.structs.replace(question, number=number))
        return await replied

    def _reply_of_the_dead(self, number: int) -> wire.Reply:
        return wire.Reply(number=number, error=f"The engine has failed: {self.death}", status=503)

    async def stop(self) -> None:
        """Ends the process: sends Stop, and kills it after STOP_TIMEOUT_S. Kills it at once if it is still starting."""
        self._stopping = True
        try:
            if self._is_ready and self.process.is_alive():
                self._send(wire.Stop())
                deadline = time.monotonic() + STOP_TIMEOUT_S
                while self.process.is_alive() and time.monotonic() < deadline:
                    await asyncio.sleep(0.02)
                if self.process.is_alive():
                    logger.warning("the engine process did not end within %g s: killing it", STOP_TIMEOUT_S)
        finally:
            self.process.kill()  # has no effect if it has ended
            self.process.join()
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self._close()
        self._folder.cleanup()

    def _on_event(self, event: wire.Event) -> None:
        match event:
            case wire.Report(line=line):
                self._report(line)
            case wire.Reply():
                self._take_reply(event)
            case wire.Ended():
                self._stopping = True
                self.died.set()
            case _:
                super()._on_event(event)

    def _take_reply(self, reply: wire.Reply) -> None:
        asked = self._asked.pop(reply.number, None)
        if asked is not None and not asked.done():
            asked.set_result(reply)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self.process.sentinel)
        self.process.join()
        self._read()
        if self.process.exitcode == engine_process.EXIT_FAILED:  # its Failed message may not have arrived yet
            while self.death is None and self.events.poll(LAST_WORDS_MS):
                self._read()
        if not self._stopping:
            code = self.process.exitcode
            killed = ": it was killed, as the system does when memory runs out" if code == -signal.SIGKILL else ""
            self.die(f"the engine process has ended (exit code {code}){killed}")

    def die(self, reason: str, *, is_refusal: bool = False) -> None:
        super().die(reason, is_refusal=is_refusal)
        for number in list(self._asked):
            self._take_reply(self._reply_of_the_dead(number))


class ApiServerClient(EngineLink):
    """The client of an engine that another process has started. Call `start` before use, and always call `stop`.

    The engine reports its death itself, or the parent process reports it with `die`.

    Args:
        commands: the address at which the engine takes commands.
        events: the path of the socket that this process binds.
        API server: a number that no other process has had.
        on_load: called with the number of open requests whenever it may have changed.
    """

    def __init__(self, commands: str, events: Path, api_server: int, on_load: Callable[[int], None]) -> None:
        self._address = f"ipc://{events}"
        super().__init__(commands, self._address, api_server=api_server, on_load=on_load)

    async def start(self) -> wire.EngineInfo:
        """Waits until the engine is ready. Raises EngineFailedError with the reason if it dies before."""
        ready = self._begin()
        self._send(wire.AddApiServer(self._api_server, self._address))
        self.on_readable()
        self.info = await ready
        return self.info

    async def wait_for_adapters(self, num_changes: int) -> None:
        """Waits until the engine has reported at least `num_changes` changes of the adapters, or is dead."""
        while self.adapter_changes < num_changes and self.death is None:
            self._adapters_told.clear()
            await self._adapters_told.wait()

    async def stop(self) -> None:
        """Closes the sockets. The engine continues."""
        self._close()


def fault_of(client: EngineClient, heartbeat_timeout_s: float) -> str | None:
    """The reason why the engine does not serve: it is dead, or has sent nothing for longer than this time. None: it
    serves."""
    if client.death is not None:
        return f"The engine has failed: {client.death}"
    silent_s = time.monotonic() - client.last_heartbeat
    return None if silent_s <= heartbeat_timeout_s else f"The engine has not been heard of for {silent_s:.0f} s."
