"""The HTTP/1.1 messages that the connection itself writes or rewrites, as bytes."""

from __future__ import annotations

from collections.abc import Iterable

from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from server.http.errors import RequestError

Fields = Iterable[tuple[bytes, bytes]]

UPGRADE_FIELDS = (b"upgrade", b"http2-settings")


def refusal(error: RequestError, default_fields: Fields) -> bytes:
    """The answer with the error object. Its head announces that the connection closes."""
    body = error.encode()
    fields = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        **error.headers(),
    }
    own = [(name.encode(), value.encode()) for name, value in fields.items()]
    return STATUS_LINE[error.status] + _fields([*default_fields, *own]) + body


def head_without_upgrade(method: bytes, target: bytes, version: str, fields: Fields) -> bytes:
    """A request's head without its upgrade to another protocol. The names in `fields` are in lower case."""
    kept = []
    for name, value in fields:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            value = b", ".join(token for token in tokens if token.lower() not in UPGRADE_FIELDS)
        if name not in UPGRADE_FIELDS:
            kept.append((name, value))
    return b"%b %b HTTP/%b\r\n" % (method, target, version.encode()) + _fields(kept)


def _fields(fields: Fields) -> bytes:
    return b"".join([b"%b: %b\r\n" % field for field in fields]) + b"\r\n"
