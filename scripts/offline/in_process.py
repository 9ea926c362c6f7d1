"""The HTTP server's application without HTTP: its routes over an engine in this process.

Offline generation uses the server's validation, chat template, tokenizer and answers: a line of a batch file has the
same meaning as the same body sent to the server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from typing import Any

from batcher.stats import EngineStats
from server.engine import wire
from server.engine.client import EngineClient
from server.engine.outbox import Item, messages
from server.engine.process import BuiltEngine

CLOSED = "this LLM is closed: make another"


class InProcessEngine(EngineClient):
    """An `Engine` over an engine in this process, which has its own threads."""

    def __init__(self, built: BuiltEngine, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.info = built.info
        self._built = built
        self._loop = loop
        self._lock = threading.Lock()
        self._arrived: list[Item] = []
        self._is_closed = False
        self.news = asyncio.Event()  # wakes those who wait, on the loop's thread, after each step

    async def start(self) -> None:
        self._built.listen(self._hear)
        self._deliver_arrived()  # the adapters of the settings
        self._built.engine.start()

    async def close(self) -> None:
        """Answers the open questions. The engine has been shut down."""
        with self._lock:
            self._is_closed = True
        self._asked.close_all(self._reply_of_the_dead())
        if self._built.adapters is not None:
            self._built.adapters.close()

    @property
    def stats(self) -> EngineStats:
        return self._built.stats()

    @property
    def death(self) -> str | None:
        death = self._built.engine.death
        closed = "it was closed" if self._is_closed else None
        return closed if death is None else f"{type(death).__name__}: {death}"

    @property
    def last_heartbeat(self) -> float:
        return time.monotonic()

    def _send(self, command: wire.Command) -> None:
        self._built.take(command, self._hear)

    def _hear(self, item: Item) -> None:
        """Queues an output or event for the event loop. Runs on any thread. A step wakes the event loop once."""
        with self._lock:
            if self._is_closed:
                return
            self._arrived.append(item)
            if len(self._arrived) == 1:
                self._loop.call_soon_threadsafe(self._deliver_arrived)

    def _deliver_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for event in messages(arrived):
            self._on_event(event)
        self.tell_news()

    def tell_news(self) -> None:
        """Wakes those who wait for `news`. Called on the loop's thread."""
        self.news.set()
        self.news.clear()


class LoopThread:
    """An event loop on its own thread, for synchronous code. It also works inside a notebook's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.is_closed = False
        self._lock = threading.Lock()
        self._running: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self.loop.run_forever, name="offline-loop", daemon=True)
        self._thread.start()

    def submit[T](self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Starts a coroutine. Raises RuntimeError if the thread has ended."""
        with self._lock:
            if self.is_closed:
                coroutine.close()
                raise RuntimeError(CLOSED)
            future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
            self._running.add(future)
        future.add_done_callback(self._running.discard)
        return future

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result. An interrupt cancels the coroutine and waits for its clean-up."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = self.submit(watched())
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait()
            raise

    def close(self) -> None:
        """Ends the thread, after all that other threads have started there. May be called again."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
        wait(list(self._running))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
