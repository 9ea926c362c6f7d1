"""The client of an engine that another process has started: it opens a door there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from batcher.request import FinishReason
from server.engine import wire
from server.engine.link import EngineLink
from server.engine.sinks import Sink


class DoorClient(EngineLink):
    """Call `start` before use, and `stop` in any case. The engine's death is heard of from the engine, or told by
    `die`.

    Args:
        commands: the address at which the engine takes commands.
        events: the path of the socket that this process binds.
        door: a number that no other process has had.
        on_load: called with the number of open requests whenever it may have changed.
    """

    def __init__(self, commands: str, events: Path, door: int, on_load: Callable[[int], None]) -> None:
        self._address = f"ipc://{events}"
        self._on_load = on_load
        super().__init__(commands, self._address, bind_commands=False, door=door)

    async def start(self) -> wire.EngineInfo:
        """Waits until the engine is ready. Raises EngineFailedError with the reason if it dies before."""
        ready = self._begin()
        self._send(wire.OpenDoor(self._door, self._address))
        self._on_readable()
        self.info = await ready
        return self.info

    async def stop(self, timeout_s: float = 0.0) -> None:
        """Closes the sockets. The engine goes on."""
        self._close()

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Sink]]) -> None:
        super().submit(requests)
        self._on_load(self.num_open)

    def abort(self, request_ids: Sequence[str], reason: FinishReason = FinishReason.ABORT) -> None:
        super().abort(request_ids, reason)
        self._on_load(self.num_open)

    def _on_event(self, event: wire.Event) -> None:
        super()._on_event(event)
        self._on_load(self.num_open)
