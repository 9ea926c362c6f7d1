"""Answers the requests of batches. Only the process that holds the folder's lock does this.

The requests go to the server's own routes, after all other requests in the engine's queue (`PRIORITY`). Running batches
share a bounded number of requests. Batches of the key with the fewest running batches begin first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import BinaryIO

from starlette.types import ASGIApp

from server.api.record import RequestRecord, current_record
from server.api.routes.batches.work import COMPLETED, FAILED, BatchRequest, BatchWork
from server.api.state import ServerState
from server.batches.in_process import post
from server.batches.store import BatchStore
from server.database import FullError
from server.http.auth import KeyRing, current_key
from server.http.request_error import internal
from server.logs import ThrottledLog, current_request_id

logger = logging.getLogger("pallas_serve")

POLL_S = 0.5  # between two checks for new and cancelled batches
NUM_THREADS = 4
MOST_RUNNING = 16  # batches; each has files open
RETRY_S = 10.0  # after an error of the disk
FIRST_WAIT_S, LAST_WAIT_S = 0.5, 30.0  # the waits before a request is sent again, if the engine had no room for it
BUSY = (429, 503)

_Id = tuple[bytes, str]  # a key and a batch


class BatchRunner:
    """Runs the batches of a folder.

    Args:
        app: the routes that batches may name, without the gate, which a batch has passed already.
    """

    def __init__(self, state: ServerState, store: BatchStore, app: ASGIApp) -> None:
        settings = state.settings
        self._state = state
        self._store = store
        self._app = app
        self._room = asyncio.Semaphore(settings.batch_concurrency)
        self._concurrency = settings.batch_concurrency
        ring = KeyRing((*settings.api_keys, *settings.admin_api_keys) if settings.api_keys else ())
        # Batches of other keys wait until the server accepts these again.
        self._keys: dict[bytes, str | None] = dict(zip(ring.digests, settings.key_names, strict=False)) or {b"": None}
        self._not_before: dict[_Id, float] = {}  # batches that have failed by an error of the disk
        self._running: dict[_Id, asyncio.Task[None]] = {}
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="batches")
        self._log = ThrottledLog(logger)

    async def run(self) -> None:
        """Runs until it is cancelled. The next process that gets the lock continues the batches."""
        lock: BinaryIO | None = None
        try:
            while True:
                try:
                    if lock is None and (lock := await self._in_thread(self._store.lock)) is not None:
                        await self._in_thread(self._store.sweep)
                    if lock is not None:
                        self._begin(await self._in_thread(self._waiting))
                except OSError as error:
                    self._log.warning("--batch-folder cannot be used now: %s", error)
                await asyncio.sleep(POLL_S)
        finally:
            await _cancelled(self._running.values())
            self._threads.shutdown(wait=False)
            if lock is not None:
                lock.close()

    async def _in_thread[*P, R](self, function: Callable[[*P], R], *args: *P) -> R:
        """Runs work on the disk in a thread of its own pool, so that it does not delay clients' requests."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args))

    def _begin(self, waiting: list[_Id]) -> None:
        while waiting and len(self._running) < MOST_RUNNING:
            running = Counter(key for key, _ in self._running)
            batch = min(waiting, key=lambda batch: (running[batch[0]], batch[1]))
            waiting.remove(batch)
            self._running[batch] = asyncio.create_task(self._run(batch))

    def _waiting(self) -> list[_Id]:
        """The batches that are neither over nor running."""
        now = time.monotonic()
        return [
            (key, id)
            for key, id in self._store.running()
            if key in self._keys and (key, id) not in self._running and now > self._not_before.get((key, id), 0)
        ]

    async def _run(self, batch: _Id) -> None:
        key, id = batch
        current_key.set(key)  # of this task and its own: the requests are the key's
        try:
            work = await self._in_thread(BatchWork, self._store, key, id, self._state.body_limits)
            try:
                if await self._in_thread(work.begin):
                    await self._in_thread(work.end, *await self._answer_all(work))
            finally:
                await self._in_thread(work.close)
        except Exception:
            self._log.exception("batch %s: it is tried again in %g seconds", id, RETRY_S)
            self._not_before[batch] = time.monotonic() + RETRY_S
        finally:
            del self._running[batch]

    async def _answer_all(self, work: BatchWork) -> tuple[str, str | None]:
        """Answers the requests that have no answer. Returns the status with which the batch ends, and the problem."""
        workers = [asyncio.create_task(self._answer_some(work)) for _ in range(self._concurrency)]
        try:
            left = set(workers)
            while left:
                if (status := await self._in_thread(work.early_end)) is not None:
                    return status, None
                done, left = await asyncio.wait(left, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
                for worker in done:
                    await worker  # raises its error
            return COMPLETED, None
        except FullError as error:
            return FAILED, str(error)
        finally:
            await _cancelled(workers)

    async def _answer_some(self, work: BatchWork) -> None:
        while True:
            while self._state.closed is not None:
                await asyncio.sleep(POLL_S)
            async with self._room:  # before the line is read: its body may be long
                asked = await self._in_thread(work.next)
                if asked is None:
                    return
                status, answer = await self._answer(asked)
                await self._in_thread(work.add, asked, status, answer)

    async def _answer(self, asked: BatchRequest) -> tuple[int, bytes]:
        """The status and the answer. A request for which the engine has no room is sent again later."""
        wait_s = FIRST_WAIT_S
        while True:
            record = RequestRecord(asked.line.custom_id or "", self._keys[current_key.get()])
            current_record.set(record)
            current_request_id.set(record.id)
            try:
                status, answer = await post(self._app, asked.line.url, asked.body)
            except Exception as error:
                self._log.exception("a request of a batch failed: %s", type(error).__name__)
                status, answer = 500, internal("The server has failed on this request.").encode()
            self._state.end_request(record, "POST", asked.line.url, status)
            if status not in BUSY and (status < 500 or self._state.engine.death is None):
                return status, answer
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_WAIT_S)


async def _cancelled(running: Iterable[asyncio.Task[None]]) -> None:
    """Ends the tasks, and waits until they have ended."""
    tasks = list(running)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
