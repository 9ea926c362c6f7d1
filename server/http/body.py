"""Reading a request's body: its type, its size, its JSON."""

from __future__ import annotations

import re

import msgspec
from starlette.requests import ClientDisconnect, Request

from server.http.errors import INVALID_BODY, RequestError

_AT = re.compile(r" - at `(?P<key>key in )?\$(?P<path>.*)`$", re.DOTALL)


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


def decode_body[T: msgspec.Struct](decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Raises RequestError 400 with the dotted path of the first field that is wrong."""
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        where = _AT.search(message)
        param = _dotted(where["path"]) if where else None
        text = message[: where.start()] if where else message
        if text.startswith("Object missing required field `"):
            param = ".".join(filter(None, (param, text.split("`")[1])))
        raise RequestError(400, f"{param}: {text}" if param else text, type=INVALID_BODY, param=param) from error
    except RecursionError as error:
        raise RequestError(400, "The JSON body is nested too deeply.", type=INVALID_BODY) from error
    except ValueError as error:  # malformed JSON, or text that is not UTF-8
        raise RequestError(400, f"The body is not valid JSON: {error}", type=INVALID_BODY) from error


def _dotted(path: str) -> str | None:
    """`.messages[0].content` -> `messages.0.content`."""
    return path.replace("[", ".").replace("]", "").strip(".") or None
