"""The engine without threads: it plans and dispatches steps, takes in their results and returns the outputs."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.deferred_programs import DeferredPrograms
from batcher.delivery import Delivery, StepDelivery
from batcher.page_events import PageEventRecorder, PageEventSink
from batcher.request import ErrorCode, FinishReason
from batcher.requests import counting
from batcher.requests.live_requests import LiveRequests
from batcher.requests.page_mover import Moved, Saved
from batcher.scheduling.multi_step import SeveralSteps
from batcher.scheduling.page_moves import PageLoad, PageSave
from batcher.scheduling.plan import StepPlan
from batcher.scheduling.request_state import State
from batcher.scheduling.row_tokens import OneToken
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.speculation import Drafts
from batcher.scheduling.static import StaticScheduler
from batcher.stats import EngineStats
from batcher.step import Capacity, PagesRead, Runner, StepHandle, StepOutput
from batcher.step_log import StepLog
from batcher.step_watch import StepWatch
from batcher.steps.pack import Packer
from batcher.steps.step_reader import StepReader

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A dispatched step whose result has not been read."""

    plan: StepPlan
    handle: StepHandle | Future[StepOutput]


class EngineCore:
    """Not thread-safe: one thread calls everything here. Only `InFlight.handle.result()` may run elsewhere."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        ladder: BucketLadder,
        clock: Callable[[], float],
        page_events: PageEventSink | None = None,
    ) -> None:
        capacity = runner.capacity()
        self.scheduler = _scheduler(capacity, config, ladder, clock)
        if page_events is not None:
            self.scheduler.record_pages(PageEventRecorder(page_events))
        self._begun: list[PageLoad | tuple[PageSave, PagesRead]] = []  # for `take_moves`
        self.in_flight: deque[InFlight] = deque()  # oldest first
        self._runner = runner
        self._clock = clock
        self._packer = Packer(capacity, ladder.config.max_num_seqs)
        self._counts = EngineStats(num_pages=capacity.num_pages)
        self.requests = LiveRequests(self.scheduler, self._counts, clock)
        self._reader = StepReader(self.scheduler, self.requests, self._counts)
        self._step_log = StepLog()
        self.step_watch = StepWatch(config.step_timeout_s, clock)
        self._depth = config.pipeline_depth
        self._failure: BaseException | None = None  # of a step in flight
        self._lost: list[StepPlan] = []  # failed steps, and those that were in flight behind them
        self._num_compiles_at_start = runner.num_compiles
        self._deferred_programs = DeferredPrograms(ladder, ())

    def warmed_up(self, later: DeferredPrograms) -> None:
        """The warm-up has left these programs. Other compilations are counted in `num_compiles_after_warm_up`."""
        self._num_compiles_at_start = self._runner.num_compiles
        self._deferred_programs = later

    # --- steps ---

    def can_dispatch(self) -> bool:
        """Whether the pipeline has room, and no step in flight is known to have failed."""
        return len(self.in_flight) < self._depth and self._failure is None

    def dispatch(self) -> InFlight | None:
        """Plans the next step and gives it to the runner. None: nothing can run now.

        A step that the runner refuses counts as in flight, and its `result()` raises the runner's error.
        """
        plan = self.scheduler.schedule()
        self._begin_moves()
        if plan is None:
            return None
        bucket, plan.bucket = plan.bucket, self._deferred_programs.or_fallback(plan.bucket)
        self._counts.num_stand_in_steps += plan.bucket != bucket
        counting.count_plan(self._counts, plan, self._clock)
        self._step_log.dispatched(plan, self._clock())
        handle: StepHandle | Future[StepOutput]
        try:
            handle = self._runner.execute(self._packer.pack(plan))
        except Exception as error:
            self._failure = error
            handle = Future()
            handle.set_exception(error)
        self.in_flight.append(InFlight(plan, handle))
        self.step_watch.dispatched()
        return self.in_flight[-1]

    def complete(self, output: StepOutput) -> StepDelivery:
        """Takes in the result of the oldest step in flight."""
        plan = self._pop_oldest()
        if self._lost:  # an earlier step failed, so this one's result cannot be trusted
            return StepDelivery(self._lose(plan))
        return self._reader.read(plan, output, self._clock())

    def fail(self, error: BaseException) -> list[Delivery]:
        """The oldest step in flight failed. Its requests and those of the steps behind it end with the error.

        They end when the last of these steps has returned. Then the runner recovers, and all other running requests
        are recomputed. Raises the runner's error if it cannot recover.
        """
        plan = self._pop_oldest()
        self._failure = self._failure or error
        return self._lose(plan)

    def _pop_oldest(self) -> StepPlan:
        plan = self.in_flight.popleft().plan
        self.scheduler.step_returned(plan.number)
        ran_s = self.step_watch.returned(len(self.in_flight))
        self.scheduler.row_tokens.took(plan, ran_s)
        if self.scheduler.offloaded is not None and plan.chunks:
            self.scheduler.offloaded.times.computed(ran_s, plan.num_tokens)
        return plan

    def stats(self) -> EngineStats:
        """A copy of all counts, with the gauges of this moment."""
        scheduler, counts = self.scheduler, self._counts
        counts.num_requests_running = len(scheduler.running)
        counts.num_requests_waiting = scheduler.num_waiting + self.requests.num_compiling
        counts.num_pages_used = scheduler.pool.num_used
        counts.num_pages_reusable = scheduler.pool.num_reusable
        counts.num_preemptions = scheduler.num_preemptions
        counts.prefix_cache_queries = scheduler.prefix_queries
        counts.prefix_cache_hits = scheduler.prefix_hits
        counts.num_adapters_resident = scheduler.adapters.num_resident
        counts.num_adapters_staged = scheduler.adapters.num_staged
        counts.num_adapter_loads = scheduler.adapters.num_writes
        counts.running_of_adapters = scheduler.adapters.num_rows()
        if scheduler.offloaded is not None:
            counts.offloading = scheduler.offloaded.held()
        if scheduler.page_events is not None:
            counts.kv_events_published = scheduler.page_events.num_told
            counts.kv_events_dropped = scheduler.page_events.num_lost
        counts.num_programs_to_come = len(self._deferred_programs)
        counts.num_compiles_after_warm_up = self._runner.num_compiles - self._num_compiles_at_start
        counts.recent_steps = self._step_log.recent()
        return counts.copy()

    def tell_of_pages(self) -> None:
        """Tells who follows the pages what has become of them since the last call."""
        if self.scheduler.page_events is not None:
            self.scheduler.page_events.tell()

    def check_integrity(self) -> None:
        """For an idle engine, which must hold nothing. An inconsistency is logged and counted; serving goes on."""
        scheduler = self.scheduler
        try:
            scheduler.check_integrity()
            assert scheduler.pool.num_used == 0, f"{scheduler.pool.num_used} pages are in use"
            assert not self.in_flight and not self.requests.sequences, "requests or steps are left"
        except AssertionError as error:
            self._counts.integrity_failures += 1
            _log.error("the idle engine is inconsistent: %s", error)

    # --- adapters ---

    def next_to_stage(self, *, may_stage: bool) -> list[int]:
        """The LoRA adapters to stage now. Unstages those that no request waits for any more."""
        unwanted, wanted = self.scheduler.adapters.staging(may_stage=may_stage)
        for adapter in unwanted:
            self._runner.unstage_adapter(adapter)
        return wanted

    # --- pages that leave the device and come back ---

    def _begin_moves(self) -> None:
        """The pages that leave are read before the step that may write to them."""
        offloaded = self.scheduler.offloaded
        if offloaded is None:
            return
        for move in offloaded.take_moves():
            if isinstance(move, PageLoad):
                self._begun.append(move)
                continue
            try:
                self._begun.append((move, self._runner.read_pages(move.pages)))
            except Exception as error:
                self.take_moved(Saved(move, error))

    def take_moves(self) -> list[PageLoad | tuple[PageSave, PagesRead]]:
        """What has been begun since the last call, in the order in which it is to be done."""
        begun, self._begun = self._begun, []
        return begun

    def take_moved(self, moved: Moved) -> None:
        """Pages have come to the host, or to the device."""
        offloaded = self.scheduler.offloaded
        assert offloaded is not None
        if moved.error is not None:
            _log.warning("pages could not be copied: %s: %s", type(moved.error).__name__, moved.error)
        if isinstance(moved, Saved):
            offloaded.end_save(moved.save, moved.error)
            return
        load = moved.load
        if not load.is_wanted:
            return
        if moved.staged is not None:
            stop = load.num_written + moved.num_pages
            self._runner.write_pages(moved.staged, load.pages[load.num_written : stop])
            load.num_written = stop
        if moved.is_last:
            self.scheduler.end_load(load)

    def next_give_ups(self) -> tuple[float | None, ...]:
        """When `give_up` has something to do, by the clock."""
        offloaded = self.scheduler.offloaded
        return () if offloaded is None else (offloaded.next_deadline(), offloaded.kept.next_deadline())

    def give_up(self) -> None:
        """Rows that have waited for pages for too long go on without the missing ones. Pages that other engines have
        not taken in time are kept no longer."""
        offloaded = self.scheduler.offloaded
        if offloaded is not None:
            for load in offloaded.overdue():
                self.scheduler.end_load(load)
            offloaded.kept.drop_overdue(self._clock())

    # --- failure ---

    def _lose(self, plan: StepPlan) -> list[Delivery]:
        self._lost.append(plan)
        if self.in_flight:
            return []
        self._counts.failed_steps += len(self._lost)
        self._runner.recover()  # raises if the device is lost; the engine then dies
        error, self._failure = self._failure, None
        message = f"a step that computed this request failed: {type(error).__name__}: {error}"
        victims = {seq.request_id: seq for plan in self._lost for seq in plan.rows if seq.state is not State.FINISHED}
        end, reason = self.requests.end, FinishReason.ERROR
        deliveries = [end(seq, reason, message, ErrorCode.STEP_FAILED) for seq in victims.values()]
        self._lost.clear()
        self._recompute()
        return deliveries

    def change(self, work: Callable[[], None]) -> None:
        """Runs `work` with no step in flight, and empties the prefix cache. Running requests are recomputed."""
        assert not self.in_flight, "steps are in flight"
        try:
            work()
        finally:
            self._recompute()

    def _recompute(self) -> None:
        """The device has lost pages, slots and adapter slots."""
        self._packer.forget()
        self.scheduler.recover()


def _scheduler(capacity: Capacity, config: EngineConfig, ladder: BucketLadder, clock: Callable[[], float]) -> Scheduler:
    """The scheduler that the settings ask for."""
    if config.scheduling is Scheduling.STATIC:
        return StaticScheduler(capacity, ladder, config)  # a baseline, without drafts
    row_tokens = OneToken()
    if ladder.config.num_steps > 1:
        row_tokens = SeveralSteps(ladder, config.pipeline_depth)
    elif ladder.config.num_drafts:
        row_tokens = Drafts(ladder, config.step_times, config.draft_cost)
    return Scheduler(capacity, ladder, config, row_tokens, clock)
