"""A change of what the device holds, such as other weights, which the engine makes between two steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change that `Engine.change` makes.

    Args:
        work: runs on the engine's thread with no step in flight. The contents of pages, slots and adapter slots may be
            lost. A ValueError or OSError means that nothing has changed; the engine dies of any other error.
        on_done: gets the error of `work`, or None, on the engine's thread.
        serves_after: whether steps go on after `work` has succeeded. If not, requests wait for a later change.
    """

    work: Callable[[], None]
    on_done: Callable[[Exception | None], None]
    serves_after: bool = True
