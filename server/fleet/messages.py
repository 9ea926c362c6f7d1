"""Messages of private HTTP, packed."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response


async def unpacked[T](request: Request, kind: type[T]) -> T:
    """The message that another process of this server has sent."""
    return msgspec.msgpack.decode(await request.body(), type=kind)


def packed(message: object) -> Response:
    """The answer to it."""
    return Response(msgspec.msgpack.encode(message), media_type="application/msgpack")
