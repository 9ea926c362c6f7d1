"""Time limits for a client that sends a body or reads an answer. The caller passes the time, in seconds."""

from __future__ import annotations

MIN_BODY_RATE = 1024  # bytes a second


class BodyPace:
    """Within `timeout_s`, as many bytes must come as at MIN_BODY_RATE. Then the time begins again: bytes that came
    faster before earn no time."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._since = now
        self._missing = timeout_s * MIN_BODY_RATE

    def on_bytes(self, num_bytes: int, now: float) -> None:
        """Counts bytes that came at `now`."""
        self._missing -= num_bytes
        if self._missing <= 0:
            self.restart(now)

    def restart(self, now: float) -> None:
        """The time begins again at `now`."""
        self._since = now
        self._missing = self._timeout_s * MIN_BODY_RATE

    def left_s(self, now: float) -> float:
        """The time left for the bytes that are missing."""
        return self._since + self._timeout_s - now


class UnreadWatch:
    """The number of bytes that a client has not read must change within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._since = 0.0

    def is_stuck(self, num_bytes: int, now: float) -> bool:
        """Whether the number of unread bytes, `num_bytes`, has been the same in all calls for `timeout_s`."""
        if not num_bytes or num_bytes != self._num_bytes:
            self._num_bytes, self._since = num_bytes, now
        return now - self._since >= self._timeout_s
