"""The process that starts the engines and the HTTP processes, starts those again that die, and ends them all."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from server.api.http_counts import HttpCounts
from server.api.peers import PARENT, TIMEOUT_S, EngineDied, NotStarted
from server.board import Board, SharedPrefixes
from server.engine.client import ProcessEngineClient, start_without_main
from server.engine.group import Engines, OwnEngines, started
from server.engine.link import EngineFailedError, folder_for_sockets
from server.engine.routing import Router
from server.fleet import member
from server.fleet.membership import Membership, socket_name
from server.fleet.parent_app import parent_app
from server.http.address import BACKLOG, address_in_error, bind, removed, url_of
from server.http.connections import ConnectionLimits
from server.http.private import PrivateCallError, call, private_listener
from server.http.server import FLUSH_S, HttpServer
from server.http.signals import Signals
from server.http.tls.refresh import TlsContexts
from server.serving import EXIT_ENGINE_FAILED, EXIT_OK, TICK_S
from server.settings import Settings

logger = logging.getLogger("pallas_serve")

MARGIN_S = 5.0  # for an HTTP process to end, beyond the times that it gives its requests
NOTICE_S = 1.0  # until a process that does not answer is known to have ended
PRIVATE_CONNECTIONS = 1024


class ApiServerFailedError(EngineFailedError):
    """An HTTP process could not start, for no fault of the settings."""


def run_fleet(
    settings: Settings,
    engine_target: str,
    engine_args: Sequence[object],
    *,
    report: Callable[[str], None],
    on_ready: Callable[[str], None] | None,
) -> int:
    """As `server.main.run`, with `settings.api_server_count` HTTP processes.

    An HTTP process that dies loses its connections; its requests are aborted, and it is started again. If one cannot
    start, the server ends: with ValueError if a setting is the reason, else with ApiServerFailedError.
    """
    if settings.tls is not None:
        TlsContexts(settings.tls)  # faults are said before anything is loaded
    with bind(settings) as listener, removed(settings.uds), folder_for_sockets() as folder:
        return uvloop.run(_run(settings, listener, folder.path, engine_target, engine_args, report, on_ready))


async def _run(
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
    board = Board.made(settings.api_server_count, len(engine_args), num_keys)
    router = Router(SharedPrefixes(board))
    client = started(target, engine_args, report=report, debug=settings.debug, several=True, router=router)
    members = _Members(settings, listener, folder, board, client)
    inside = HttpServer(parent_app(members, client), _private_limits(settings), is_private=True)
    serving = asyncio.create_task(inside.serve(sockets=[private_listener(folder / PARENT)]))
    watching: list[asyncio.Task[None]] = []
    try:
        stopped: asyncio.Future[Any] = asyncio.ensure_future(signals.stop.wait())
        if not await _before(stopped, members.failed, asyncio.gather(client.start(), members.start())):
            return EXIT_OK  # a signal came before the engine and the HTTP processes were ready
        watching = [asyncio.create_task(members.watch(number)) for number in range(len(members.engines))]
        watching.append(asyncio.create_task(members.watch_all(client)))
        with address_in_error(settings):
            listener.listen(BACKLOG)
        members.let_accept()
        if on_ready is not None:
            on_ready(url_of(listener, settings))
        died = asyncio.ensure_future(client.died.wait())
        try:
            await _before(stopped, members.failed, died)
        finally:
            await members.end(signals, is_dead=client.died.is_set())
        return EXIT_ENGINE_FAILED if client.died.is_set() else EXIT_OK
    except ApiServerFailedError:
        raise
    except EngineFailedError as error:
        raise error.after("The engine could not start") from error
    finally:
        members.kill()
        inside.should_exit = True
        await serving
        for task in watching:
            task.cancel()
        await client.stop()


async def _before(stopped: asyncio.Future[Any], failed: asyncio.Future[None], work: asyncio.Future[Any]) -> bool:
    """Waits until one of them is done, and returns whether `work` is. Raises its error, or that of `failed`."""
    await asyncio.wait([stopped, failed, work], return_when=asyncio.FIRST_COMPLETED)
    is_done = work.done()
    if not is_done:
        work.cancel()
    for future in (work if is_done else None, failed if failed.done() else None):
        if future is not None:
            await future
    return is_done


def _private_limits(settings: Settings) -> ConnectionLimits:
    return ConnectionLimits(
        max_connections=PRIVATE_CONNECTIONS,
        head_timeout_s=settings.head_timeout_s,
        body_timeout_s=settings.body_timeout_s,
        idle_timeout_s=settings.idle_timeout_s,
        send_timeout_s=settings.send_timeout_s,
        max_body_memory=settings.max_body_memory_mib * 2**20,
    )


class _Member:
    """An HTTP process, from its start to its end."""

    def __init__(self, number: int, door: int, process: BaseProcess) -> None:
        self.number = number
        self.door = door
        self.process = process
        self.has_started = False
        self.ended = asyncio.Event()
        self.counts = HttpCounts()


class _Members:
    """The HTTP processes. Those that die are started again."""

    def __init__(
        self, settings: Settings, listener: socket.socket, folder: Path, board: Board, client: Engines
    ) -> None:
        self.folder = folder
        self.engines = [client] if isinstance(client, ProcessEngineClient) else list(client.engines)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.failed.add_done_callback(lambda failed: failed.cancelled() or failed.exception())  # seen
        self._settings = settings
        self._listener = listener
        self._board = board
        self._living: dict[int, _Member] = {}  # by door
        self._next_door = 1
        self._changed = asyncio.Event()  # one has started or ended
        self._may_accept = asyncio.Event()
        self._is_ending = False
        self._retired = HttpCounts()  # of processes that have ended

    async def start(self) -> None:
        """Starts all, and waits until they are ready."""
        for number in range(self._settings.api_server_count):
            self._start(number, replaces=False)
        while not all(member.has_started for member in self._living.values()):
            self._changed.clear()
            await self._changed.wait()

    def _start(self, number: int, *, replaces: bool) -> None:
        door, self._next_door = self._next_door, self._next_door + 1
        membership = Membership(
            settings=self._settings,
            listener=self._listener,
            number=number,
            door=door,
            replaces=replaces,
            engines=[engine.doors for engine in self.engines if engine.doors is not None],
            folder=self.folder,
            board=self._board,
            log_level=logger.getEffectiveLevel(),
            is_logging=logging.getLogger().hasHandlers(),
        )
        process = multiprocessing.get_context("spawn").Process(
            target=member.main, args=(membership,), name=f"http-{number}"
        )
        start_without_main(process)
        new = self._living[door] = _Member(number, door, process)
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_exit, new)

    def _on_exit(self, ended: _Member) -> None:
        asyncio.get_running_loop().remove_reader(ended.process.sentinel)
        ended.process.join()
        del self._living[ended.door]
        self._board.clear(ended.number)
        for engine in self.engines:
            engine.close_door(ended.door)
        ended.counts.retire()
        self._retired.add(ended.counts)
        for path in self.folder.glob(f"*{ended.door}"):
            if path.name == socket_name(ended.door) or path.name.endswith(f"-{ended.door}"):
                path.unlink(missing_ok=True)
        ended.ended.set()
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
        """From now on a process that is ready may accept connections."""
        self._may_accept.set()

    async def watch(self, number: int) -> None:
        """Tells all when an engine has died."""
        engine = self.engines[number]
        await engine.died.wait()
        if engine.death is not None:
            await self._tell("/engine_died", EngineDied(number, engine.death))

    async def watch_all(self, client: Engines) -> None:
        """Tells all when the engines must not go on, although they live."""
        await client.died.wait()
        if isinstance(client, OwnEngines) and client.split is not None:
            for number in range(len(self.engines)):
                await self._tell("/engine_died", EngineDied(number, client.split))

    async def end(self, signals: Signals, *, is_dead: bool) -> None:
        """Ends all: running requests may finish, as in a server of one process. A second signal ends the wait. If an
        engine is dead, the processes end by themselves."""
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
                await self._tell("/end", None)
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

    # for the private routes

    async def begin(self, door: int) -> None:
        self._living[door].has_started = True
        self._changed.set()
        await self._may_accept.wait()

    def give_up(self, failure: NotStarted) -> None:
        self._fail(ValueError(failure.error) if failure.is_worded else ApiServerFailedError(failure.error))

    def count(self, door: int, counts: HttpCounts) -> None:
        if door in self._living:
            self._living[door].counts = counts

    def counts_of_others(self, door: int) -> HttpCounts:
        total = HttpCounts()
        for counts in (self._retired, *(living.counts for living in self._living.values() if living.door != door)):
            total.add(counts)
        return total

    async def ask(self, target: str, message: object, *, but: int | None = None) -> dict[int, bytes]:
        asked = [living for living in self._living.values() if living.has_started and living.door != but]
        body = msgspec.msgpack.encode(message)
        calls = [call(self.folder / socket_name(one.door), target, body, timeout_s=TIMEOUT_S) for one in asked]
        answers: dict[int, bytes] = {}
        for one, answer in zip(asked, await asyncio.gather(*calls, return_exceptions=True), strict=True):
            if isinstance(answer, bytes):
                answers[one.door] = answer
            elif not isinstance(answer, PrivateCallError) or not await _has_ended(one):
                raise answer
        return answers

    async def _tell(self, target: str, message: object) -> None:
        try:
            await self.ask(target, message)
        except PrivateCallError as error:
            logger.warning("an HTTP process has not taken a message: %s", error)


async def _has_ended(asked: _Member) -> bool:
    """A process that has ended has no requests, and keeps nothing."""
    try:
        await asyncio.wait_for(asked.ended.wait(), NOTICE_S)
    except TimeoutError:
        return False
    return True
