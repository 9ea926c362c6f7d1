"""What an HTTP process gets when it is started, where it is reached, and how it is asked."""

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
    """One HTTP process among several."""

    settings: Settings
    listener: socket.socket
    number: int  # its row of the shared counts
    frontend: int  # no other process has had this number
    replaces: bool  # whether it takes the place of a process that has ended
    engines: Sequence[str]  # the addresses at which they take commands
    folder: Path  # of the private sockets
    shared_counts: SharedCounts
    log_level: int
    is_logging: bool  # whether the parent's log is configured


def socket_name(frontend: int) -> str:
    """The name of a process's private socket."""
    return f"h{frontend}"


def events_name(engine: int, frontend: int) -> str:
    """The name of the socket for what an engine tells a process."""
    return f"e{engine}-{frontend}"


def private_route(name: str, kind: Any, answer: Callable[[Any], Awaitable[object]]) -> Route:
    """A route of private HTTP: a message of this type, which another process of this server sends, is answered."""

    async def endpoint(request: Request) -> Response:
        message = msgspec.msgpack.decode(await request.body(), type=kind)
        return Response(msgspec.msgpack.encode(await answer(message)), media_type="application/msgpack")

    return Route(f"/{name}", endpoint, methods=["POST"])
