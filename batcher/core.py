"""The part of the engine that has no threads. It plans and dispatches steps, reads their results, and returns
outputs."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig
from batcher.deferred_programs import DeferredPrograms
from batcher.delivery import Delivery, StepDelivery
from batcher.page_events import PageEventRecorder, PageEventSink
from batcher.request import ErrorCode, FinishReason
from batcher.requests import counting
from batcher.requests.live_requests import LiveRequests
from batcher.requests.page_mover import Moved, Saved
from batcher.scheduling.page_moves import PageLoad, PageSave
from batcher.scheduling.request_state import State
from batcher.scheduling.scheduler import Scheduler
from batcher.scheduling.speculation import Drafts
from batcher.scheduling.step_plan import StepPlan
from batcher.stats import EngineStats, ModelState
from batcher.step import PagesRead, Runner, StepHandle, StepOutput, WeightsKind
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
    """Plans, dispatches and completes steps. It is not thread-safe: one thread calls all methods. Only
    `InFlight.handle.result()` may be called on another thread."""

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        ladder: BucketLadder,
        clock: Callable[[], float],
        page_events: PageEventSink | None = None,
    ) -> None:
        capacity = runner.capacity()
        drafts = Drafts(ladder, config.step_times, config.draft_cost) if ladder.config.num_drafts else None
        self.scheduler = Scheduler(capacity, ladder, config, drafts, clock)
        if page_events is not None:
            self.scheduler.record_pages(PageEventRecorder(page_events))
        self._begun: list[PageLoad | tuple[PageSave, PagesRead]] = []  # the next result of `take_moves`
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
        self._failure: BaseException | None = None  # the error of a step in flight
        self._lost: list[StepPlan] = []  # failed steps, and the steps that were in flight after them
        self._num_compiles_at_start = runner.num_compiles
        self._deferred_programs = DeferredPrograms(ladder, ())

    def warmed_up(self, later: DeferredPrograms) -> None:
        """Marks the end of the warm-up. `later` are the programs that it has not compiled. All other compilations from
        now on are counted in `num_compiles_after_warm_up`."""
        self._num_compiles_at_start = self._runner.num_compiles
        self._deferred_programs = later

    # --- steps ---

    def can_dispatch(self) -> bool:
        """Whether the pipeline has room, and no step in flight is known to have failed."""
        return len(self.in_flight) < self._depth and self._failure is None

    def dispatch(self) -> InFlight | None:
        """Plans the next step and gives it to the runner. Returns None if nothing can run now.

        If the runner raises an error, the step still counts as in flight, and its `result()` raises the error.
        """
        plan = self.scheduler.schedule()
        self._begin_moves()
        if plan is None:
            return None
        bucket, plan.bucket = plan.bucket, self._deferred_programs.or_fallback(plan.bucket)
        self._counts.num_stand_in_steps += plan.bucket != bucket
        counting.count_plan(self._counts, plan, self._clock)
        self._step_log.dispatched(plan, self._clock())
        if (policy := self.scheduler.policy) is not None:
            have_waiting = bool(self.scheduler.waiting)
            policy.dispatched(plan, self._clock(), kv_tokens=self.scheduler.kv_tokens, have_waiting=have_waiting)
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
        """Handles the result of the oldest step in flight. Returns the outputs of its requests."""
        plan = self._pop_oldest()
        if self._lost:  # an earlier step failed, so this one's result cannot be trusted
            return StepDelivery(self._lose(plan))
        return self._reader.read(plan, output, self._clock())

    def fail(self, error: BaseException) -> list[Delivery]:
        """Handles the failure of the oldest step in flight. Its requests, and those of the steps after it, end with the
        error.

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
        if self.scheduler.policy is not None:
            self.scheduler.policy.returned(plan.number, self._clock(), ran_s)
        if self.scheduler.offloaded is not None and plan.chunks:
            self.scheduler.offloaded.times.computed(ran_s, plan.num_tokens)
        return plan

    def stats(self) -> EngineStats:
        """A copy of all counts and of the present gauges."""
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
        if scheduler.models is not None:
            counts.running_of_models = running = Counter(seq.request.model for seq in scheduler.running.copy())
            here, states = scheduler.models.on_device(), (ModelState.RESIDENT, ModelState.RUNNING)
            counts.models = {model: states[model in running] for model in here}
            counts.num_models_brought = scheduler.models.num_brought
        if scheduler.offloaded is not None:
            counts.offloading = scheduler.offloaded.held()
        if scheduler.page_events is not None:
            counts.kv_events_published = scheduler.page_events.num_told
            counts.kv_events_dropped = scheduler.page_events.num_lost
        if scheduler.policy is not None:
            counts.slack_tokens = scheduler.policy.slack_tokens
            counts.prediction_error = scheduler.policy.predictor.errors()
        counts.num_programs_to_come = len(self._deferred_programs)
        counts.num_compiles_after_warm_up = self._runner.num_compiles - self._num_compiles_at_start
        counts.recent_steps = self._step_log.recent()
        return counts.copy()

    def tell_of_pages(self) -> None:
        """Publishes the page events since the last call, if there are page events."""
        if self.scheduler.page_events is not None:
            self.scheduler.page_events.tell()

    def check_integrity(self) -> None:
        """Checks that an idle engine holds no pages, requests or steps. An inconsistency is logged and counted, and
        serving goes on."""
        scheduler = self.scheduler
        try:
            scheduler.check_integrity()
            assert scheduler.pool.num_used == 0, f"{scheduler.pool.num_used} pages are in use"
            assert not self.in_flight and not self.requests.sequences, "requests or steps are left"
        except AssertionError as error:
            self._counts.integrity_failures += 1
            _log.error("the idle engine is inconsistent: %s", error)

    # --- adapters and models ---

    def next_to_stage(self, *, may_stage: bool) -> list[tuple[WeightsKind, int]]:
        """The LoRA adapters and models to bring to the device now. Drops those that leave it."""
        asked: list[tuple[WeightsKind, int]] = []
        for kind, weights in self.scheduler.staged.items():
            unwanted, wanted = weights.staging(may_stage=may_stage)
            for identity in unwanted:
                self._runner.drop(kind, identity)
            asked += [(kind, identity) for identity in wanted]
        return asked

    # --- pages that leave the device and come back ---

    def _begin_moves(self) -> None:
        """Starts the moves of pages. Pages that are saved are read before the step that may write to them."""
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
        """The moves that have been started since the last call, in the order in which they must be done."""
        begun, self._begun = self._begun, []
        return begun

    def take_moved(self, moved: Moved) -> None:
        """Handles the end of a save, or pages of a load that are staged on the device."""
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
        """The times, by the clock, at which `give_up` has something to do, or a model may leave. None: never."""
        offloaded, models = self.scheduler.offloaded, self.scheduler.models
        departure = () if models is None else (models.next_departure(),)
        return departure if offloaded is None else (*departure, offloaded.next_deadline())

    def give_up(self) -> None:
        """Ends the loads that have taken too long: their rows go on without the missing pages."""
        offloaded = self.scheduler.offloaded
        if offloaded is not None:
            for load in offloaded.overdue():
                self.scheduler.end_load(load)

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
        """Lets all running requests be recomputed, because the device has lost pages, slots and adapter slots."""
        self._packer.forget()
        self.scheduler.recover()
