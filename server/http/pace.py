"""Time limits for a client that sends a body or reads an answer. The caller passes the time, in seconds."""

from __future__ import annotations

MIN_BODY_RATE = 1024  # bytes a second, on average


class BodyPace:
    """A body may pause for `timeout_s`. In total it may be `timeout_s` behind a body sent at MIN_BODY_RATE."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._began = self._came = now
        self._num_bytes = 0

    def on_bytes(self, num_bytes: int, now: float) -> None:
        """Counts bytes that came at `now`."""
        self._num_bytes += num_bytes
        self._came = now

    def left_s(self, now: float) -> float:
        """The time left for the next bytes."""
        at_rate = self._began + self._num_bytes / MIN_BODY_RATE
        return min(self._came, at_rate) + self._timeout_s - now


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
