"""Forwards a request to another HTTP process of this server, and returns the answer of that process."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import Sent, while_connected
from server.api.peers import FORWARDED, KEY_FIELD, KEY_NUMBER_FIELD
from server.api.state import ServerState, current_place
from server.http.auth import current_key
from server.http.private import PrivateCallError, exchange
from server.http.request_error import unavailable

PASSED_ON = (b"content-type", b"accept", b"x-request-timeout", b"x-request-id")  # fields of the request
DROPPED = (b"connection", b"date", b"transfer-encoding", b"keep-alive")  # fields of the answer about its connection


async def forwarded(state: ServerState, request: Request, id: str | None, body: bytes = b"") -> Response | None:
    """The answer of the process that keeps the object with this id. None: this process keeps it, or no process does.

    Args:
        body: the body of the request, which has been read already.

    Raises:
        RequestError: 503 if that process has ended. An answer that has begun is then cut off.
    """
    if id is None or state.peers is None or FORWARDED in request.scope or state.keeps(id):
        return None
    keeper = await state.peers.keeper_of(id)
    if keeper is None:
        return None
    fields = [(name, value) for name, value in request.headers.raw if name in PASSED_ON]
    fields.append((KEY_FIELD, current_key.get().hex().encode()))
    if (number := current_place.get().key_number) is not None:
        fields.append((KEY_NUMBER_FIELD, b"%d" % number))

    async def send_all(scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive):
            await _pass_on(request, keeper, fields, body, send)

    return Sent(send_all)


async def _pass_on(request: Request, keeper: Path, fields: list[tuple[bytes, bytes]], body: bytes, send: Send) -> None:
    query = request.url.query
    target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
    has_begun = False
    try:
        async with exchange(keeper, request.method, target, headers=fields, body=body) as answer:
            headers = [(name.lower(), value) for name, value in answer.raw_headers if name.lower() not in DROPPED]
            has_begun = True
            await send({"type": "http.response.start", "status": answer.status, "headers": headers})
            async for piece in answer.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
    except PrivateCallError as error:
        if has_begun:
            raise
        raise unavailable(f"The HTTP process that keeps what is asked for does not answer: {error}") from error
