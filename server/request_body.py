"""Reading a request's body: its type, its size, its JSON."""

from __future__ import annotations

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.errors import INVALID_BODY, RequestError
from server.schemas import decode_body


async def read_body[T: msgspec.Struct](request: Request, decoder: msgspec.json.Decoder[T], max_bytes: int) -> T:
    """Raises RequestError: 415 for another content type, 413 past `max_bytes`, 400 for anything but the schema."""
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = f"The content type must be application/json, got {content_type[:100]!r}."
        raise RequestError(415, message, type=INVALID_BODY)
    declared = request.headers.get("content-length", "0")
    if int(declared) > max_bytes:  # a number: the HTTP parser has refused all else
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async for chunk in request.stream():
            size += len(chunk)
            if size > max_bytes:
                raise _too_large(max_bytes)
            chunks.append(chunk)
    except ClientDisconnect as error:
        raise RequestError(400, "The body is incomplete.", type=INVALID_BODY) from error
    return decode_body(decoder, b"".join(chunks))


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"The body is larger than {max_bytes} bytes.", type=INVALID_BODY)
