"""Pauses of the engine: who asked for one, and when no request runs."""

from __future__ import annotations

from batcher.change import Pause, PauseMode, Resume
from batcher.delivery import Delivery
from batcher.request import FinishReason
from batcher.requests.live_requests import LiveRequests
from batcher.scheduling.scheduler import Scheduler


class Pauses:
    """Not thread-safe: the engine's thread calls everything here.

    A pause that is asked for during another one counts from then on. Both have been made when no request runs.
    """

    def __init__(self, requests: LiveRequests, scheduler: Scheduler) -> None:
        self.is_paused = False  # no step may begin
        self._requests = requests
        self._scheduler = scheduler
        self._asked: list[Pause] = []  # while requests may run

    def take(self, asked: Pause | Resume) -> list[Delivery]:
        """Begins a pause, or ends it."""
        if isinstance(asked, Resume):
            self.fail(ValueError("the engine was resumed before its requests had stopped"))
            self._scheduler.let_go()
            self.is_paused = False
            asked.on_done(None)
            return []
        self._asked.append(asked)
        self.is_paused = asked.mode is not PauseMode.WAIT
        if asked.mode is PauseMode.WAIT:
            self._scheduler.hold()
        return self._requests.end_all(FinishReason.ABORT, by_pause=True) if asked.mode is PauseMode.ABORT else []

    def take_made(self, *, is_idle: bool) -> list[Pause]:
        """The pauses that have been made since the last call, whose `on_done` is still to be called.

        Args:
            is_idle: no step is in flight.
        """
        if not self._asked or not is_idle or not (self.is_paused or self._scheduler.has_no_started):
            return []
        self.is_paused = True
        self._scheduler.let_go()
        made, self._asked = self._asked, []
        return made

    def fail(self, error: Exception) -> None:
        """Calls the `on_done` of all pauses that will not be made, with the error."""
        asked, self._asked = self._asked, []
        for pause in asked:
            pause.on_done(error)
