"""The parent's view of the HTTP processes. It starts them, restarts processes that die, asks all of them, and ends
them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import NoneType
from typing import Any

from server.api import peers
from server.api.http_counts import HttpCounts
from server.api_processes import api_process
from server.bus import PARENT, Bus, NoReplyError
from server.engine.child_process import start_without_main
from server.engine.group import EngineGroup, ServerEngine
from server.engine.protocol import EngineFailedError
from server.http.server import FLUSH_S
from server.http.signals import Signals
from server.serve_until_end import TICK_S
from server.settings import Settings
from server.shared_counts import SharedCounts

logger = logging.getLogger("pallas_serve")

MARGIN_S = 5.0  # the time for an HTTP process to end after its requests' time


class ApiServerFailedError(EngineFailedError):
    """An HTTP process could not start, and the settings are not the reason."""


class _ApiProcess:
    """An HTTP process, from its start to its end."""

    def __init__(self, number: int, api_server: int, process: BaseProcess) -> None:
        self.number = number
        self.api_server = api_server
        self.process = process
        self.has_started = False
        self.counts = HttpCounts()


class ApiProcesses:
    """The HTTP processes. Processes that die are started again."""

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        folder: Path,
        shared_counts: SharedCounts,
        engine: ServerEngine,
    ) -> None:
        self._folder = folder
        self.bus = Bus(folder / api_process.BUS, PARENT, peers.ToParent, self.answer)
        self.engines = engine.replicas
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # seen
        self._settings = settings
        self._engine = engine
        self._listener = listener
        self._shared_counts = shared_counts
        self._living: dict[int, _ApiProcess] = {}  # by API server
        self._next_api_server = 1
        self._changed = asyncio.Event()  # one has started or ended
        self._may_accept = asyncio.Event()
        self._is_ending = False
        self._retired = HttpCounts()  # of processes that have ended

    async def start(self) -> None:
        """Starts all processes and waits until they are ready."""
        for number in range(self._settings.api_server_count):
            self._start(number, replaces=False)
        while not all(living.has_started for living in self._living.values()):
            self._changed.clear()
            await self._changed.wait()

    def _start(self, number: int, *, replaces: bool) -> None:
        api_server, self._next_api_server = self._next_api_server, self._next_api_server + 1
        args = api_process.ProcessArgs(
            settings=self._settings,
            listener=self._listener,
            number=number,
            api_server=api_server,
            replaces=replaces,
            engines=[engine.commands for engine in self.engines],
            folder=self._folder,
            shared_counts=self._shared_counts,
            log_level=logger.getEffectiveLevel(),
            is_logging=logging.getLogger().hasHandlers(),
        )
        process = multiprocessing.get_context("spawn").Process(
            target=api_process.main, args=(args,), name=f"http-{number}"
        )
        start_without_main(process)
        new = self._living[api_server] = _ApiProcess(number, api_server, process)
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_exit, new)

    def _on_exit(self, ended: _ApiProcess) -> None:
        asyncio.get_running_loop().remove_reader(ended.process.sentinel)
        ended.process.join()
        del self._living[ended.api_server]
        self._shared_counts.clear(ended.number)
        for engine in self.engines:
            engine.remove_api_server(ended.api_server)
        ended.counts.retire()
        self._retired.add(ended.counts)
        self.bus.forget(ended.api_server)
        for path in self._folder.glob(f"*-{ended.api_server}"):
            path.unlink(missing_ok=True)
        self._changed.set()
        if self._is_ending:
            return
        what = f"HTTP process {ended.number} has ended (exit code {ended.process.exitcode})"
        if ended.has_started:
            logger.error("%s: its requests are aborted, and it is started again", what)
            self._start(ended.number, replaces=True)
        else:
            self._fail(ApiServerFailedError(f"{what} before it was ready"))

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_exception(error)

    def let_accept(self) -> None:
        """Lets processes accept connections as soon as they are ready."""
        self._may_accept.set()

    async def watch(self, number: int) -> None:
        """Tells all processes when this engine has died."""
        engine = self.engines[number]
        await engine.died.wait()
        if engine.death is not None:
            await self._tell(peers.EngineDied(number, engine.death))

    async def watch_all(self) -> None:
        """Tells all processes when the engines must stop although they live, because their weights differ."""
        engine = self._engine
        await engine.died.wait()
        if isinstance(engine, EngineGroup) and engine.split is not None:
            for number in range(len(self.engines)):
                await self._tell(peers.EngineDied(number, engine.split))

    async def end(self, signals: Signals, *, is_dead: bool) -> None:
        """Ends all processes. Running requests may finish, as in a server of one process. A second signal ends the
        wait. If an engine is dead, the processes end without being asked."""
        self._is_ending = True
        for starting in [living for living in self._living.values() if not living.has_started]:
            starting.process.kill()
        settings = self._settings
        deadline = time.monotonic() + settings.grace_period_s + settings.death_linger_s + FLUSH_S + MARGIN_S
        num_asked = 0
        while self._living and time.monotonic() < deadline:
            is_asked = signals.stop.is_set() or self.failed.done() or not is_dead
            if num_asked < is_asked + signals.hurry.is_set():
                num_asked += 1
                await self._tell(peers.End())
            await asyncio.sleep(TICK_S)
        if self._living:
            logger.warning("%d HTTP processes have not ended in time: killing them", len(self._living))

    def kill(self) -> None:
        self._is_ending = True
        loop = asyncio.get_running_loop()
        for living in self._living.values():
            loop.remove_reader(living.process.sentinel)
            living.process.kill()
            living.process.join()

    async def answer(self, question: Any, api_server: int) -> object:
        """The reply to a question of an HTTP process, for the bus."""
        living = self._living.get(api_server)
        if living is None:  # it has ended since
            return None
        match question:
            case peers.Started():
                living.has_started = True
                self._changed.set()
                await self._may_accept.wait()
            case peers.NotStarted(error=error, is_worded=is_worded):
                self._fail(ValueError(error) if is_worded else ApiServerFailedError(error))
            case peers.Counted():
                living.counts = question.counts
                return self._counts_of_others(living) if question.asks else None
            case peers.AbortRequests():
                aborted = await self._ask(question, list[str], but=api_server)
                return [request_id for request_ids in aborted for request_id in request_ids]
            case peers.SetLogLevel(level=level):
                logger.setLevel(level)
                await self._ask(question, NoneType)
            case peers.GetEngineState():
                return peers.state_of(self._engine)
            case _:
                reply = await self._engine.ask(question)
                if reply.adapter is not None:  # answered when all processes have heard of the change
                    await self._tell(peers.AdapterChanges([engine.adapter_changes for engine in self.engines]))
                return reply
        return None

    def _counts_of_others(self, asker: _ApiProcess) -> HttpCounts:
        """The sums over all others, including those that have ended."""
        total = HttpCounts()
        for counts in (self._retired, *(living.counts for living in self._living.values() if living is not asker)):
            total.add(counts)
        return total

    async def _ask[R](self, question: object, kind: type[R], *, but: int | None = None) -> list[R]:
        """Asks all processes except `but`. Returns their replies. Raises NoReplyError."""
        asked = [living for living in self._living.values() if living.has_started and living.api_server != but]
        asking = [self.bus.ask(question, kind, to=one.api_server) for one in asked]
        replies: list[R] = []
        for one, reply in zip(asked, await asyncio.gather(*asking, return_exceptions=True), strict=True):
            if not isinstance(reply, BaseException):
                replies.append(reply)
            elif one.api_server in self._living or not isinstance(reply, NoReplyError):
                raise reply
        return replies

    async def _tell(self, question: object) -> None:
        try:
            await self._ask(question, NoneType)
        except NoReplyError as error:
            logger.warning("an HTTP process has not taken a message: %s", error)
