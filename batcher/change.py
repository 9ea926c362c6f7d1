"""Work that the engine does between two steps on request: a change of what the device holds, or a pause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

OnDone = Callable[[Exception | None], None]


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that `Engine.change` makes.

    Args:
        work: runs on the engine's thread with no step in flight. The contents of pages, slots and adapter slots may be
            lost. A ValueError or OSError means that nothing has changed; the engine dies of any other error.
        on_done: gets the error of `work`, or None, on the engine's thread.
        serves_after: tells whether steps go on after `work`. If not, requests wait for a later change. So a change may
            have two halves, such as one that prepares and one that commits, and no step runs between them.
        frees_device: the device's memory is for others after it.
    """

    work: Callable[[], None]
    on_done: OnDone
    serves_after: Callable[[], bool] = lambda: True
    frees_device: bool = False


class PauseMode(Enum):
    """What happens to running requests when an engine pauses."""

    ABORT = "abort"  # they end with the tokens that they have, and so do waiting requests
    WAIT = "wait"  # the pause begins when they have ended; later requests wait
    KEEP = "keep"  # they stop at once, and go on later


@dataclass(frozen=True, kw_only=True)
class Pause:
    """Pauses the engine: no request runs until a `Resume`.

    Args:
        clear_cache: no later prompt finds the pages of the earlier ones.
        on_done: is called on the engine's thread when no request runs any more, or with a ValueError if a `Resume`
            came before.
    """

    mode: PauseMode
    clear_cache: bool
    on_done: OnDone


@dataclass(frozen=True, kw_only=True)
class Resume:
    """Ends a pause. `on_done` is called on the engine's thread, also if there was no pause."""

    on_done: OnDone


@dataclass(frozen=True)
class ForgetPrefixes:
    """Asks the engine to empty the prefix cache."""

    reset_external: bool  # also of the pages in the host's memory and in files
