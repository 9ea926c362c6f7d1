"""What other threads tell the engine's thread: arrivals, aborts, results, masks, adapters, changes, pauses, its end.

One lock guards all of it. The engine's thread waits here until there is something to do, and takes the news in batches.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from batcher.change import Change, ForgetPrefixes, Pause, Resume
from batcher.errors import EngineClosedError, EngineDeadError, InvalidRequestError, QueueFullError
from batcher.request import FinishReason
from batcher.requests.live_requests import Staged
from batcher.requests.masks import Answer
from batcher.requests.page_mover import Moved
from batcher.scheduling.request_state import RequestState
from batcher.step import StepOutput

Result = StepOutput | BaseException  # of a step; the exception that it failed with


class Abort(NamedTuple):
    """A request is to end. Not by its id, which may be used again."""

    sequence: RequestState
    reason: FinishReason


class Taken(NamedTuple):
    """Another engine has taken the pages of a prompt that were kept for it."""

    token: bytes


# A request has arrived, or ... An exception is the failure of another thread of the engine, which cannot go on.
News = RequestState | Abort | Answer | Staged | Moved | Taken | Change | Pause | Resume | ForgetPrefixes | Exception


class Inbox:
    """Thread-safe. Every method returns at once, except those whose names begin with `wait`.

    Args:
        max_live: requests that may be accepted and not have ended.
        max_waiting: of these, those beyond the rows of a step; for the error's text.
    """

    def __init__(self, max_live: int, max_waiting: int) -> None:
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)  # for the engine's thread: something below has changed
        # For those who wait until no request is live, or the engine is dead or about to stop.
        self._idle = threading.Condition(self._lock)
        self._news: list[News] = []  # in the order of their coming, so an abort is never before its request
        self._results: list[Result] = []  # of steps in flight, in order
        self._num_hurried = 0  # masks that the next step waits for
        self._num_accepted = 0
        self._live: dict[str, RequestState] = {}  # by request id, from `accept` to `ended`
        self._is_closed = False
        self._is_stopping = False
        self._death: BaseException | None = None

    # --- requests ---

    def accept(self, sequence: RequestState) -> None:
        """A request arrives. It gets its number.

        Raises:
            InvalidRequestError: a request of this id is live.
            QueueFullError: `max_live` requests are live already.
            EngineClosedError, EngineDeadError: no more requests are taken.
        """
        with self._lock:
            self.check_open()
            if sequence.request_id in self._live:
                raise InvalidRequestError("request_id", f"a request {sequence.request_id!r} is running already")
            if len(self._live) >= self._max_live:
                raise QueueFullError(f"the queue is full: {self._max_waiting} requests wait already; try again later")
            sequence.number = self._num_accepted
            self._num_accepted += 1
            self._live[sequence.request_id] = sequence
            self.put(sequence)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """The request is to end. An id that is not live is ignored."""
        with self._lock:
            if request_id in self._live:
                self.put(Abort(self._live[request_id], reason))

    def ended(self, request_ids: Iterable[str]) -> None:
        """These requests have had their last output."""
        with self._lock:
            for request_id in request_ids:
                self._live.pop(request_id, None)
            if not self._live:
                self._idle.notify_all()

    @property
    def num_live(self) -> int:
        """Accepted requests that have not had their last output."""
        with self._lock:
            return len(self._live)

    @property
    def num_arrived(self) -> int:
        """Requests that the engine's thread has not taken in."""
        with self._lock:
            return sum(isinstance(news, RequestState) for news in self._news)

    def num_live_of_adapters(self) -> Counter[int]:
        """Identity of a LoRA adapter -> its accepted requests that have not had their last output."""
        with self._lock:
            return Counter(seq.request.adapter for seq in self._live.values() if seq.request.adapter)

    # --- other news ---

    def put(self, news: News) -> None:
        """Tells the engine's thread."""
        with self._lock:
            self._news.append(news)
            self._wake.notify()

    def ask(self, asked: Change | Pause | Resume) -> None:
        """As `put`. Raises EngineClosedError or EngineDeadError."""
        with self._lock:
            self.check_open()
            self.put(asked)

    def returned(self, result: Result) -> None:
        """The oldest step whose result was not there has returned."""
        with self._lock:
            self._results.append(result)
            self._wake.notify()

    def computed(self, masks: list[Answer]) -> None:
        """These masks have been computed."""
        with self._lock:
            self._news += masks
            self._num_hurried -= len(masks)
            self._wake.notify()

    # --- for the engine's thread ---

    def wait(self, timeout_s: float | None, *, is_idle: bool) -> bool:
        """Waits until there is something to do, `timeout_s` seconds at most. Returns whether there is.

        Args:
            is_idle: no step is in flight. The engine stops only then.
        """
        with self._lock:
            return self._wake.wait_for(lambda: self._has_work(is_idle), timeout_s)

    def _has_work(self, is_idle: bool) -> bool:
        return bool(self._results or self._news or (is_idle and self._is_stopping))

    def take_results(self) -> list[Result]:
        """The results that have arrived."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def take(self) -> list[News]:
        """All that has come since the last call, other than results."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def hurry(self, num_masks: int) -> None:
        """So many masks of those asked for next are needed at once."""
        with self._lock:
            self._num_hurried = num_masks

    def wait_for_masks(self, timeout_s: float) -> None:
        """Waits until as many masks are computed as were hurried."""
        with self._lock:
            self._wake.wait_for(lambda: self._num_hurried <= 0, timeout_s)
            self._num_hurried = 0

    # --- the end ---

    def close(self) -> None:
        """No more requests are accepted."""
        with self._lock:
            self._is_closed = True

    def stop(self) -> None:
        """The engine's thread is to end. No more requests are accepted."""
        with self._lock:
            self._is_closed = self._is_stopping = True
            self._wake.notify()
            self._idle.notify_all()

    def die(self, death: BaseException) -> list[RequestState]:
        """The engine is dead. Returns the requests that still wait for their last output."""
        with self._lock:
            self._death = death
            self._is_closed = True
            return list(self._live.values())

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Waits until all requests have ended or the engine is dead. False if neither is so after `timeout_s`."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._live or self._death is not None, timeout_s)

    def wait_for_pause(self, timeout_s: float) -> None:
        """Waits until no request is live or the engine is about to stop, `timeout_s` seconds at most."""
        with self._lock:
            self._idle.wait_for(lambda: not self._live or self._is_stopping, timeout_s)

    @property
    def is_stopping(self) -> bool:
        """Whether the engine's thread is to end."""
        return self._is_stopping

    @property
    def death(self) -> BaseException | None:
        """Why the engine is dead; None while it lives."""
        with self._lock:
            return self._death

    def check_open(self) -> None:
        """Raises EngineClosedError or EngineDeadError if no more requests are taken."""
        with self._lock:
            self.check_alive()
            if self._is_closed:
                raise EngineClosedError("the engine is shutting down and takes no more requests")

    def check_alive(self) -> None:
        """Raises EngineDeadError if the engine is dead."""
        with self._lock:
            if self._death is not None:
                raise EngineDeadError(f"the engine died: {self._death}")
