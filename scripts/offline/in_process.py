"""The HTTP server's application without HTTP: its routes over an engine in this process.

Offline generation uses the server's validation, chat template, tokenizer and answers: a line of a batch file has the
same meaning as the same body sent to the server.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence, Set
from typing import Any

from batcher.delivery import Tokens
from batcher.engine import Engine
from batcher.errors import InvalidRequestError
from batcher.request import FinishReason, RequestOutput
from batcher.stats import EngineStats
from model.inputs.words import described
from server.engine.adapters import AdapterError, Adapters
from server.engine.process import status_of
from server.engine.protocol import Receiver, Receivers
from server.engine.wire import (
    DEFAULT_VERSION,
    Adapter,
    AnyQuestion,
    EngineInfo,
    LoadAdapter,
    Outputs,
    Reply,
    UnloadAdapter,
    WeightVersion,
    WireRequest,
    failure,
    output_to_wire,
    requests_from_wire,
    tokens_to_wire,
)
from server.engine.wire import Adapters as AdaptersEvent


class InProcessEngine:
    """A `server.engine.protocol.Engine` over an engine in this process, which has its own threads.

    Receivers are called on the event loop's thread, as with an engine in another process.
    """

    missing: Set[str] = frozenset()  # while it sleeps or is paused, no new requests come here
    is_paused = False

    def __init__(
        self, engine: Engine, info: EngineInfo, loop: asyncio.AbstractEventLoop, adapters: Adapters | None = None
    ) -> None:
        self.info = info
        self.adapters: Mapping[str, Adapter] = {}
        self.num_adapter_loads = 0
        self.weight_version = DEFAULT_VERSION
        self._engine = engine
        self._adapters = adapters
        self._add_request = engine.add_request if adapters is None else adapters.add_request
        self._loop = loop
        self._receivers = Receivers()
        self._lock = threading.Lock()
        self._arrived: list[RequestOutput | Tokens | WeightVersion] = []
        self.news = asyncio.Event()  # wakes those who wait, on the loop's thread, after each step
        engine.listen(self._hear)
        if adapters is not None:
            adapters.listen(self._note_adapters)

    @property
    def stats(self) -> EngineStats:
        return self._engine.stats()

    @property
    def death(self) -> str | None:
        death = self._engine.death
        return None if death is None else f"{type(death).__name__}: {death}"

    @property
    def last_heartbeat(self) -> float:
        return time.monotonic()

    def submit(self, requests: Sequence[tuple[WireRequest, Receiver]]) -> None:
        items, receivers = zip(*requests, strict=True)
        for request, receiver in zip(requests_from_wire(items), receivers, strict=True):
            receiver.on_weight_version(self.weight_version)
            self._receivers[request.request_id] = receiver
            try:
                self._add_request(request, self._hear)
            except (InvalidRequestError, AdapterError) as error:
                status, param = status_of(error)
                refusal = failure(request.request_id, str(error), status=status, param=param)
                self._loop.call_soon(self._receivers.take, Outputs([refusal]))

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        for request_id in request_ids:
            if self._receivers.pop(request_id, None) is not None:
                self._engine.abort(request_id, reason)

    def reset_prefix_cache(self, *, reset_external: bool) -> None:
        self._engine.reset_prefix_cache(reset_external=reset_external)

    async def ask(self, question: AnyQuestion) -> Reply:
        """Loads or unloads an adapter. `LLM` has methods for the other questions."""
        if not isinstance(question, LoadAdapter | UnloadAdapter):
            return Reply(error="The weights of an engine in this process cannot be changed by requests.", status=501)
        if self._adapters is None:
            return Reply(error="This engine has no LoRA adapters: enable_lora=True.")
        try:
            adapter = await asyncio.wrap_future(self._adapters.schedule(question))
        except AdapterError as error:
            return Reply(error=str(error), status=error.status)
        except (ValueError, OSError) as error:
            return Reply(error=described(error))
        return Reply(adapter=adapter)

    def _note_adapters(self, news: AdaptersEvent) -> None:
        """Runs on the thread of the change."""
        self.adapters, self.num_adapter_loads = {own.name: own for own in news.adapters}, news.num_loads

    def note_weight_version(self, version: str) -> None:
        """Notes the version of the weights of later tokens. Runs on the engine's thread, between two steps."""
        self._hear(WeightVersion(version))

    def _hear(self, news: RequestOutput | Tokens | WeightVersion) -> None:
        """Queues an output for the event loop. Runs on the engine's thread. A step wakes the event loop once."""
        with self._lock:
            self._arrived.append(news)
            if len(self._arrived) > 1:
                return
        self._loop.call_soon_threadsafe(self._deliver_arrived)

    def _deliver_arrived(self) -> None:
        with self._lock:
            arrived, self._arrived = self._arrived, []
        for news in arrived:
            if isinstance(news, RequestOutput):
                self._receivers.take(Outputs([output_to_wire(news)]))
            elif isinstance(news, WeightVersion):
                self.weight_version = news.version
                for receiver in self._receivers.values():
                    receiver.on_weight_version(news.version)
            else:
                self._receivers.take(Outputs([], tokens_to_wire(news)))
        self.tell_news()

    def tell_news(self) -> None:
        """Wakes those who wait for `news`. Called on the loop's thread."""
        self.news.set()
        self.news.clear()


class LoopThread:
    """An event loop on its own thread, for synchronous code. It also works inside a notebook's event loop."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="offline-loop", daemon=True)
        self._thread.start()

    def run[T](self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Returns the coroutine's result. An interrupt cancels the coroutine and waits for its clean-up."""
        ended = threading.Event()

        async def watched() -> T:
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self.loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                ended.wait()
            raise

    @property
    def is_closed(self) -> bool:
        return self.loop.is_closed()

    def close(self) -> None:
        """Ends the thread. May be called again."""
        if self.is_closed:
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()
