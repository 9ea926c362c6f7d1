"""Reads multipart forms (RFC 7578) while they come. A form may hold a file that is longer than any other body: what has
been read of it is not counted as memory any more (`STREAMED`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request

from server.http.exchange import STREAMED
from server.http.request_error import INVALID_BODY, RequestError

FORM = "multipart/form-data"
MAX_HEAD_BYTES = 16 * 1024  # of a part's header fields, or of what comes before the first part
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
        declared = Message()
        declared["content-type"] = request.headers.get("content-type", "")
        kind, boundary = declared.get_content_type(), declared.get_boundary("")
        if kind != FORM:
            raise RequestError(415, f"The content type must be {FORM}, got {kind[:100]!r}.", type=INVALID_BODY)
        if not 0 < len(boundary) <= MAX_BOUNDARY or not boundary.isascii():
            raise _malformed(f"its boundary must have 1 to {MAX_BOUNDARY} characters")
        if int(request.headers.get("content-length", "0")) > most_bytes:
            raise _too_large(most_bytes)
        request.scope[STREAMED] = True
        self._mark = b"\r\n--" + boundary.encode()
        self._chunks = request.stream()
        self._held = bytearray(b"\r\n")  # the first boundary may begin the body
        self._most_bytes = most_bytes
        self._num_bytes = 0
        self._is_in_part = False

    async def parts(self) -> AsyncIterator[Part]:
        """Each part: `pieces` has its content. What is not read of it is passed over."""
        await self._until(self._mark)
        while (after := await self._take(2)) != b"--":
            if after != b"\r\n":
                raise _malformed("a boundary is not at the end of its line")
            part = _part(await self._until(b"\r\n\r\n"))
            self._is_in_part = True
            yield part
            async for _ in self.pieces():
                pass
        while await self._fill():
            self._held.clear()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The content of the current part."""
        while self._is_in_part:
            end = self._held.find(self._mark)
            self._is_in_part = end < 0
            ready = len(self._held) - len(self._mark) if end < 0 else end
            if ready > 0:
                yield bytes(self._held[:ready])
            del self._held[: max(0, ready) if end < 0 else end + len(self._mark)]
            if end < 0:
                await self._fill_or_raise()

    async def _until(self, mark: bytes) -> bytes:
        """What comes before `mark`, which is passed."""
        while (end := self._held.find(mark)) < 0 and len(self._held) <= MAX_HEAD_BYTES:
            await self._fill_or_raise()
        if not 0 <= end <= MAX_HEAD_BYTES:
            raise _malformed(f"the head of a part has more than {MAX_HEAD_BYTES} bytes")
        before = bytes(self._held[:end])
        del self._held[: end + len(mark)]
        return before

    async def _take(self, count: int) -> bytes:
        while len(self._held) < count:
            await self._fill_or_raise()
        taken = bytes(self._held[:count])
        del self._held[:count]
        return taken

    async def _fill_or_raise(self) -> None:
        if not await self._fill():
            raise _malformed("it ends before its last boundary")

    async def _fill(self) -> bool:
        """Reads on. Returns whether there was anything."""
        try:
            chunk = await anext(self._chunks, b"")
        except ClientDisconnect as error:
            raise _malformed("it is incomplete") from error
        self._num_bytes += len(chunk)
        if self._num_bytes > self._most_bytes:
            raise _too_large(self._most_bytes)
        self._held += chunk
        return bool(chunk)


def _part(head: bytes) -> Part:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-disposition":
            field = Message()
            field["content-disposition"] = value.decode("utf-8", "replace").strip()
            own = field.get_param("name", header="content-disposition")
            if isinstance(own, str):
                return Part(own, field.get_filename())
    raise _malformed("a part has no name")


def _malformed(why: str) -> RequestError:
    return RequestError(400, f"The form cannot be read: {why}.", type=INVALID_BODY)


def _too_large(most_bytes: int) -> RequestError:
    return RequestError(413, f"The form is larger than {most_bytes} bytes.", type=INVALID_BODY)
