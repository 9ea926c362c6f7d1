"""Computes the embeddings of one HTTP request. Each input is a separate request to the engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from uuid import uuid4

from batcher.request import FinishReason, SamplingParams
from server.engine import wire
from server.engine.generation import error_of
from server.engine.protocol import Engine
from server.http.request_error import RequestError, unavailable

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
MOST_URGENT = -(2**31)  # a priority
POLL_S = 0.1  # between two looks at the engine's statistics
AT_ONCE = 64  # inputs of one HTTP request that the engine has at a time, so that they do not fill its queue


class Embeddings:
    """The embeddings of one HTTP request. The first error ends all of them. Only the task that answers awaits `wait`.

    `on_limit` is called with `deadline_waiting` or `deadline_running` if a deadline has ended them.
    """

    def __init__(self, engine: Engine, *, on_limit: Callable[[str], None] = lambda limit: None) -> None:
        self.num_cached_tokens = 0
        self.error: Exception | None = None  # why they have failed
        self._engine = engine
        self._on_limit = on_limit
        self._waiting: deque[tuple[int, wire.WireRequest]] = deque()
        self._running: dict[str, int] = {}  # request id -> the number of its input
        self._vectors: list[bytes] = []
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deadline: asyncio.TimerHandle | None = None

    def submit(self, requests: Sequence[wire.WireRequest], *, timeout_s: float | None = None) -> None:
        """Submits one request for each input, in order. After `timeout_s` all of them fail."""
        if self._engine.death is not None:
            raise unavailable(f"The engine has failed: {self._engine.death}")
        self._waiting.extend(enumerate(requests))
        self._vectors = [b""] * len(requests)
        if timeout_s is not None:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._pass_deadline)
        self._submit_next(AT_ONCE)

    @property
    def finished(self) -> bool:
        return self._done.done()

    async def wait(self) -> list[bytes]:
        """Waits for the vectors, f32[D] each, in the order of the inputs. Raises RequestError if the engine fails."""
        await self._done
        return self._vectors

    def on_output(self, output: wire.Output) -> None:
        result = self.result_of(output)
        if result is None:
            if output.expired:
                self._on_limit("deadline_waiting")
            self.fail(error_of(output))
            return
        self._vectors[self._running.pop(output.request_id)] = result
        self.num_cached_tokens += output.num_cached_tokens
        self._submit_next(1)
        if not self._running and not self._done.done():
            self._done.set_result(None)

    def result_of(self, output: wire.Output) -> bytes | None:
        """The vector of an output; None: the output has an error."""
        return None if output.error is not None else output.embedding

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        raise RuntimeError("a request that embeds has no tokens")

    def on_weight_version(self, version: str) -> None:
        """Does nothing: an embedding has no tokens."""

    def fail(self, error: Exception) -> None:
        """Ends all requests. `wait` raises the error."""
        self.error = self.error or error
        if not self._done.done():
            self._done.set_exception(error)
            self.abort()

    def abort(self) -> None:
        self._waiting.clear()
        self._engine.abort(list(self._running))
        self._running.clear()
        if self._deadline is not None:
            self._deadline.cancel()
        if not self._done.done():
            self._done.cancel()

    def _pass_deadline(self) -> None:
        self._on_limit("deadline_running")
        self.fail(unavailable("The embeddings were not ready within the request's time."))

    def _submit_next(self, count: int) -> None:
        next_ones = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        self._running |= {request.request_id: number for number, request in next_ones}
        if next_ones:
            self._engine.submit([(request, self) for _, request in next_ones])


class ComputedPrompt(Embeddings):
    """A prompt that the engine computes instead of embedding it. Its result is empty."""

    def result_of(self, output: wire.Output) -> bytes | None:
        """An empty result; None: the prompt was not computed."""
        return None if output.error is not None or output.finish_reason == FinishReason.ABORT else b""


async def fault_of_steps(engine: Engine, timeout_s: float) -> str | None:
    """The reason why the engine computes no step; None: it does. A token is generated, before all waiting requests. If
    the engine has no room for it now, a step for others is enough."""
    if engine.missing or engine.is_paused:
        return "The engine sleeps or is paused."
    before, deadline = engine.stats.num_steps, time.monotonic() + timeout_s
    probe = ComputedPrompt(engine)
    waiting = asyncio.ensure_future(probe.wait())
    try:
        probe.submit([wire.WireRequest(f"health-{uuid4().hex}", wire.packed([0]), ONE_TOKEN, MOST_URGENT)])
        while engine.stats.num_steps == before:
            if waiting.done():
                error = waiting.exception()
                if not isinstance(error, RequestError) or error.status != 429:
                    return None if error is None else str(error)
            if time.monotonic() >= deadline:
                return f"The engine has computed no step for {timeout_s:g} s."
            await (asyncio.sleep(POLL_S) if waiting.done() else asyncio.wait([waiting], timeout=POLL_S))
        return None
    except RequestError as error:
        return error.message
    finally:
        probe.abort()
