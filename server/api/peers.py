"""The messages between the HTTP processes of a server (`--api-server-count`), and the routes' interface to the others.

Requests that concern all processes go to the parent's process, which asks the others. The messages are msgpack over
private HTTP.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from server.api.http_counts import HttpCounts
from server.engine.protocol import Engine
from server.engine.wire import AnyQuestion, Reply
from server.http.private import PrivateCallError, call
from server.http.request_error import unavailable
from server.shared_counts import Row

PARENT = "parent"  # the name of the parent's socket
TIMEOUT_S = 5.0


class NotStarted(msgspec.Struct):
    """An HTTP process cannot start. It ends."""

    api_server: int
    error: str
    is_worded: bool  # whether the reason is a setting, and not a fault of the program


class Counted(msgspec.Struct):
    """The counts of a process. With `asks`, the answer has the counts of all others."""

    api_server: int
    counts: HttpCounts
    asks: bool


class Aborting(msgspec.Struct):
    """The ids of the requests to abort; None: all. The answer has the ids of those that were aborted."""

    api_server: int
    request_ids: list[str] | None


class EngineState(msgspec.Struct):
    """The state of the engines."""

    is_sleeping: bool
    is_paused: bool
    weight_version: str


def state_of(engine: Engine) -> EngineState:
    """The state of this process's engines."""
    return EngineState(bool(engine.missing), engine.is_paused, engine.weight_version)


class EngineDied(msgspec.Struct):
    """The engine of this number has died."""

    engine: int
    reason: str


class Peers:
    """Asks the parent's process. Raises RequestError 503 if an answer is missing."""

    def __init__(self, folder: Path, api_server: int, row: Row) -> None:
        self.row = row
        self._folder = folder
        self._api_server = api_server

    async def counts_of_others(self, own: HttpCounts) -> HttpCounts:
        """The sums over the other processes, including those that have ended. They are at most a second old."""
        answer = await self._ask("/counts", Counted(self._api_server, own, asks=True))
        return msgspec.msgpack.decode(answer, type=HttpCounts)

    async def abort(self, request_ids: list[str] | None) -> list[str]:
        """Aborts requests of the other processes. Returns the ids of those that ran."""
        return msgspec.msgpack.decode(
            await self._ask("/abort", Aborting(self._api_server, request_ids)), type=list[str]
        )

    async def set_log_level(self, level: str) -> None:
        """Sets the log level of all processes, including this one."""
        await self._ask("/log_level", level)

    async def ask(self, question: AnyQuestion) -> Reply:
        """Asks the parent's engines. Returns when all processes have heard of a change of the adapters."""
        return msgspec.msgpack.decode(await self._ask("/ask", question, None), type=Reply)

    async def engine_state(self) -> EngineState:
        return msgspec.msgpack.decode(await self._ask("/engine_state", None), type=EngineState)

    async def _ask(self, target: str, message: object, timeout_s: float | None = TIMEOUT_S) -> bytes:
        try:
            return await call(self._folder / PARENT, target, msgspec.msgpack.encode(message), timeout_s=timeout_s)
        except PrivateCallError as error:
            raise unavailable(f"The processes of this server have not all answered: {error}") from error
