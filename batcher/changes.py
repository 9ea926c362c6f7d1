"""Changes of what the device holds, and pauses. Both are made while no step is in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from batcher.change import Change, Pause, PauseMode, Resume
from batcher.core import EngineCore
from batcher.delivery import Delivery
from batcher.request import FinishReason


class Changes:
    """Makes the changes and pauses that have been asked for. Not thread-safe: the engine's thread calls everything.

    A pause that is asked for during another one counts from then on. Both have been made when no request runs.

    Args:
        clear_store: drops the pages that have left the device.
    """

    def __init__(self, core: EngineCore, clear_store: Callable[[], None]) -> None:
        self._core = core
        self._clear_store = clear_store
        self._changes: deque[Change] = deque()
        self._is_held = False  # by the last change
        self._pauses: list[Pause] = []  # asked for, while requests may run
        self._is_paused = False

    @property
    def allow_steps(self) -> bool:
        """Whether a step may begin."""
        return not (self._changes or self._is_held or self._is_paused)

    def take(self, asked: Change | Pause | Resume) -> Sequence[Delivery]:
        """Begins a change or a pause, or ends the pause. Returns the last outputs of requests that it ends."""
        scheduler = self._core.scheduler
        match asked:
            case Change():
                self._changes.append(asked)
            case Resume():
                self._refuse_pauses(ValueError("the engine was resumed before its requests had stopped"))
                scheduler.let_go()
                self._is_paused = False
                asked.on_done(None)
            case Pause(mode=mode):
                self._pauses.append(asked)
                self._is_paused = mode is not PauseMode.WAIT
                if mode is PauseMode.WAIT:
                    scheduler.hold()
                elif mode is PauseMode.ABORT:
                    return self._core.requests.end_all(FinishReason.ABORT, by_pause=True)
        return ()

    def make(self) -> None:
        """Makes the waiting changes and pauses, if no step is in flight. Raises the error of a change that has left the
        device in an unknown state."""
        if self._core.in_flight:
            return
        while self._changes:
            self._make_change(self._changes.popleft())
        if self._pauses and (self._is_paused or self._core.scheduler.has_no_started):
            self._make_pauses()

    def _make_change(self, change: Change) -> None:
        failure: Exception | None = None
        try:
            self._core.change(change.work)
        except (ValueError, OSError) as error:
            failure = error
        except Exception as error:
            change.on_done(error)
            raise
        else:
            self._clear_store()
        self._is_held = not change.serves_after()
        change.on_done(failure)

    def _make_pauses(self) -> None:
        self._is_paused = True
        self._core.scheduler.let_go()
        made, self._pauses = self._pauses, []
        if any(pause.clear_cache for pause in made):
            self.forget_prefixes(reset_external=True)
        for pause in made:
            pause.on_done(None)

    def forget_prefixes(self, *, reset_external: bool) -> None:
        """Empties the prefix cache, and with `reset_external` also the host's memory and files."""
        self._core.scheduler.pool.clear_cache()
        if reset_external:
            self._clear_store()

    def refuse(self, error: Exception) -> None:
        """Calls the `on_done` of all changes and pauses that will not be made, with the error."""
        for change in self._changes:
            change.on_done(error)
        self._changes.clear()
        self._refuse_pauses(error)

    def _refuse_pauses(self, error: Exception) -> None:
        asked, self._pauses = self._pauses, []
        for pause in asked:
            pause.on_done(error)
