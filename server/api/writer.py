"""What an answer says, whatever its form: the head that its parts share, and the parts in their order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from server.api.usage import UsageOptions
from server.engine.generation import Choice, Gain
from server.http.errors import RequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerHead:
    """What the whole answer, or each of its chunks, says alike."""

    id: str
    model: str
    created: int  # seconds since 1970
    n: int  # choices of each prompt
    usage: UsageOptions
    deadline: float | None = None  # by the monotonic clock: a request that waits then is refused, one that runs ends
    every_token: bool = False  # a token without text has a chunk, too
    token_ids: bool = False  # the ids of the prompt and of the output are shown
    names_are_ids: bool = False  # log-probabilities call a token `token_id:97`


class Writer(Protocol):
    """The form in which a route words its answer. `GenerationAnswer` calls the methods in the order of this class.

    What they return is JSON, or server-sent events, in pieces. They read the choice when they are called; only the
    encoding may be left for later.
    """

    def whole(self) -> Iterator[bytes]:
        """The JSON body, once every choice has finished."""

    def opening(self, choice: Choice) -> Iterable[bytes]:
        """The events before a choice's first gain."""

    def gained(self, choice: Choice, gain: Gain) -> Iterable[bytes]:
        """The events for what a choice has gained. May be none."""

    def ending(self, choice: Choice) -> Iterable[bytes]:
        """The events after the last gain of a choice, which has a finish reason."""

    def last(self) -> bytes:
        """The end of the stream, when all choices have finished."""

    def failed(self, error: RequestError) -> bytes:
        """The end of a stream that an error has cut short."""
