"""Reads a request's body: checks its content type and size, decodes its JSON or its form."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass

import msgspec
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect, Request

from server.http.limits import STREAMED
from server.http.request_error import RequestError

FORM = b"multipart/form-data"

_LENGTH = re.compile(r"^Expected `(?:array|object)` of length <= (\d+)$")
_AT = re.compile(r" - at (?:`key` in )?`(?:key in )?\$(?P<path>.*)`$", re.DOTALL)


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """Limits of a body. Decoding holds the interpreter's lock for about 1 ms per megabyte of text, and twenty times as
    long per megabyte of small entries. So `server.api.request.body` first counts the marks of a long body."""

    max_bytes: int
    max_marks: int  # brackets and colons outside strings


class UnknownFieldError(RequestError):
    """The JSON has a field that its type does not declare."""


async def read_body(request: Request, limits: BodyLimits) -> bytes:
    """Reads the bytes of a JSON body without decoding them.

    Raises RequestError with status 415 for another content type, 413 for too many bytes, or 400 for an incomplete body.
    """
    max_bytes = limits.max_bytes
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        message = f"The content type must be application/json, got {content_type[:100]!r}."
        raise RequestError(415, message)
    declared = request.headers.get("content-length", "0")
    if int(declared) > max_bytes:  # a number: the HTTP parser refuses other values
        raise _too_large(max_bytes)
    body = bytearray()  # small pieces would take several times their size in a list
    try:
        async for chunk in request.stream():
            if len(body) + len(chunk) > max_bytes:
                raise _too_large(max_bytes)
            body += chunk
    except ClientDisconnect as error:
        raise RequestError(400, "The body is incomplete.") from error
    return bytes(body)


async def read_form(request: Request, *, max_bytes: int, max_fields: int, max_field_bytes: int) -> FormData:
    """Reads a multipart form with at most one file. A file of more than 1 MiB is in the folder of temporary files until
    the form is closed. Bytes that have been read do not count towards the memory of bodies.

    Args:
        max_bytes: the most bytes of the whole form.
        max_fields: the most parts other than the file.
        max_field_bytes: the most bytes of such a part.

    Raises RequestError with status 415 for another content type, 413 for too many bytes, or 400 for a malformed form or
    one with too many or too long parts.
    """
    kind, _ = parse_options_header(request.headers.get("content-type"))
    if kind != FORM:
        shown = kind[:100].decode("latin-1")
        raise RequestError(415, f"The content type must be {FORM.decode()}, got {shown!r}.")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise _too_large(max_bytes)
    request.scope[STREAMED] = True

    async def chunks() -> AsyncGenerator[bytes]:
        num_bytes = 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > max_bytes:
                raise _too_large(max_bytes)
            yield chunk
            await asyncio.sleep(0)  # parsing a chunk holds the event loop

    limits = {"max_files": 1, "max_fields": max_fields, "max_part_size": max_field_bytes}
    try:
        return await MultiPartParser(request.headers, chunks(), **limits).parse()
    except ClientDisconnect as error:
        raise RequestError(400, "The form is incomplete.") from error
    except MultiPartException as error:
        raise RequestError(400, f"The form cannot be read: {error.message}") from error


def _too_large(max_bytes: int) -> RequestError:
    return RequestError(413, f"The body is larger than {max_bytes} bytes.")


def decode_body[T](decoder: msgspec.json.Decoder[T], body: bytes | msgspec.Raw) -> T:
    """Decodes JSON.

    Raises RequestError 400 with the dotted path of the first wrong field. Raises UnknownFieldError if the type forbids
    unknown fields and the JSON has one.
    """
    return _worded(lambda: decoder.decode(body))


def read_query[T](query: Mapping[str, str], kind: type[T]) -> T:
    """The parameters of a query as the struct `kind`. Raises RequestError 400 with the name of the first wrong one."""
    return _worded(lambda: msgspec.convert(dict(query), kind, strict=False))


def _worded[T](decode: Callable[[], T]) -> T:
    try:
        return decode()
    except msgspec.ValidationError as error:
        message = str(error)
        where = _AT.search(message)
        # `.messages[0].content` -> `messages.0.content`
        param = where["path"].replace("[", ".").replace("]", "").strip(".") or None if where else None
        text = _LENGTH.sub(r"at most \1 entries are allowed", message[: where.start()] if where else message)
        kind = UnknownFieldError if text.startswith("Object contains unknown field `") else RequestError
        if text.startswith("Object missing required field `"):
            param = ".".join(filter(None, (param, text.split("`")[1])))
        raise kind(400, f"{param}: {text}" if param else text, param=param) from error
    except RecursionError as error:
        raise RequestError(400, "The JSON body is nested too deeply.") from error
    except ValueError as error:  # malformed JSON, or text that is not UTF-8
        raise RequestError(400, f"The body is not valid JSON: {error}") from error
