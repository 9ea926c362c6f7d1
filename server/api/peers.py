"""The messages between the HTTP processes of a server (`--api-server-count`), and the routes' interface to the others.

Requests that concern all processes go to the parent's process, which asks the others.
"""

from __future__ import annotations

import msgspec

from server.api.http_counts import HttpCounts
from server.bus import TIMEOUT_S, Bus, NoReplyError
from server.engine.protocol import Engine
from server.engine.wire import AnyQuestion
from server.http.request_error import unavailable
from server.shared_counts import Row


class Started(msgspec.Struct, tag=True):
    """An HTTP process is ready. The reply comes when it may accept connections."""


class NotStarted(msgspec.Struct, tag=True):
    """An HTTP process cannot start. It ends."""

    error: str
    is_worded: bool  # whether the reason is a setting, and not a fault of the program


class Counted(msgspec.Struct, tag=True):
    """The counts of a process. With `asks`, the reply has the sums over all others, including those that have ended.
    They are at most a second old."""

    counts: HttpCounts
    asks: bool


class AbortRequests(msgspec.Struct, tag=True):
    """The ids of the requests to abort; None: all. The reply has the ids of those that were aborted."""

    request_ids: list[str] | None


class SetLogLevel(msgspec.Struct, tag=True):
    """The log level of all processes."""

    level: str


class GetEngineState(msgspec.Struct, tag=True):
    """Asks for an EngineState."""


class EngineState(msgspec.Struct):
    """The state of the engines."""

    is_sleeping: bool
    is_paused: bool
    weight_version: str


class EngineDied(msgspec.Struct, tag=True):
    """The engine of this number has died."""

    engine: int
    reason: str


class AdapterChanges(msgspec.Struct, tag=True):
    """The reply comes when the process has received so many changes of the adapters from each engine."""

    numbers: list[int]


class End(msgspec.Struct, tag=True):
    """The first one lets running requests finish, the second ends them."""


ToParent = Started | NotStarted | Counted | AbortRequests | SetLogLevel | GetEngineState | AnyQuestion
ToHttpProcess = EngineDied | AdapterChanges | AbortRequests | SetLogLevel | End


def state_of(engine: Engine) -> EngineState:
    """The state of this process's engines."""
    return EngineState(bool(engine.missing), engine.is_paused, engine.weight_version)


class Peers:
    """Asks the parent's process. Raises RequestError 503 if a reply is missing."""

    def __init__(self, bus: Bus, row: Row) -> None:
        self.row = row
        self._bus = bus

    async def ask[R](self, question: object, kind: type[R], *, timeout_s: float | None = TIMEOUT_S) -> R:
        """Asks the parent, which may ask the other processes. Returns its reply, of type `kind`."""
        try:
            return await self._bus.ask(question, kind, timeout_s=timeout_s)
        except NoReplyError as error:
            raise unavailable(f"The processes of this server have not all answered: {error}") from error
