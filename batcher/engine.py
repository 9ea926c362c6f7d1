"""The engine: requests enter from any thread, tokens leave by callback, steps are dispatched ahead of their reading.

    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=512, max_num_seqs=64))
    engine = Engine(runner, EngineConfig(eos_token_ids=(128001, 128008, 128009)), ladder)
    engine.warm_up(print)                    # compiles every bucket, or leaves some to be compiled after `start`
    engine.start()                           # the engine's thread and its reader thread
    engine.listen(on_tokens)                 # optional: plain tokens of all requests leave by on_tokens(Tokens)
    engine.add_request(request, on_output)   # thread-safe; on_output(RequestOutput) runs on the engine's thread
    engine.abort(request.request_id)         # thread-safe, at any time, repeatable
    engine.change(Change(...))               # thread-safe; other weights, between two steps
    engine.pause(mode, clear_cache, on_done) # thread-safe; no request runs until `resume`
    engine.resume(on_done)                   # thread-safe; requests run again
    engine.in_use(WeightsKind.ADAPTER)           # thread-safe; the LoRA adapters, or the models, of all requests
    engine.stats()                           # EngineStats: totals since start, gauges of now
    engine.shutdown(drain_s=10)              # waits 10 s for requests to finish, then aborts the rest

Every request that `add_request` accepts gets exactly one output with a `finish_reason`. It is the last one, also after
an abort or a failure. `on_output` must be quick and must not raise. If it raises, only its own request is aborted.

The engine also runs without threads, for offline use and deterministic tests: do not call `start()`, but

    while engine.step():
        pass

`step()` takes in arrivals, dispatches the next step, and reads the oldest step when `pipeline_depth` are in flight or
nothing could be dispatched. The same order of calls gives the same steps.

The loop keeps `pipeline_depth` steps in flight (2: step N + 1 is dispatched before step N is read). The host's work on
one step overlaps with the device's work on the next. The reader thread only blocks on results, so the engine's thread
never blocks on the device. When idle, both threads sleep until something arrives.

A failed step ends the requests in it, and the engine goes on if `runner.recover()` succeeds. If not, or if the engine's
own code fails, or a step does not return in time (`EngineConfig.step_timeout_s`), every request ends with an error,
`on_death` is called, and every later call raises EngineDeadError.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from queue import SimpleQueue
from random import Random

from batcher.buckets import BucketLadder
from batcher.change import Change, ForgetPrefixes, OnDone, Pause, PauseMode, Resume
from batcher.changes import Changes
from batcher.config import EngineConfig
from batcher.core import EngineCore, InFlight
from batcher.deferred_programs import DeferredPrograms, compile_while_serving
from batcher.delivery import Delivery, Tokens
from batcher.errors import EngineClosedError, EngineDeadError, InvalidRequestError, StepTimeoutError
from batcher.grammar import Grammars
from batcher.inbox import Abort, Inbox, InboxItem, ModelUnloaded, Result
from batcher.page_events import PageEventSink
from batcher.request import ErrorCode, FinishReason, Request, RequestOutput
from batcher.requests.admission import make_request_state
from batcher.requests.live_requests import Staged
from batcher.requests.masks import Ask, MaskResult, MaskThreads, answer
from batcher.requests.page_mover import Loaded, Moved, PageMover, Saved
from batcher.requests.weights_stager import WeightsStager
from batcher.scheduling.digests import add_digests
from batcher.scheduling.request_state import OnOutput, RequestState
from batcher.stats import EngineStats, ModelState
from batcher.step import Bucket, Runner, WeightsKind

_log = logging.getLogger(__name__)

MASK_WAIT_S = 0.004  # longest wait of a step for masks; two threads compute about two hundred masks in this time
DIGESTS_AT_ONCE = 128  # pages whose digests are computed together, in a tenth of a millisecond
GIVE_WAY_S = 1e-5  # long enough for another thread to run
IDLE_CHECK_S = 1.0  # time without requests after which the engine checks its integrity, once


class Engine:
    """Runs requests on a `Runner`. The module's docstring describes its use and its threads.

    `clock` gives seconds from any origin and never goes back. Without `grammars`, requests with a grammar are refused.
    `page_events` is told of stored pages, and is closed when the engine ends. `core` schedules, dispatches and
    completes steps; only the engine's thread uses it.
    """

    def __init__(
        self,
        runner: Runner,
        config: EngineConfig,
        ladder: BucketLadder,
        *,
        grammars: Grammars | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_death: Callable[[BaseException], None] | None = None,
        page_events: PageEventSink | None = None,
    ) -> None:
        self._capacity = runner.capacity()
        limits = ladder.config
        limits.check(self._capacity)
        self.config = config
        self.ladder = ladder
        self._runner = runner
        self._clock = clock
        self._on_death = on_death
        self.models_off_device: Callable[[], Mapping[int, ModelState]] = dict  # may be replaced
        # Model -> its end-of-sequence ids, and its grammars.
        self._models: dict[int, tuple[tuple[int, ...], Grammars | None]] = {0: (config.eos_token_ids, grammars)}
        self._page_events = page_events
        self.core = EngineCore(runner, config, ladder, clock, page_events)
        self._inbox = Inbox(limits.max_num_seqs + config.max_waiting, config.max_waiting)
        self._mask_threads = MaskThreads(self._inbox.computed)
        self._stager = WeightsStager(runner, self.core.scheduler.staged, clock, self._inbox.put)
        self._page_mover = self._make_page_mover()
        self._seeds = Random(secrets.randbits(64) if config.seed is None else config.seed)
        self._seeds_lock = threading.Lock()
        self._on_tokens: Callable[[Tokens], None] | None = None
        self._deferred_programs = DeferredPrograms(ladder, ())
        self._report: Callable[[str], None] = _ignore
        self._news: deque[InboxItem] = deque()  # taken from the inbox, but not handled yet
        self._changes = Changes(self.core, self._clear_store)
        self._is_unchecked = False  # steps have run since the last check of integrity
        self._to_read: SimpleQueue[InFlight | None] = SimpleQueue()
        self._threads: tuple[threading.Thread, ...] = ()

    # --- for callers, thread-safe ---

    def warm_up(self, report: Callable[[str], None], may_wait: Collection[Bucket] = ()) -> None:
        """Compiles every bucket. Later compilations are counted in the statistics.

        Args:
            report: is called with a line about each phase, from any thread.
            may_wait: programs that may be compiled after `start`, by a thread, if compiling them takes long. Until
                then, larger programs run in their place.
        """
        left = self._runner.warm_up(self.ladder.buckets(), report, may_wait)
        self._deferred_programs, self._report = DeferredPrograms(self.ladder, left), report
        self.core.warmed_up(self._deferred_programs)

    def number_from(self, first: int) -> None:
        """Numbers the requests from `first` on. Call it before the first request."""
        self._inbox.next_number = first

    def listen(self, on_tokens: Callable[[Tokens], None]) -> None:
        """Sends the plain tokens of all requests in a step to `on_tokens` in one call, after the step's other outputs.
        Call it before the first request. Without it, the `on_output` of each request gets the request's own tokens."""
        self._on_tokens = on_tokens

    def add_request(self, request: Request, on_output: OnOutput) -> None:
        """Queues the request.

        Raises:
            InvalidRequestError: it could never run; `param` names the field.
            QueueFullError: `max_waiting` requests wait already.
            EngineClosedError, EngineDeadError: no more requests are taken.
        """
        self._inbox.check_open()
        with self._seeds_lock:
            seed = self._seeds.getrandbits(63)
        grammar = request.sampling.grammar
        if request.model not in self._models and self._capacity.max_models:
            raise InvalidRequestError("model", "the model that it names is not loaded")
        eos_token_ids, grammars = self._models.get(request.model, self._models[0])
        if grammar is not None and grammars is None:
            raise InvalidRequestError("grammar", "this engine serves no grammars")
        sequence = make_request_state(
            request,
            on_output,
            capacity=self._capacity,
            eos_token_ids=eos_token_ids,
            seed=seed,
            arrived_s=self._clock(),
            matcher=None if grammar is None or grammars is None else grammars.matcher(grammar),
        )
        if self.config.prefix_caching:
            # The caller's thread sleeps between parts. Without the sleeps it would hold the interpreter for
            # milliseconds, and the engine's thread could not run.
            while not add_digests(sequence, self._capacity.page_size, DIGESTS_AT_ONCE):
                time.sleep(GIVE_WAY_S)
        self._inbox.accept(sequence)

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request soon, with `reason`. STOP means that the caller found a stop string in the text. The id of
        an unknown or ended request is ignored."""
        self._inbox.abort(request_id, reason)

    def reset_prefix_cache(self, *, reset_external: bool = False) -> None:
        """Empties the prefix cache soon. Running requests keep their pages, and later requests do not find them.

        `reset_external`: also drops the pages in the host's memory and in files, like vLLM's parameter of this name."""
        self._inbox.put(ForgetPrefixes(reset_external))

    def change(self, change: Change) -> None:
        """Makes the change soon, between two steps. Raises EngineClosedError or EngineDeadError."""
        self._inbox.ask(change)

    def pause(self, mode: PauseMode, clear_cache: bool, on_done: OnDone) -> None:
        """Pauses the engine: no request runs until `resume`, and new requests wait. Changes are made during a pause.

        Args:
            mode: what happens to running requests. With ABORT, waiting requests are aborted, too.
            clear_cache: empties the prefix cache.
            on_done: is called on the engine's thread when no request runs any more. It gets a ValueError if `resume`
                was called before that.

        Raises:
            EngineClosedError, EngineDeadError: the engine takes no more requests.
        """
        self._inbox.ask(Pause(mode=mode, clear_cache=clear_cache, on_done=on_done))

    def resume(self, on_done: OnDone) -> None:
        """Ends a pause. `on_done` is called on the engine's thread, also if there was no pause. Raises
        EngineClosedError or EngineDeadError."""
        self._inbox.ask(Resume(on_done=on_done))

    def add_model(self, model: int, eos_token_ids: tuple[int, ...], grammars: Grammars | None) -> None:
        """Lets requests name the model, with its end-of-sequence ids. Without `grammars`, its requests have none."""
        self._models[model] = eos_token_ids, grammars

    def remove_model(self, model: int) -> None:
        """Lets a model leave the device soon. No request has it."""
        del self._models[model]
        self._inbox.put(ModelUnloaded(model))

    def in_use(self, kind: WeightsKind) -> set[int]:
        """The LoRA adapters, or the models, of the requests that have not had their last output."""
        return set(self._inbox.num_live_of(kind))

    def stats(self) -> EngineStats:
        """Totals since start and present gauges. Raises EngineDeadError if the engine is dead."""
        self._inbox.check_alive()
        stats = self.core.stats()
        stats.num_requests_waiting += self._inbox.num_arrived
        if self._page_mover is not None:
            self._page_mover.count(stats.offloading)
        if self._capacity.max_loras:
            stats.waiting_of_adapters = self._num_waiting(WeightsKind.ADAPTER, stats.running_of_adapters)
        if self._capacity.max_models:
            stats.models = {**self.models_off_device(), **stats.models}
            stats.waiting_of_models = self._num_waiting(WeightsKind.MODEL, stats.running_of_models)
        return stats

    def _num_waiting(self, kind: WeightsKind, running: Mapping[int, int]) -> dict[int, int]:
        live = self._inbox.num_live_of(kind)
        live.subtract(running)
        return dict(+live)

    @property
    def num_live(self) -> int:
        """The number of accepted requests that have not had their last output."""
        return self._inbox.num_live

    @property
    def death(self) -> BaseException | None:
        """Why the engine is dead; None while it lives."""
        return self._inbox.death

    def start(self) -> None:
        """Starts the engine's thread and its reader thread. Raises RuntimeError if they were started before."""
        self._inbox.check_open()
        if self._threads:
            raise RuntimeError("the engine has been started already")
        self._threads = (
            threading.Thread(target=self._run, name="engine", daemon=True),
            threading.Thread(target=self._read, name="engine-reader", daemon=True),
        )
        for thread in self._threads:
            thread.start()
        self._stager.start()
        if self._page_mover is not None:
            self._page_mover.start()
        if self._deferred_programs:
            compiling = (self._deferred_programs, self._runner, self._inbox, self._report, self._clock)
            compiler = threading.Thread(
                target=compile_while_serving, args=compiling, name="engine-compiler", daemon=True
            )
            compiler.start()
            # A compilation cannot be interrupted. `shutdown` does not wait for it, but the end of the interpreter must.
            atexit.register(_end_compiler, self._inbox, compiler)

    def drain(self, timeout_s: float) -> bool:
        """Accepts no more requests and waits until all others have ended. Returns False if some have not ended after
        `timeout_s` seconds."""
        self._inbox.close()
        if self._threads:
            return self._inbox.wait_until_ended(timeout_s)
        until = self._clock() + timeout_s
        while self.num_live and self._clock() < until:
            self.step()
        return not self.num_live

    def shutdown(self, drain_s: float = 0.0) -> None:
        """Accepts no more requests, waits `drain_s` seconds for the others to finish, and aborts the rest. Then it
        waits for the steps in flight and ends the threads. It may be called several times, and on a dead engine."""
        if self.death is None:
            self.drain(drain_s)
        self._stager.close()
        if self._page_mover is not None:
            self._page_mover.close()
        self._inbox.stop()
        is_stuck = isinstance(self.death, StepTimeoutError)  # a thread that waits for the device would not end
        if self._threads:
            engine, reader = self._threads
            engine.join()
            if not is_stuck:
                reader.join()
        elif self.death is None:
            self._stop()
            while self.core.in_flight:
                self._take([_result(self.core.in_flight[0])])
        self._mask_threads.close()
        if not is_stuck:
            self._stager.join()
            if self._page_mover is not None:
                self._page_mover.join()
        if self._page_events is not None:
            self.core.tell_of_pages()
            self._page_events.close()

    # --- without threads ---

    def step(self) -> bool:
        """Does one round of work on the caller's thread. Returns False if every request has had its last output.

        Raises EngineDeadError if the engine cannot recover from an error. All requests have then ended with an error.
        """
        if self._threads:
            raise RuntimeError("the engine runs on its own thread; step() is for an engine that was not started")
        self._inbox.check_alive()
        try:
            self._take_inbox()
            self._changes.make()
            self._ask_for_masks(self._answer_here)
            self._stage_here()
            dispatched = self._dispatch() is not None
            has_moved = self._page_mover is not None and self._page_mover.work_here()
            if self.core.in_flight and not (dispatched and self._can_dispatch()):
                self._take([_result(self.core.in_flight[0])])
            elif not dispatched and not has_moved and not self._stage_here():
                self._check_not_stuck()
            self.core.tell_of_pages()
        except Exception as error:
            self._die(error)
            raise EngineDeadError(f"the engine died: {error}") from error
        return self.num_live > 0

    # --- the engine's thread ---

    def _run(self) -> None:
        try:
            while True:
                results = self._wait()
                self._take(results)
                self._ask_for_masks(self._hurry)
                self._take_inbox()
                if self._inbox.is_stopping:
                    break
                self._changes.make()
                self._ask_for_masks(self._mask_threads.ask)
                self._stager.ask(self._next_to_stage())
                while (step := self._dispatch()) is not None:
                    self._to_read.put(step)
                    self._is_unchecked = True
                if not self.core.in_flight:
                    # A model for which others leave, because none of them can run.
                    self._stager.ask(self._next_to_stage())
                self._check_not_stuck()
            self._stop()
            while self.core.in_flight:
                self._take(self._wait())
        except Exception as error:
            self._die(error)
        finally:
            self._to_read.put(None)

    def _read(self) -> None:
        """The reader thread. It waits for the result of one step after the other."""
        while (step := self._to_read.get()) is not None:
            self._inbox.returned(_result(step))

    def _wait(self) -> list[Result]:
        """Sleeps until there is something to do. Returns the results that have arrived."""
        core = self.core
        core.tell_of_pages()
        is_idle = not core.requests.sequences and not core.in_flight
        if self._is_unchecked and is_idle and not self._inbox.wait(IDLE_CHECK_S, is_idle=True):
            self._is_unchecked = False
            core.check_integrity()
        deadlines = core.requests.next_deadline(), core.step_watch.next_check(), *core.next_give_ups()
        times = [time for time in deadlines if time is not None]
        timeout_s = max(0.0, min(times) - self._clock()) if times else None
        self._inbox.wait(timeout_s, is_idle=not core.in_flight)
        results = self._inbox.take_results()
        if not results:
            core.step_watch.check()
        return results

    def _take(self, results: list[Result]) -> None:
        for result in results:
            if isinstance(result, BaseException):
                self._deliver(self.core.fail(result))
                continue
            step = self.core.complete(result)
            self._deliver(step.outputs)
            if step.tokens is not None and self._on_tokens is not None:
                self._on_tokens(step.tokens)
            else:
                self._deliver(step.plain_outputs())

    def _take_inbox(self) -> None:
        """Handles the messages of other threads, in the order of their arrival."""
        core = self.core
        self._news.extend(self._inbox.take())
        while self._news:
            match news := self._news.popleft():
                case RequestState():
                    core.requests.add(news)
                case Abort(sequence, reason):
                    self._deliver(core.requests.abort(sequence, reason))
                case MaskResult():
                    self._deliver(core.requests.take_mask(news))
                case Staged():
                    self._deliver(core.requests.take_staged(news))
                case Saved() | Loaded():
                    self._take_moved(news)
                case ModelUnloaded(model) if core.scheduler.models is not None:
                    core.scheduler.models.unload(model)
                case Change() | Pause() | Resume():
                    self._deliver(self._changes.take(news))
                case ForgetPrefixes(reset_external=reset_external):
                    self._changes.forget_prefixes(reset_external=reset_external)
                case Exception() if not self._inbox.is_stopping:
                    raise news
        core.give_up()
        self._deliver(core.requests.expire())

    def _dispatch(self) -> InFlight | None:
        """Dispatches a step, and starts the moves of pages that come before it. None if no step can be dispatched."""
        step = self.core.dispatch() if self._can_dispatch() else None
        if self._page_mover is not None:
            self._page_mover.ask(self.core.take_moves())
        return step

    def _can_dispatch(self) -> bool:
        return self.core.can_dispatch() and self._changes.allow_steps

    def _deliver(self, deliveries: Iterable[Delivery]) -> None:
        ended = []
        for sequence, output in deliveries:
            try:
                sequence.on_output(output)
            except Exception:
                _log.exception("the listener of request %r failed; the request is aborted", sequence.request_id)
                sequence.on_output = _ignore
                self.abort(sequence.request_id)
            if output.finish_reason is not None:
                ended.append(sequence.request_id)
        if ended:
            self._inbox.ended(ended)

    # --- masks ---

    def _ask_for_masks(self, ask: Callable[[list[Ask]], None]) -> None:
        if self.core.requests.asks:
            asks, self.core.requests.asks = self.core.requests.asks, []
            ask(asks)

    def _hurry(self, asks: list[Ask]) -> None:
        """Asks for the masks after a step's tokens, and waits up to MASK_WAIT_S for those that are computed quickly.
        The rows of one step then stay together in the next step."""
        self._inbox.hurry(sum(not ask.sequence.is_slow_to_mask for ask in asks))
        self._mask_threads.ask(asks)
        self._inbox.wait_for_masks(MASK_WAIT_S)

    def _answer_here(self, asks: list[Ask]) -> None:
        """Computes the masks on the caller's thread, in an engine without threads."""
        for ask in asks:
            self._deliver(self.core.requests.take_mask(answer(ask)))

    # --- adapters and models ---

    def _next_to_stage(self) -> list[tuple[WeightsKind, int]]:
        return self.core.next_to_stage(may_stage=self._changes.allow_steps)

    def _stage_here(self) -> bool:
        """Brings weights on the caller's thread, in an engine without threads. Returns whether there were any."""
        has_staged = False
        while asked := self._next_to_stage():
            has_staged = True
            for kind, identity in asked:
                self._deliver(self.core.requests.take_staged(self._stager.bring(kind, identity)))
        return has_staged

    # --- pages that leave the device and come back ---

    def _make_page_mover(self) -> PageMover | None:
        offloaded, offloading = self.core.scheduler.offloaded, self.config.offloading
        if offloaded is None or offloading is None:
            return None
        return PageMover(
            self._runner,
            self._capacity,
            offloaded.num_pages,
            offloading,
            on_moved=lambda moved: self._inbox.put(moved) if self._threads else self._take_moved(moved),
            on_failure=self._inbox.put,
        )

    def _take_moved(self, moved: Moved) -> None:
        self.core.take_moved(moved)
        assert self._page_mover is not None
        self._page_mover.took(moved)

    def _clear_store(self) -> None:
        if self._page_mover is not None:
            self._page_mover.clear_store()

    # --- the end ---

    def _stop(self) -> None:
        self._take_inbox()
        self._refuse_rest(EngineClosedError("the engine is shutting down"))
        self._deliver(self.core.requests.end_all(FinishReason.ABORT))

    def _refuse_rest(self, error: Exception) -> None:
        """Calls the `on_done` of all changes and pauses that will not be made, with `error`."""
        for asked in (*self._news, *self._inbox.take()):
            if isinstance(asked, Change | Pause | Resume):
                asked.on_done(error)
        self._changes.refuse(error)

    def _check_not_stuck(self) -> None:
        core, offloaded = self.core, self.core.scheduler.offloaded
        is_loading = offloaded is not None and offloaded.is_loading_any
        is_staging = any(weights.is_staging for weights in core.scheduler.staged.values())
        is_asking = core.requests.num_masks_wanted or is_staging or is_loading
        is_waiting = core.in_flight or is_asking or core.scheduler.late or not self._changes.allow_steps
        assert is_waiting or not core.requests.sequences, "requests are there, nothing is in flight and nothing can run"

    def _die(self, error: Exception) -> None:
        _log.critical("the engine is dead", exc_info=error)
        orphans = self._inbox.die(error)
        message = f"the engine died: {type(error).__name__}: {error}"
        last = partial(RequestOutput, finish_reason=FinishReason.ERROR, error=message, error_code=ErrorCode.ENGINE_DEAD)
        self._deliver([(seq, last(request_id=seq.request_id, number=seq.number)) for seq in orphans])
        self._refuse_rest(EngineDeadError(message))
        self._inbox.ended(())  # wakes waiting threads, even if there was no request
        if self._on_death is not None:
            self._on_death(error)


def _result(step: InFlight) -> Result:
    """A step's output, or the exception with which it failed. The engine's thread handles both."""
    try:
        return step.handle.result()
    except BaseException as error:
        return error


def _ignore(_news: object) -> None:
    """Does nothing. It replaces a listener that has failed, and a report before the warm-up."""


def _end_compiler(inbox: Inbox, compiler: threading.Thread) -> None:
    """Waits for the program that is being compiled: the process would crash if the interpreter ended before XLA."""
    inbox.stop()
    compiler.join()
