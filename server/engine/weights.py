"""The weights of an engine that serves, which change in parts: what can be undone comes first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from server.engine.wire import ChangeWeights


class Weights(Protocol):
    """The weights of one host, or of all hosts of a cluster. No step is in flight during any of the calls.

    After `check` comes `prepare`, then either `commit` or `abandon`. A ValueError or OSError means that nothing has
    changed, and that the change is over. Of any other error the engine dies.
    """

    def check(self, command: ChangeWeights) -> Mapping[str, str]:
        """Finds out whether the change can be made. Returns facts that must be equal on all hosts."""

    def prepare(self) -> None:
        """Does all that may fail. It can be undone, and serves no step."""

    def commit(self) -> None:
        """Ends a change that is prepared."""

    def abandon(self) -> None:
        """Undoes what is prepared."""
