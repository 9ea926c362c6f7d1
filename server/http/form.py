"""Reads multipart forms (RFC 7578) while they come. A form may hold a file that is longer than any other body: what has
been read of it is not counted as memory any more (`STREAMED`)."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

from server.http.limits import STREAMED
from server.http.request_error import INVALID_BODY, RequestError

FORM = b"multipart/form-data"
MAX_BOUNDARY = 70


class Part(NamedTuple):
    """A part of a form."""

    name: str
    filename: str | None  # None: it is no file


class FormReader:
    """The parts of a request's form, in their order.

    Args:
        most_bytes: of the whole form.

    Raises:
        RequestError: 415 for another content type, 413 for too many bytes, 400 for what is no form.
    """

    def __init__(self, request: Request, most_bytes: int) -> None:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != FORM:
            shown = kind[:100].decode("latin-1")
            raise RequestError(415, f"The content type must be {FORM.decode()}, got {shown!r}.", type=INVALID_BODY)
        boundary = options.get(b"boundary", b"")
        if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
            raise _malformed(f"its boundary must have 1 to {MAX_BOUNDARY} characters")
        if int(request.headers.get("content-length", "0")) > most_bytes:
            raise _too_large(most_bytes)
        request.scope[STREAMED] = True
        self._chunks = request.stream()
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._is_whole = False
        self._read: deque[Part | bytes] = deque()  # parts, each followed by its content
        self._field, self._value = bytearray(), bytearray()
        self._head: dict[bytes, bytes] = {}
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._head.clear,
            "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
            "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
            "on_header_end": self._end_header,
            "on_headers_finished": lambda: self._read.append(_part(self._head)),
            "on_part_data": lambda data, start, end: self._read.append(data[start:end]),
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    async def parts(self) -> AsyncIterator[Part]:
        """Each part: `pieces` has its content. What is not read of it is passed over."""
        while (read := await self._next()) is not None:
            self._read.popleft()
            if isinstance(read, Part):
                yield read
        if not self._is_whole:
            raise _malformed("it ends before its last boundary")

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content of the current part."""
        while isinstance(piece := await self._next(), bytes):
            self._read.popleft()
            yield piece

    async def _next(self) -> Part | bytes | None:
        """What is read next; None at the form's end."""
        while not self._read:
            try:
                chunk = await anext(self._chunks, None)
            except ClientDisconnect as error:
                raise _malformed("it is incomplete") from error
            if chunk is None:
                return None
            self._num_bytes += len(chunk)
            if self._num_bytes > self._most_bytes:
                raise _too_large(self._most_bytes)
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                raise _malformed(str(error)) from error
        return self._read[0]

    def _end_header(self) -> None:
        self._head[bytes(self._field).lower()] = bytes(self._value)
        self._field.clear()
        self._value.clear()

    def _end(self) -> None:
        self._is_whole = True


def _part(head: Mapping[bytes, bytes]) -> Part:
    _, options = parse_options_header(head.get(b"content-disposition"))
    if b"name" not in options:
        raise _malformed("a part has no name")
    name, filename = (options.get(key) for key in (b"name", b"filename"))
    return Part(_text(name or b""), None if filename is None else _text(filename))


def _text(value: bytes) -> str:
    return value.decode("utf-8", "replace")


def _malformed(why: str) -> RequestError:
    return RequestError(400, f"The form cannot be read: {why}.", type=INVALID_BODY)


def _too_large(most_bytes: int) -> RequestError:
    return RequestError(413, f"The form is larger than {most_bytes} bytes.", type=INVALID_BODY)
