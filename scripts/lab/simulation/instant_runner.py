"""A runner whose steps take no time."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from batcher.step import Bucket, Capacity, PagesRead, StagedPages, StepInput, StepOutput, WeightsKind

TOKEN = 5  # that every row of every step draws


class InstantRunner:
    """`Runner` that computes nothing. The outputs of steps with as many rows are the same object."""

    num_compiles = 0

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._handles: dict[int, _Handle] = {}

    def capacity(self) -> Capacity:
        return self._capacity

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> list[Bucket]:
        return []

    def compile_later(self, bucket: Bucket) -> None:
        raise RuntimeError("nothing is left for later here")

    def execute(self, step: StepInput) -> _Handle:
        rows = step.bucket.num_rows
        if rows not in self._handles:
            output = StepOutput(tokens=np.full((rows, 1), TOKEN, np.int32), finite=np.ones(rows, bool))
            self._handles[rows] = _Handle(output)
        return self._handles[rows]

    def stage(self, kind: WeightsKind, identity: int) -> None: ...

    def drop(self, kind: WeightsKind, identity: int) -> None: ...

    def read_pages(self, pages: Sequence[int]) -> PagesRead:
        return NO_PAGES

    def stage_pages(self, pages: Sequence[np.ndarray]) -> StagedPages:
        return NO_PAGES

    def write_pages(self, staged: StagedPages, pages: Sequence[int]) -> None: ...

    def recover(self) -> None:
        raise RuntimeError("nothing ever fails here")


class _NoPages:
    """Of K/V that there are not."""

    def copy_to(self, pages: Sequence[np.ndarray]) -> None: ...


NO_PAGES = _NoPages()


class _Handle:
    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        return self._output
