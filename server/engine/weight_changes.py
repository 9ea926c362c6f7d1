"""Changes the weights of a running engine, and keeps the name (version) of the weights that serve.

A change has two phases (`wire.Phase`). It moves the weights to the host, brings them back, or loads others: from a
folder, or those of an *update*. An update begins and receives the weights of a trainer while the old ones serve.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Protocol

from batcher.change import Change
from batcher.errors import EngineClosedError, EngineDeadError
from model.inputs.words import described, is_worded
from server.engine import wire

if TYPE_CHECKING:  # the HTTP process does without numpy
    from batcher.engines import AnyEngine

NONE_BEGUN = "no update of the weights has begun: POST /start_weight_update begins one"
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # of vLLM's metric, by the level of the sleep
TO_END = "POST /finish_weight_update ends it, and serves its arrays only if all have come"


class Weights(Protocol):
    """The weights of one host, or of all hosts of a cluster.

    A change calls `check`, then `prepare`, then either `commit` or `abandon`. The last three run on the engine's thread
    with no step in flight, and the other methods on another thread while steps go on. A ValueError or OSError means
    that nothing has changed and the change is over. Any other error of the last three ends the engine.
    """

    @property
    def missing(self) -> Set[str]:
        """The names in `wire.PARTS` of the parts that are not on the devices. No step may run while there are any."""

    def receive(self, source: wire.InSharedMemory) -> None:
        """Reads arrays from a trainer. Later calls add arrays, or replace arrays of the same names."""

    def forget(self) -> None:
        """Forgets the arrays that have been received."""

    def check(self, change: wire.ChangeWeights) -> Mapping[str, str]:
        """Checks whether the change can be made. Returns facts that must be equal on all hosts."""

    def prepare(self) -> None:
        """Does the work of the change, as far as it can be undone."""

    def commit(self) -> None:
        """Completes a change that has been prepared. After an error the old weights are in place."""

    def abandon(self) -> None:
        """Undoes `prepare`."""


Answer = Callable[[Exception | None], None]


class WeightChanges:
    """Carries out commands about the weights, and sends an event when the weights have changed.

    Only one thread may call `ask` and `abandon_overdue`. The asker makes one change or step of an update at a time.
    """

    def __init__(self, engine: AnyEngine, weights: Weights) -> None:
        self._engine = engine
        self._weights = weights
        self._put: Callable[[wire.Event], None] = lambda event: None
        self._work = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._lock = threading.Lock()  # of the version, and of the order in which versions are told
        self._version = wire.DEFAULT_VERSION
        self._num_updates = 0
        self._sleep_level = 0  # 0: the weights are on the devices
        self._is_updating = False
        self._sources: list[wire.WeightsSource] = []  # of the update
        self._prepared: wire.ChangeWeights | None = None  # no step runs until it is committed or abandoned
        self._decide_by = math.inf  # by the monotonic clock; the prepared change is abandoned then

    @property
    def sleep_states(self) -> dict[str, int]:
        """`EngineStats.sleep_states`."""
        only_pages = bool(self._weights.missing) and not self._sleep_level
        return {state: int(i == self._sleep_level and not only_pages) for i, state in enumerate(SLEEP_STATES)}

    def listen(self, put: Callable[[wire.Event], None]) -> None:
        """Registers `put`, which sends an event. Called from any thread; events of one thread keep their order."""
        self._put = put

    def tell(self, put: Callable[[wire.Event], None]) -> None:
        """Sends the name of the current weights, before that of any later ones."""
        with self._lock:
            put(wire.WeightVersion(self._version))

    def ask(self, command: wire.EngineQuestion) -> None:
        """Starts the work of a command, which is answered with a Reply when it is done."""
        answer = partial(self._answer, command.number)
        try:
            match command:
                case wire.Pause(mode=mode, clear_cache=clear_cache):
                    self._engine.pause(mode, clear_cache, answer)
                case wire.Resume():
                    self._engine.resume(answer)
                case wire.UpdateWeights():
                    self._work.submit(self._in_thread, partial(self._take_step, command, answer), answer)
                case wire.ChangePhase(phase=wire.Phase.PREPARE, change=wire.ChangeWeights() as change):
                    prepare = partial(self._prepare, change, command.hold_s, answer)
                    self._work.submit(self._in_thread, prepare, answer)
                case wire.ChangePhase(phase=phase):
                    self._end(phase, answer)
        except (EngineClosedError, EngineDeadError) as error:
            answer(error)

    def abandon_overdue(self) -> None:
        """Abandons a prepared change if the next phase has not come in time. The engine process calls it regularly."""
        if time.monotonic() > self._decide_by:
            with contextlib.suppress(EngineClosedError, EngineDeadError):
                self._end(wire.Phase.ABANDON, lambda error: None)

    def _answer(self, number: int, error: Exception | None) -> None:
        is_over = isinstance(error, EngineClosedError | EngineDeadError)
        told = None if error is None else str(error) if is_over else described(error)
        status = 503 if is_over else 400 if error is None or is_worded(error) else 500
        missing = None if self._prepared is not None else sorted(self._weights.missing)
        self._put(wire.Reply(number=number, error=told, status=status, missing=missing))

    def _in_thread(self, work: Callable[[], None], answer: Answer) -> None:
        try:
            work()
        except Exception as error:
            if not (is_worded(error) or isinstance(error, EngineClosedError | EngineDeadError)):
                traceback.print_exc()
            answer(error)

    def _take_step(self, command: wire.UpdateWeights, answer: Answer) -> None:
        weights = self._weights
        match command:
            case wire.UpdateWeights(step=wire.UpdateStep.BEGIN):
                if self._is_updating:
                    raise ValueError(f"an update of the weights has begun already: {TO_END}")
                self._is_updating = True
            case wire.UpdateWeights(step=wire.UpdateStep.ABANDON):
                self._end_update()
            case _ if not self._is_updating:
                raise ValueError(NONE_BEGUN)
            case wire.UpdateWeights(source=wire.InSharedMemory() as source):
                weights.receive(source)
                self._sources.append(source)
            case wire.UpdateWeights(source=wire.InFolder() as source):
                self._sources.append(source)
            case _:
                raise ValueError("source: it is missing; it says where the new weights are")
        answer(None)

    def _end_update(self) -> None:
        self._weights.forget()
        self._sources, self._is_updating = [], False

    def _prepare(self, change: wire.ChangeWeights, hold_s: float, answer: Answer) -> None:
        weights, checked = self._weights, change
        if change.change is wire.WeightsChange.UPDATE:
            if not self._is_updating:
                raise ValueError(NONE_BEGUN)
            folders = [source for source in self._sources if isinstance(source, wire.InFolder)]
            if folders and len(folders) < len(self._sources):
                raise ValueError("the weights come from a folder or as arrays, not as both")
            if folders:
                checked = wire.ChangeWeights(wire.WeightsChange.RELOAD, folders[-1].path)
        elif self._is_updating and change.change is not wire.WeightsChange.WAKE_UP:
            raise ValueError(f"an update of the weights is under way: {TO_END}")
        weights.check(checked)

        def work() -> None:
            weights.prepare()
            self._prepared, self._decide_by = change, time.monotonic() + hold_s

        frees = change.change is wire.WeightsChange.SLEEP
        self._engine.change(Change(work=work, on_done=answer, serves_after=self._may_serve, frees_device=frees))

    def _end(self, phase: wire.Phase, answer: Answer) -> None:
        """Schedules the second phase of the change."""
        work = partial(self._commit_or_abandon, commits=phase is wire.Phase.COMMIT)
        self._engine.change(Change(work=work, on_done=answer, serves_after=self._may_serve))

    def _commit_or_abandon(self, *, commits: bool) -> None:
        change, self._prepared, self._decide_by = self._prepared, None, math.inf
        if change is None:
            raise ValueError("no change of the weights is prepared: the engine abandons one that it must wait for")
        if not commits:
            self._weights.abandon()
            return
        try:
            self._weights.commit()
        finally:
            if change.change is wire.WeightsChange.UPDATE:
                self._end_update()
        if change.change is wire.WeightsChange.SLEEP:
            self._sleep_level = max(self._sleep_level, change.level)
        elif wire.WEIGHTS not in self._weights.missing:
            self._sleep_level = 0
        if change.change is wire.WeightsChange.UPDATE:
            self._num_updates += 1
            self._set_version(change.version or str(self._num_updates))
        elif change.change is wire.WeightsChange.RELOAD:
            self._set_version(change.model or wire.DEFAULT_VERSION)

    def _may_serve(self) -> bool:
        return self._prepared is None and not self._weights.missing

    def _set_version(self, version: str) -> None:
        """Sets and sends the version. Runs on the engine's thread between two steps, so earlier tokens are sent
        already, and later ones are not."""
        with self._lock:
            self._version = version
            self._put(wire.WeightVersion(version))
