"""The arguments of an HTTP process, the names of its sockets, and the routes of private HTTP."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.settings import Settings
from server.shared_counts import SharedCounts


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessArgs:
    """The arguments of one HTTP process among several."""

    settings: Settings
    listener: socket.socket
    number: int  # its row of the shared counts
    api_server: int  # no other process has had this number
    replaces: bool  # whether it takes the place of a process that has ended
    engines: Sequence[str]  # the addresses at which the engines take commands
    folder: Path  # has the private sockets
    shared_counts: SharedCounts
    log_level: int
    is_logging: bool  # whether the parent's log is configured


def socket_name(api_server: int) -> str:
    """The name of a process's private socket."""
    return f"h{api_server}"


def events_name(engine: int, api_server: int) -> str:
    """The name of the socket for an engine's events to a process."""
    return f"e{engine}-{api_server}"


def private_route(name: str, kind: Any, answer: Callable[[Any], Awaitable[object]]) -> Route:
    """A route of private HTTP. It answers messages of the type `kind` from another process of this server."""

    async def endpoint(request: Request) -> Response:
        message = msgspec.msgpack.decode(await request.body(), type=kind)
        return Response(msgspec.msgpack.encode(await answer(message)), media_type="application/msgpack")

    return Route(f"/{name}", endpoint, methods=["POST"])
