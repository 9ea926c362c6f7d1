"""The messages of other threads to the engine's thread: arrivals, aborts, results, masks, adapters, changes, pauses,
and its end.

One lock guards all of them. The engine's thread waits here until there is something to do, and takes messages in
batches.
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
from batcher.requests.masks import MaskResult
from batcher.requests.page_mover import Moved
from batcher.scheduling.request_state import RequestState
from batcher.step import StepOutput, WeightsKind

Result = StepOutput | BaseException  # the output of a step, or the exception with which it failed


class Abort(NamedTuple):
    """A request is to end. It has the request and not its id, because an id may be used again."""

    sequence: RequestState
    reason: FinishReason


class ModelUnloaded(NamedTuple):
    """No name and no request has a model any more."""

    model: int


# A request has arrived, or ... An exception is the failure of another thread of the engine, which cannot go on.
InboxItem = (
    RequestState
    | Abort
    | MaskResult
    | Staged
    | Moved
    | ModelUnloaded
    | Change
    | Pause
    | Resume
    | ForgetPrefixes
    | Exception
)


class Inbox:
    """Thread-safe. Every method returns at once, except those whose names begin with `wait`.

    Args:
        max_live: the most accepted requests that have not ended.
        max_waiting: the most of these that are not in the rows of a step. It is used in the error's text only.
    """

    def __init__(self, max_live: int, max_waiting: int) -> None:
        self._max_live = max_live
        self._max_waiting = max_waiting
        self._lock = threading.RLock()
        self._wake = threading.Condition(self._lock)  # wakes the engine's thread: something below has changed
        # Wakes threads that wait until no request is live, or the engine is dead or about to stop.
        self._idle = threading.Condition(self._lock)
        self._news: list[InboxItem] = []  # in the order of arrival, so an abort never comes before its request
        self._results: list[Result] = []  # results of steps in flight, in order
        self._num_hurried = 0  # number of masks for which the next step waits
        self.next_number = 0  # of the request that is accepted next
        self._live: dict[str, RequestState] = {}  # request id -> request, from `accept` to `ended`
        self._is_closed = False
        self._is_stopping = False
        self._death: BaseException | None = None

    # --- requests ---

    def accept(self, sequence: RequestState) -> None:
        """Accepts a request, and gives it its number.

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
            sequence.number = self.next_number
            self.next_number += 1
            self._live[sequence.request_id] = sequence
            self.put(sequence)

    def abort(self, request_id: str, reason: FinishReason) -> None:
        """Asks for the end of a request. An id that is not live is ignored."""
        with self._lock:
            if request_id in self._live:
                self.put(Abort(self._live[request_id], reason))

    def ended(self, request_ids: Iterable[str]) -> None:
        """Removes requests that have had their last output."""
        with self._lock:
            for request_id in request_ids:
                self._live.pop(request_id, None)
            if not self._live:
                self._idle.notify_all()

    @property
    def num_live(self) -> int:
        """The number of accepted requests that have not had their last output."""
        with self._lock:
            return len(self._live)

    @property
    def num_arrived(self) -> int:
        """The number of requests that the engine's thread has not taken yet."""
        with self._lock:
            return sum(isinstance(news, RequestState) for news in self._news)

    def num_live_of(self, kind: WeightsKind) -> Counter[int]:
        """Identity of a LoRA adapter or a model -> the number of its accepted requests that have not had their last
        output."""
        with self._lock:
            requests = [seq.request for seq in self._live.values()]
        identities = (each.adapter if kind is WeightsKind.ADAPTER else each.model for each in requests)
        return Counter(identity for identity in identities if identity or kind is WeightsKind.MODEL)

    # --- other news ---

    def put(self, news: InboxItem) -> None:
        """Adds a message, and wakes the engine's thread."""
        with self._lock:
            self._news.append(news)
            self._wake.notify()

    def ask(self, asked: Change | Pause | Resume) -> None:
        """Adds a change, a pause or a resume. Raises EngineClosedError or EngineDeadError if the engine will not handle
        it."""
        with self._lock:
            self.check_open()
            self.put(asked)

    def returned(self, result: Result) -> None:
        """Adds the result of the oldest step without one. Results must be added in the order of the steps."""
        with self._lock:
            self._results.append(result)
            self._wake.notify()

    def computed(self, masks: list[MaskResult]) -> None:
        """Adds computed masks."""
        with self._lock:
            self._news += masks
            self._num_hurried -= len(masks)
            self._wake.notify()

    # --- for the engine's thread ---

    def wait(self, timeout_s: float | None, *, is_idle: bool) -> bool:
        """Waits until there is something to do, for at most `timeout_s` seconds. Returns whether there is.

        Args:
            is_idle: no step is in flight. The engine stops only then.
        """
        with self._lock:
            return self._wake.wait_for(lambda: self._has_work(is_idle), timeout_s)

    def _has_work(self, is_idle: bool) -> bool:
        return bool(self._results or self._news or (is_idle and self._is_stopping))

    def take_results(self) -> list[Result]:
        """Removes and returns the results that have arrived."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def take(self) -> list[InboxItem]:
        """Removes and returns all messages other than results."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def hurry(self, num_masks: int) -> None:
        """Sets the number of masks for which `wait_for_masks` waits. Call it before the masks are asked for."""
        with self._lock:
            self._num_hurried = num_masks

    def wait_for_masks(self, timeout_s: float) -> None:
        """Waits until the masks of `hurry` are computed, for at most `timeout_s` seconds."""
        with self._lock:
            self._wake.wait_for(lambda: self._num_hurried <= 0, timeout_s)
            self._num_hurried = 0

    # --- the end ---

    def close(self) -> None:
        """No more requests are accepted."""
        with self._lock:
            self._is_closed = True

    def stop(self) -> None:
        """Tells the engine's thread to end. No more requests are accepted."""
        with self._lock:
            self._is_closed = self._is_stopping = True
            self._wake.notify()
            self._idle.notify_all()

    def die(self, death: BaseException) -> list[RequestState]:
        """Marks the engine as dead. Returns the requests that still wait for their last output."""
        with self._lock:
            self._death = death
            self._is_closed = True
            return list(self._live.values())

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Waits until all requests have ended or the engine is dead. Returns False if neither has happened after
        `timeout_s` seconds."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._live or self._death is not None, timeout_s)

    def wait_for_pause(self, timeout_s: float) -> None:
        """Waits until no request is live or the engine is about to stop, for at most `timeout_s` seconds."""
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
