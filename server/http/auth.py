"""API keys in the Authorization header, or in Anthropic's X-Api-Key header."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from server.http.errors import RequestError


class KeyRing:
    """The accepted keys. If there are none, all requests are accepted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestError | None:
        """The 401 error for a request without an accepted key, otherwise None. All wrong keys take the same time."""
        if not self._keys or self.number(headers) is not None:
            return None
        _, key = _given(headers)
        message = "Incorrect API key provided." if key else "Missing API key: send `Authorization: Bearer KEY`."
        return RequestError(401, message, type="AuthenticationError", code="invalid_api_key")

    def number(self, headers: Iterable[tuple[bytes, bytes]]) -> int | None:
        """The index of the request's key among the accepted keys, from 0. None if it has none of them."""
        scheme, key = _given(headers)
        matches = [hmac.compare_digest(key, known) for known in self._keys]
        return matches.index(True) if scheme == b"bearer" and any(matches) else None


def _given(headers: Iterable[tuple[bytes, bytes]]) -> tuple[bytes, bytes]:
    """Returns (scheme, key)."""
    fields = dict(headers)
    authorization = fields.get(b"authorization", b"")
    if not authorization:
        return b"bearer", fields.get(b"x-api-key", b"").strip()
    scheme, _, key = authorization.partition(b" ")
    return scheme.lower(), key.strip()
