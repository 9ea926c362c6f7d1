"""How fast a client sends its body and reads its answer. Times are seconds by one clock, which the caller reads."""

from __future__ import annotations

MIN_BODY_RATE = 1024  # bytes a second, on average


class BodyPace:
    """A body may pause for `timeout_s`, and may be so late altogether at MIN_BODY_RATE."""

    def __init__(self, timeout_s: float, now: float) -> None:
        self._timeout_s = timeout_s
        self._began = self._came = now
        self._num_bytes = 0

    def on_bytes(self, num_bytes: int, now: float) -> None:
        self._num_bytes += num_bytes
        self._came = now

    def left_s(self, now: float) -> float:
        """Until it is too late, if nothing comes."""
        at_rate = self._began + self._num_bytes / MIN_BODY_RATE
        return min(self._came, at_rate) + self._timeout_s - now


class UnreadWatch:
    """What a client has not read must become less within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._num_bytes = 0
        self._since = 0.0

    def is_stuck(self, num_bytes: int, now: float) -> bool:
        """Whether `num_bytes`, which wait for the client, are as many as at each call since `timeout_s` ago."""
        if not num_bytes or num_bytes != self._num_bytes:
            self._num_bytes, self._since = num_bytes, now
        return now - self._since >= self._timeout_s
