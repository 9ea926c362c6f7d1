"""Changes the weights of a running engine, and keeps the name (version) of the weights that serve.

There are two ways. A *change* moves the weights to the host, brings them back, or loads others from a folder. An
*update* has several steps: new arrays arrive from a trainer while the old weights serve, they are checked, and they
replace the old ones between two steps of the engine. Only one change or update can be in progress.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from functools import partial
from typing import Protocol, runtime_checkable

from batcher.change import OnDone, PauseMode
from batcher.errors import EngineClosedError, EngineDeadError
from model.inputs.words import described, is_worded
from server.engine import wire

NONE_BEGUN = "no update of the weights has begun: POST /start_weight_update begins one"
UNCHECKED = "the update of the weights is not checked: POST /finish_weight_update checks it and then serves the weights"
TO_END = "POST /finish_weight_update ends it, and serves its arrays only if all have come"


class ReplyFunction(Protocol):
    """Answers a command with an error or with None. `missing` is the field of `wire.Reply`."""

    def __call__(self, error: Exception | None, *, missing: list[str] | None = None) -> None: ...


class Updates(Protocol):
    """Updates the weights of an engine, one update at a time. After a ValueError or OSError nothing has changed.

    `begin`, `receive`, `check` and `abandon` run on a thread other than the engine's, so they delay no step.
    """

    def begin(self) -> None: ...

    def receive(self, source: wire.WeightsSource) -> None:
        """Reads arrays from a trainer. Later calls add arrays, or replace arrays of the same names."""

    def check(self) -> None:
        """Checks the received arrays. Raises ValueError with everything that is wrong with them."""

    def commit(self) -> None:
        """Replaces the weights. Runs on the engine's thread with no step in flight, after a successful `check`.

        The update is forgotten afterwards, also after an error. An error other than ValueError and OSError ends the
        engine.
        """

    def abandon(self) -> None:
        """Forgets the arrays that have been received."""


@runtime_checkable
class ChangeableEngine(Protocol):
    """A `process.ServedEngine` that can pause and whose weights can be changed while it serves.

    `on_done` is called on the engine's thread, with an error if nothing has changed. The methods raise
    EngineClosedError or EngineDeadError.
    """

    updates: Updates

    @property
    def missing(self) -> Set[str]:
        """The names in `wire.PARTS` of the parts that are not on the devices. Only the engine's thread changes it."""

    def change_weights(self, command: wire.ChangeWeights, on_done: OnDone) -> None:
        """Schedules a change of the weights between two steps."""

    def commit_update(self, on_done: OnDone) -> None:
        """Schedules a call of `updates.commit` between two steps. Running requests are recomputed."""

    def pause(self, mode: PauseMode, clear_cache: bool, on_done: OnDone) -> None:
        """Holds all requests until `resume`. `mode` says what becomes of the running ones, and `clear_cache` empties
        the prefix cache. `on_done` is called when no request runs any more."""

    def resume(self, on_done: OnDone) -> None:
        """Lets requests run again. Without a pause it only calls `on_done`."""


class _Stage(Enum):
    """How far an update has come."""

    NONE = "there is none"
    OPEN = "it receives"
    CHECKED = "it may be committed"
    COMMITTING = "the engine's thread commits it soon"


class WeightChanges:
    """Carries out commands about the weights, and sends an event when the weights have changed.

    Only one thread may call `ask`.

    Args:
        put: sends an event. Called from any thread; events of one thread keep their order.
    """

    def __init__(self, engine: ChangeableEngine, put: Callable[[wire.Event], None]) -> None:
        self._engine = engine
        self._put = put
        self._work = ThreadPoolExecutor(1, thread_name_prefix="weights")
        self._lock = threading.Lock()  # of what follows, and of the order in which versions are told
        self._version = wire.DEFAULT_VERSION
        self._num_updates = 0
        self._stage = _Stage.NONE
        self._num_changing = 0  # changes that the engine has not made yet

    def tell(self, put: Callable[[wire.Event], None]) -> None:
        """Sends the name of the current weights, before that of any later ones."""
        with self._lock:
            put(wire.WeightVersion(self._version))

    def ask(self, command: wire.WeightsCommand) -> None:
        """Starts the work of a command, which is answered with a Reply when it is done."""

        answer = partial(self._answer, command)
        try:
            match command:
                case wire.Pause(mode=mode, clear_cache=clear_cache):
                    self._engine.pause(mode, clear_cache, answer)
                case wire.Resume():
                    self._engine.resume(answer)
                case wire.ChangeWeights():
                    self._change(command, answer)
                case wire.UpdateWeights():
                    self._work.submit(self._update, command, answer)
        except (ValueError, EngineClosedError, EngineDeadError) as error:
            answer(ValueError(str(error)))

    def _answer(self, command: wire.WeightsCommand, error: Exception | None, missing: list[str] | None = None) -> None:
        told = None if error is None else described(error)
        self._put(wire.Reply(number=command.number, error=told, missing=missing))

    def close(self) -> None:
        """Drops the steps of updates that have not begun."""
        self._work.shutdown(wait=False, cancel_futures=True)

    def _change(self, command: wire.ChangeWeights, answer: ReplyFunction) -> None:
        with self._lock:
            if self._stage is not _Stage.NONE and command.change is not wire.WeightsChange.WAKE_UP:
                raise ValueError(f"an update of the weights is under way: {TO_END}")
            self._num_changing += 1

        def on_done(error: Exception | None) -> None:
            with self._lock:
                self._num_changing -= 1
                if error is None and command.change is wire.WeightsChange.RELOAD:
                    self._set_version(command.model or wire.DEFAULT_VERSION)
            answer(error, missing=sorted(self._engine.missing))

        self._engine.change_weights(command, on_done)

    def _update(self, command: wire.UpdateWeights, answer: ReplyFunction) -> None:
        try:
            if command.step is wire.UpdateStep.COMMIT:
                self._commit(command.version, answer)
                return
            self._take_step(command)
        except (EngineClosedError, EngineDeadError) as error:
            answer(ValueError(str(error)))
        except Exception as error:
            if not is_worded(error):
                traceback.print_exc()
            answer(error)
        else:
            answer(None)

    def _take_step(self, command: wire.UpdateWeights) -> None:
        updates = self._engine.updates
        match command.step:
            case wire.UpdateStep.BEGIN:
                with self._lock:
                    if self._stage is not _Stage.NONE:
                        raise ValueError(f"an update of the weights has begun already: {TO_END}")
                    if self._num_changing:
                        raise ValueError("the weights are being changed: begin the update after that")
                    self._stage = _Stage.OPEN
                try:
                    updates.begin()
                except BaseException:
                    self._stage = _Stage.NONE
                    raise
            case wire.UpdateStep.ABANDON:
                if self._stage is not _Stage.COMMITTING:
                    updates.abandon()
                    self._stage = _Stage.NONE
            case _ if self._stage not in (_Stage.OPEN, _Stage.CHECKED):
                raise ValueError(NONE_BEGUN)
            case wire.UpdateStep.RECEIVE:
                if command.source is None:
                    raise ValueError("source: it is missing; it says where the new weights are")
                self._stage = _Stage.OPEN
                updates.receive(command.source)
            case wire.UpdateStep.CHECK:
                self._stage = _Stage.OPEN
                updates.check()
                self._stage = _Stage.CHECKED

    def _commit(self, version: str, answer: ReplyFunction) -> None:
        if self._stage is not _Stage.CHECKED:
            raise ValueError(UNCHECKED if self._stage is _Stage.OPEN else NONE_BEGUN)
        self._stage = _Stage.COMMITTING

        def on_done(error: Exception | None) -> None:
            with self._lock:
                if error is None:
                    self._num_updates += 1
                    self._set_version(version or str(self._num_updates))
                self._stage = _Stage.NONE
            answer(error, missing=sorted(self._engine.missing))

        self._engine.commit_update(on_done)

    def _set_version(self, version: str) -> None:
        """Sets and sends the version. Runs on the engine's thread between two steps, so earlier tokens are sent
        already, and later ones are not."""
        self._version = version
        self._put(wire.WeightVersion(version))
