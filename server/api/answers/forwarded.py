"""An answer that another HTTP process of this server makes: the request is sent on to it, and its answer comes back."""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.api.answers.answer import until_disconnect
from server.api.peers import KEY_FIELD, KEY_NUMBER_FIELD
from server.api.state import current_place
from server.http.auth import current_key
from server.http.private import PrivateCallError, exchange
from server.http.request_error import unavailable

PASSED_ON = (b"content-type", b"accept", b"x-request-timeout", b"x-request-id")  # fields of the request
DROPPED = (b"connection", b"date", b"transfer-encoding", b"keep-alive")  # fields of the answer: of its own connection


class ForwardedAnswer(Response):
    """Sends the request and `body`, which has been read already, to the process that listens at `path`.

    Raises RequestError 503 if that process has ended. An answer that has begun is then cut off, as those of that
    process itself are.
    """

    def __init__(self, request: Request, path: Path, body: bytes = b"") -> None:
        self._method = request.method
        query = request.url.query
        self._target = request.scope["raw_path"].decode("latin-1") + (f"?{query}" if query else "")
        self._fields = [(name, value) for name, value in request.headers.raw if name in PASSED_ON]
        self._fields.append((KEY_FIELD, current_key.get().hex().encode()))
        if (number := current_place.get().key_number) is not None:
            self._fields.append((KEY_NUMBER_FIELD, b"%d" % number))
        self._path = path
        self._body = body
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(self._pass_on(send), receive)

    async def _pass_on(self, send: Send) -> None:
        has_begun = False
        try:
            async with exchange(
                self._path, self._method, self._target, headers=self._fields, body=self._body
            ) as answer:
                headers = [field for field in answer.headers if field[0] not in DROPPED]
                has_begun = True
                await send({"type": "http.response.start", "status": answer.status, "headers": headers})
                async for piece in answer.body():
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except PrivateCallError as error:
            if has_begun:
                raise
            raise unavailable(f"The HTTP process that keeps what is asked for does not answer: {error}") from error
