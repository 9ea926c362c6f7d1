"""The programs that a start has left to be compiled while the engine serves, and their fallbacks until then."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from batcher.buckets import BucketLadder
from batcher.inbox import Inbox
from batcher.step import Bucket, Runner

WAIT_S = 2.0  # longest wait for an idle moment in which to compile a program that no step has asked for


class DeferredPrograms:
    """The programs that are still to come. One thread plans steps, and another one compiles.

    A step whose program is missing runs in the next larger one that is there: its rows and tokens are padded further,
    and their results are the same. The programs that steps have asked for are compiled first, then the cheapest.
    """

    def __init__(self, ladder: BucketLadder, missing: Iterable[Bucket]) -> None:
        self._ladder = ladder
        self._lock = threading.Lock()
        self._missing = set(missing)
        self._asked_for: dict[Bucket, None] = {}  # in the order of the first steps

    def __len__(self) -> int:
        return len(self._missing)

    def or_fallback(self, bucket: Bucket) -> Bucket:
        """The bucket whose program runs a step of `bucket` now."""
        if not self._missing:
            return bucket
        with self._lock:
            if bucket not in self._missing:
                return bucket
            self._asked_for[bucket] = None
            return self._ladder.fallback(bucket, self._missing)

    def next(self) -> tuple[Bucket, bool] | None:
        """The bucket to compile next, and whether a step has asked for it. None: all are compiled."""
        with self._lock:
            if self._asked_for:
                return next(iter(self._asked_for)), True
            return (min(self._missing), False) if self._missing else None

    def arrived(self, bucket: Bucket) -> None:
        """Records that the bucket's program is compiled."""
        with self._lock:
            self._missing.remove(bucket)
            self._asked_for.pop(bucket, None)


def compile_while_serving(
    later: DeferredPrograms, runner: Runner, inbox: Inbox, report: Callable[[str], None], clock: Callable[[], float]
) -> None:
    """Compiles all that is still to come, on a thread of its own. An error ends the engine."""
    num_left, started_s = len(later), clock()
    while (following := later.next()) is not None:
        bucket, is_asked_for = following
        if not is_asked_for:
            inbox.wait_for_pause(WAIT_S)
        if inbox.is_stopping or inbox.death is not None:
            return
        try:
            runner.compile_later(bucket)
        except Exception as error:
            inbox.put(error)
            return
        later.arrived(bucket)
    report(f"{num_left} more programs came in {clock() - started_s:.1f} s while serving")
