"""The errors with which the engine refuses calls. Their messages may be shown to a client."""

from __future__ import annotations


class InvalidRequestError(ValueError):
    """The request can never run; `param` names the field at fault."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class QueueFullError(RuntimeError):
    """Too many requests wait already; the same request may succeed later (HTTP 429 or 503)."""


class EngineClosedError(RuntimeError):
    """The engine is shutting down and takes no new requests (HTTP 503)."""


class StepTimeoutError(TimeoutError):
    """A step has not returned in time: the device is stuck, and the engine is dead."""


class EngineDeadError(RuntimeError):
    """The engine has stopped for good: its device or its own code failed (HTTP 500, health 503)."""
