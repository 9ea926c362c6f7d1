"""The programs that a start has left to be compiled while the engine serves, and what stands in for them until then."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from batcher.buckets import BucketLadder
from batcher.step import Bucket


class LaterPrograms:
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

    def or_stand_in(self, bucket: Bucket) -> Bucket:
        """The bucket to run a step of `bucket` in now."""
        if not self._missing:
            return bucket
        with self._lock:
            if bucket not in self._missing:
                return bucket
            self._asked_for[bucket] = None
            return self._ladder.stand_in(bucket, self._missing)

    def next(self) -> tuple[Bucket, bool] | None:
        """The bucket to compile next, and whether a step has asked for it. None: all are there."""
        with self._lock:
            if self._asked_for:
                return next(iter(self._asked_for)), True
            return (min(self._missing), False) if self._missing else None

    def arrived(self, bucket: Bucket) -> None:
        """The bucket's program is there."""
        with self._lock:
            self._missing.remove(bucket)
            self._asked_for.pop(bucket, None)
