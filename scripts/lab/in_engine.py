"""Decode steps as the engine sees them: where the time between two results goes, beyond the step itself.

A recorder between the engine and its runner notes when each step is dispatched, when its result is there, and when its
tokens have left the engine. Nothing of the engine is changed for it.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.delivery import Tokens
from batcher.engine import Engine
from batcher.request import Request, SamplingParams
from batcher.step import (
    Bucket,
    Capacity,
    PagesRead,
    Runner,
    StagedPages,
    StepHandle,
    StepInput,
    StepOutput,
    Variant,
    WeightsKind,
)
from scripts.lab.serve_all import serve_all

NUM_SETTLING = 5  # steps with all rows before the first one that counts
NUM_ROWS = 1  # place of the number of rows in a packed buffer
TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class InEngine:
    """Figures of the steps with all rows; medians in milliseconds."""

    num_rows: int
    step_ms: float  # from result to result
    dispatch_ms: float  # duration of execute()
    device_ms: float  # from the dispatch, or from the result before it if that came later, to the result
    idle_ms: float  # from the result before it to the end of its dispatch: no step was in flight. 0 if it was ahead
    delivery_ms: float  # from the result until its tokens have left: a thread wakes, and the engine takes them in
    next_ms: float  # from then until the next step is given to execute(): scheduled and packed


@dataclass(slots=True)
class _Record:
    begun_s: float
    dispatched_s: float = 0.0
    returned_s: float = 0.0
    delivered_s: float = 0.0


class Recorder:
    """`Runner` that passes everything on, and keeps the times of the decode steps with `num_rows` rows."""

    def __init__(self, runner: Runner, num_rows: int) -> None:
        self.records: list[_Record] = []
        self._runner = runner
        self._num_rows = num_rows
        self._undelivered: deque[_Record] = deque()

    def capacity(self) -> Capacity:
        return self._runner.capacity()

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> Collection[Bucket]:
        return self._runner.warm_up(buckets, report, may_wait)

    def compile_later(self, bucket: Bucket) -> None:
        self._runner.compile_later(bucket)

    def stage(self, kind: WeightsKind, identity: int) -> None:
        self._runner.stage(kind, identity)

    def drop(self, kind: WeightsKind, identity: int) -> None:
        self._runner.drop(kind, identity)

    def read_pages(self, pages: Sequence[int]) -> PagesRead:
        return self._runner.read_pages(pages)

    def stage_pages(self, pages: Sequence[np.ndarray]) -> StagedPages:
        return self._runner.stage_pages(pages)

    def write_pages(self, staged: StagedPages, pages: Sequence[int]) -> None:
        self._runner.write_pages(staged, pages)

    def recover(self) -> None:
        self._runner.recover()

    @property
    def num_compiles(self) -> int:
        return self._runner.num_compiles

    def execute(self, step: StepInput) -> StepHandle:
        if not step.bucket.decode_only or step.packed[NUM_ROWS] != self._num_rows:
            return self._runner.execute(step)
        record = _Record(time.perf_counter())
        handle = self._runner.execute(step)
        record.dispatched_s = time.perf_counter()
        self.records.append(record)
        return _Handle(handle, record, self._undelivered)

    def hear(self, tokens: Tokens) -> None:
        """The engine's listener. A step with all rows, of which none ends, has all its tokens here."""
        if len(tokens.numbers) == self._num_rows and self._undelivered:
            self._undelivered.popleft().delivered_s = time.perf_counter()


class _Handle:
    def __init__(self, handle: StepHandle, record: _Record, undelivered: deque[_Record]) -> None:
        self._handle = handle
        self._record = record
        self._undelivered = undelivered

    def result(self) -> StepOutput:
        output = self._handle.result()
        self._record.returned_s = time.perf_counter()
        self._undelivered.append(self._record)
        return output


def ladder_of(num_rows: int, capacity: Capacity) -> BucketLadder:
    """The fewest programs: decodes of `num_rows` rows, and one for prompts."""
    budget = capacity.max_num_batched_tokens
    return BucketLadder(
        BucketConfig(
            max_num_batched_tokens=budget,
            max_num_seqs=num_rows,
            min_decode_rows=num_rows,
            min_mixed_tokens=budget,
            half_steps=False,
            few_rows=num_rows,
        )
    )


def num_drawn(num_rows: int, context: int, steps: int, budget: int) -> int:
    """Tokens that each request draws for so many steps with all rows. The first requests draw while the prompts of the
    others are computed, a step for each chunk of a prompt at worst."""
    chunks = num_rows * -(-context // max(1, budget - num_rows))
    return steps + NUM_SETTLING + chunks + 2


def time_in_engine(
    runner: Runner, num_rows: int, *, context: int, steps: int, sampling: dict[str, Any], pipeline_depth: int = 2
) -> InEngine:
    """Times `steps` decode steps of `num_rows` requests that have `context` tokens, in an engine with its own threads.

    Args:
        sampling: the requests' `temperature`, `top_p` and `top_k`.
    """
    capacity = runner.capacity()
    ladder = ladder_of(num_rows, capacity)
    decode = Variant.SAMPLE if sampling["temperature"] else Variant.GREEDY
    programs = [b for b in ladder.buckets() if b.variant is (decode if b.decode_only else Variant.SAMPLE)]
    runner.warm_up(programs, lambda line: None)
    recorder = Recorder(runner, num_rows)
    config = EngineConfig(eos_token_ids=(), prefix_caching=False, pipeline_depth=pipeline_depth, seed=0)
    engine = Engine(recorder, config, ladder)
    max_tokens = num_drawn(num_rows, context, steps, capacity.max_num_batched_tokens)
    rng, requests = np.random.default_rng(0), []
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    for number in range(num_rows):
        prompt = rng.integers(0, capacity.vocab_size, context).tolist()
        requests.append(Request(request_id=str(number), prompt=prompt, sampling=params))
    engine.listen(recorder.hear)
    serve_all(engine, requests, TIMEOUT_S)
    return _figures(num_rows, recorder.records, pipeline_depth)


def _figures(num_rows: int, records: list[_Record], pipeline_depth: int) -> InEngine:
    counted = [record for record in records[NUM_SETTLING:] if record.delivered_s]
    if len(counted) <= pipeline_depth:
        raise RuntimeError(f"too few steps had all {num_rows} rows: raise --steps, or lower --context")
    pairs = list(itertools.pairwise(counted))
    ahead = list(zip(counted, counted[pipeline_depth:], strict=False))
    return InEngine(
        num_rows=num_rows,
        step_ms=_median_ms(b.returned_s - a.returned_s for a, b in pairs),
        dispatch_ms=_median_ms(record.dispatched_s - record.begun_s for record in counted),
        device_ms=_median_ms(b.returned_s - max(a.returned_s, b.begun_s) for a, b in pairs),
        idle_ms=_median_ms(max(0.0, b.dispatched_s - a.returned_s) for a, b in pairs),
        delivery_ms=_median_ms(record.delivered_s - record.returned_s for record in counted),
        next_ms=_median_ms(b.begun_s - a.delivered_s for a, b in ahead),
    )


def _median_ms(seconds: Iterable[float]) -> float:
    return float(np.median(list(seconds))) * 1e3
