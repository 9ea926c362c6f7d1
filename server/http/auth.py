"""API keys in the Authorization header, or in Anthropic's X-Api-Key header."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from contextvars import ContextVar

from server.http.request_error import RequestError

# The digest of the key of the request that the current task answers; empty if the server has no keys.
current_key: ContextVar[bytes] = ContextVar("current_key", default=b"")


class KeyRing:
    """The digests of the accepted keys. If there are none, all requests are accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.digests = [_digest(key.encode()) for key in keys]

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestError | None:
        """The 401 error of a request without an accepted key; None: the request is accepted. The time does not depend
        on the key."""
        if not self.digests or self.number(headers) is not None:
            return None
        _, key = _given(headers)
        message = "Incorrect API key provided." if key else "Missing API key: send `Authorization: Bearer KEY`."
        return RequestError(401, message, type="AuthenticationError", code="invalid_api_key")

    def number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """The index of the request's key among the accepted keys, from 0. None: it has no accepted key."""
        scheme, key = _given(headers)
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return matches.index(True) if scheme == b"bearer" and any(matches) else None


def current_client() -> int:
    """A number from the API key of the request that the current task answers; 0 if the server has no keys."""
    return _client(current_key.get())


def clients_of(keys: Iterable[str]) -> list[int]:
    """The number of each of these API keys, see `current_client`."""
    return [_client(_digest(key.encode())) for key in keys]


def _client(digest: bytes) -> int:
    return int.from_bytes(digest[:8]) >> 1


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _given(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """(scheme, key) from the headers. The key is empty if there is none."""
    fields = dict(headers)
    authorization = fields.get(b"authorization", b"")
    if not authorization:
        return b"bearer", fields.get(b"x-api-key", b"").strip()
    scheme, _, key = authorization.partition(b" ")
    return scheme.lower(), key.strip()
