"""What the parent answers to the HTTP processes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from server.api.http_counts import HttpCounts
from server.api.peers import Aborting, ChangeAnswer, Changing, Counted, Keeping, Level, NotStarted, Started
from server.engine.client import WeightsError
from server.engine.group import Engines
from server.fleet.membership import socket_name
from server.fleet.messages import packed, unpacked
from server.http.private import PrivateCallError

logger = logging.getLogger("pallas_serve")


class Members(Protocol):
    """The HTTP processes, as the parent knows them."""

    folder: Path  # of their sockets

    async def begin(self, door: int) -> None:
        """A process is ready. Returns when it may accept connections."""

    def give_up(self, failure: NotStarted) -> None:
        """A process cannot start."""

    def count(self, door: int, counts: HttpCounts) -> None:
        """A process has counted so much up to now."""

    def counts_of_others(self, door: int) -> HttpCounts:
        """The sums over all other processes, those that have ended included."""

    async def ask(self, target: str, message: object, *, but: int | None = None) -> dict[int, bytes]:
        """The answers of all processes but one, by their doors. Raises PrivateCallError."""


def parent_app(members: Members, client: Engines) -> Starlette:
    """The private application."""
    parent = _Parent(members, client)
    names = ("started", "not_started", "counts", "abort", "keeper", "log_level", "weights")

    async def on_failure(request: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), 500)

    return Starlette(
        routes=[Route(f"/{name}", getattr(parent, name), methods=["POST"]) for name in names],
        exception_handlers={PrivateCallError: on_failure},
    )


class _Parent:
    def __init__(self, members: Members, client: Engines) -> None:
        self._members = members
        self._client = client

    async def started(self, request: Request) -> Response:
        await self._members.begin((await unpacked(request, Started)).door)
        return packed(None)

    async def not_started(self, request: Request) -> Response:
        self._members.give_up(await unpacked(request, NotStarted))
        return packed(None)

    async def counts(self, request: Request) -> Response:
        message = await unpacked(request, Counted)
        self._members.count(message.door, message.counts)
        return packed(self._members.counts_of_others(message.door) if message.asks else None)

    async def abort(self, request: Request) -> Response:
        message = await unpacked(request, Aborting)
        answers = await self._members.ask("/abort", message, but=message.door)
        return packed([id for answer in answers.values() for id in msgspec.msgpack.decode(answer, type=list[str])])

    async def keeper(self, request: Request) -> Response:
        message = await unpacked(request, Keeping)
        answers = await self._members.ask("/keeps", message, but=message.door)
        keepers = [door for door, answer in answers.items() if msgspec.msgpack.decode(answer, type=bool)]
        return packed(socket_name(keepers[0]) if keepers else None)

    async def log_level(self, request: Request) -> Response:
        message = await unpacked(request, Level)
        logger.setLevel(message.level)
        await self._members.ask("/log_level", message)
        return packed(None)

    async def weights(self, request: Request) -> Response:
        message = await unpacked(request, Changing)
        client, error = self._client, None
        if message.change is not None:
            try:
                await client.change_weights(message.change, message.model)
            except WeightsError as reason:
                error = str(reason)
        return packed(ChangeAnswer(client.is_sleeping, error))
