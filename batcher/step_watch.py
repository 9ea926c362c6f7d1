"""Watches how long the oldest step in flight has been running: a stuck device gives no error by itself."""

from __future__ import annotations

from collections.abc import Callable

from batcher.errors import StepTimeoutError

TIMES_LONGEST = 20  # a step may take so many times as long as the longest step before it
# After the limit, for a result that is on its way: a process that a signal has stopped goes on long after the limit.
GRACE_S = 5.0


class StepWatch:
    """Measures how long a step runs. The device computes one step after the other, so a step runs from the return of
    the step before it.

    Args:
        limit_s: the least limit in seconds, even if the steps before were short; None: a step may run forever.
        clock: gives seconds from any origin.
    """

    def __init__(self, limit_s: float | None, clock: Callable[[], float]) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._longest_s = 0.0
        self._running_since: float | None = None  # when the oldest step in flight started to run
        self._overdue_since: float | None = None

    def dispatched(self) -> None:
        """Records that a step was dispatched."""
        if self._running_since is None:
            self._running_since = self._clock()

    def returned(self, num_in_flight: int) -> float:
        """Records the return of the oldest step, after which `num_in_flight` are left. Returns the seconds that it has
        run."""
        now = self._clock()
        ran_s = 0.0 if self._running_since is None else now - self._running_since
        self._longest_s = max(self._longest_s, ran_s)
        self._running_since = now if num_in_flight else None
        self._overdue_since = None
        return ran_s

    def next_check(self) -> float | None:
        """The time, by the clock, at which to call `check`. None: no step is in flight, or it may run forever."""
        if self._limit_s is None or self._running_since is None:
            return None
        if self._overdue_since is not None:
            return self._overdue_since + GRACE_S
        return self._running_since + max(self._limit_s, TIMES_LONGEST * self._longest_s)

    def check(self) -> None:
        """Raises StepTimeoutError if the oldest step has run for too long. Call it when no result has arrived."""
        due, now = self.next_check(), self._clock()
        if due is None or now < due:
            return
        if self._overdue_since is None:
            self._overdue_since = now
            return
        assert self._running_since is not None
        raise StepTimeoutError(
            f"the device is stuck: a step has not returned for {now - self._running_since:.1f} s; the longest one "
            f"before took {self._longest_s:.2f} s (--step-timeout is the least time that a step is given)"
        )
