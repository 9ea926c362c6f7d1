"""API keys in the Authorization header, or in Anthropic's, X-Api-Key."""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from server.http.errors import RequestError


class KeyRing:
    """The accepted keys; none means that everybody may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._keys = [key.encode() for key in keys]

    def check(self, headers: Iterable[tuple[bytes, bytes]]) -> RequestError | None:
        """The 401 that a request deserves, None where it brings a key. Takes the same time for every wrong key."""
        if not self._keys:
            return None
        fields = dict(headers)
        given = fields.get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        if not given:
            scheme, given = b"bearer", fields.get(b"x-api-key", b"")
            key = given
        matches = [hmac.compare_digest(key.strip(), known) for known in self._keys]
        if scheme.lower() == b"bearer" and any(matches):
            return None
        message = "Missing API key: send `Authorization: Bearer KEY`." if not given else "Incorrect API key provided."
        return RequestError(401, message, type="AuthenticationError", code="invalid_api_key")
