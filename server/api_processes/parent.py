"""The parent process. It starts the engines and the HTTP processes, restarts HTTP processes that die, and ends all of
them."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import NoneType
from typing import Any

import uvloop

from server.api import peers
from server.api.http_counts import HttpCounts
from server.api_processes import api_process
from server.bus import PARENT, Bus, NoReplyError
from server.engine.child_process import start_without_main
from server.engine.group import EngineGroup, ServerEngine, spawn_engines
from server.engine.protocol import EngineFailedError
from server.engine.routing import Router
from server.engine.scratch_folder import folder_for_sockets
from server.http.listener import BACKLOG, address_in_error, bind, removed, url_of
from server.http.server import FLUSH_S
from server.http.signals import Signals
from server.http.tls import TlsContext
from server.serve_until_end import EXIT_ENGINE_FAILED, EXIT_OK, TICK_S
from server.settings import Settings
from server.shared_counts import PrefixTable, SharedCounts

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
        self.may_accept = asyncio.Event()  # lets processes accept connections as soon as they are ready
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
                await self.may_accept.wait()
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
                if reply.loaded is not None:  # answered when all processes have heard of the change
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


def run_api_processes(
    settings: Settings,
    engine_target: str,
    engine_args: Sequence[object],
    *,
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    """Serves with `settings.api_server_count` HTTP processes until SIGTERM or SIGINT. Returns the process's exit code.

    An HTTP process that dies loses its connections; its requests are aborted, and it is started again. If one cannot
    start, the server ends with ValueError if a setting is the reason, else with ApiServerFailedError. The arguments
    and the other errors are those of `server.main.run`.
    """
    if settings.tls is not None:
        TlsContext(settings.tls)  # faults are said before anything is loaded
    with bind(settings) as listener, removed(settings.uds), folder_for_sockets() as folder:
        return uvloop.run(_serve(settings, listener, folder.path, engine_target, engine_args, report, on_ready))


async def _serve(
    settings: Settings,
    listener: socket.socket,
    folder: Path,
    target: str,
    engine_args: Sequence[object],
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    signals = Signals()
    num_keys = len(settings.api_keys) + len(settings.admin_api_keys)
    shared_counts = SharedCounts.made(settings.api_server_count, len(engine_args), num_keys)
    router = Router(PrefixTable(shared_counts))
    engine = spawn_engines(target, engine_args, report=report, debug=settings.debug, router=router)
    processes = ApiProcesses(settings, listener, folder, shared_counts, engine)
    watching: list[asyncio.Task[None]] = []
    try:
        stopped: asyncio.Future[Any] = asyncio.ensure_future(signals.stop.wait())
        if not await _before(stopped, processes.failed, asyncio.gather(engine.start(), processes.start())):
            return EXIT_OK  # a signal came before the engine and the HTTP processes were ready
        watching = [asyncio.create_task(processes.watch(number)) for number in range(len(processes.engines))]
        watching.append(asyncio.create_task(processes.watch_all()))
        if settings.uds is not None:  # the processes share the socket; at an address each has its own
            with address_in_error(settings):
                listener.listen(BACKLOG)
        processes.may_accept.set()
        if on_ready is not None:
            on_ready(url_of(listener, settings))
        died = asyncio.ensure_future(engine.died.wait())
        try:
            await _before(stopped, processes.failed, died)
        finally:
            await processes.end(signals, is_dead=engine.died.is_set())
        return EXIT_ENGINE_FAILED if engine.died.is_set() else EXIT_OK
    except ApiServerFailedError:
        raise
    except EngineFailedError as error:
        raise error.after("The engine could not start") from error
    finally:
        processes.kill()
        for task in watching:
            task.cancel()
        processes.bus.close()
        await engine.stop()


async def _before(stopped: asyncio.Future[Any], failed: asyncio.Future[None], work: asyncio.Future[Any]) -> bool:
    """Waits until one of the futures is done. Returns whether `work` is done. Raises the error of `work` or
    `failed`."""
    await asyncio.wait([stopped, failed, work], return_when=asyncio.FIRST_COMPLETED)
    is_done = work.done()
    if not is_done:
        work.cancel()
    for future in (work if is_done else None, failed if failed.done() else None):
        if future is not None:
            await future
    return is_done
