"""The sequences of one HTTP request on their way from the engine to the client.

Outputs are turned into text the moment they arrive, so that a stop string ends its sequence at once however slowly the
client reads; what has become text gathers in each choice until the response takes it. A slow reader gets fewer and
larger pieces, and its memory is bounded by its own `max_tokens`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.request import FinishReason
from server.engine import wire
from server.engine.client import EngineClient
from server.http.errors import RequestError, internal, overloaded, unavailable
from server.text.stream import TextStream

logger = logging.getLogger("pallas_serve")


@dataclass(slots=True)
class ScoredToken:
    token_id: int
    offset: int  # in characters of the sequence's text
    scores: wire.Logprobs | None  # None: nothing predicts the first token of a prompt


@dataclass(slots=True)
class Gain:
    """What a choice has gained since it was asked before."""

    text: str = ""
    scored: list[ScoredToken] = field(default_factory=list)


class Choice:
    """One sequence: outputs go in, text and scored tokens are taken out by the response."""

    __slots__ = (
        "_generation",
        "_include_stop",
        "_pieces",
        "_scored",
        "_stream",
        "finish_reason",
        "index",
        "num_cached_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_logprobs",
        "request_id",
        "stop_reason",
    )

    def __init__(
        self, generation: Generation, index: int, stream: TextStream, num_prompt_tokens: int, *, include_stop: bool
    ) -> None:
        self._generation = generation
        self._stream = stream
        self._include_stop = include_stop
        self._pieces: list[str] = []
        self._scored: list[ScoredToken] = []
        self.index = index
        self.request_id = f"{generation.request_id}-{index}"
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.prompt_logprobs: list[wire.Logprobs] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self) -> Gain:
        """What has come since the last call."""
        gain = Gain("".join(self._pieces), self._scored)
        self._pieces, self._scored = [], []
        return gain

    def on_output(self, output: wire.Output) -> None:
        if output.error is not None or output.finish_reason == FinishReason.ABORT:
            self._generation.fail(_error_of(output))
            return
        try:
            self._read(output)
        except Exception:
            logger.exception("request %s: its output could not be turned into text", self.request_id)
            self._generation.fail(internal("The output could not be turned into text."))
            return
        self._generation.on_progress(self)

    def _read(self, output: wire.Output) -> None:
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        stream, last = self._stream, len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if output.logprobs is not None:
                self._scored.append(ScoredToken(token_id, stream.num_chars, output.logprobs[i]))
            if i == last and output.finish_reason == FinishReason.STOP and not self._include_stop:
                break  # the token that ends the sequence is counted and scored, not shown
            self._pieces.append(stream.push(token_id))
            if stream.matched_stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, stream.matched_stop
                if output.finish_reason is None:
                    self._generation.stop_choice(self)
                return
        if output.finish_reason is not None:
            self._pieces.append(stream.finish())
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            if stream.matched_stop is not None:
                self.finish_reason, self.stop_reason = FinishReason.STOP.value, stream.matched_stop


class Generation:
    """All choices of one HTTP request. `wait` is awaited by one task, the one that answers."""

    def __init__(self, client: EngineClient, request_id: str, *, stream: bool) -> None:
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.error: Exception | None = None  # a RequestError, or that the client has gone
        self._client = client
        self._stream = stream
        self._progress = asyncio.Event()
        self._dirty: dict[int, Choice] = {}
        self._num_open = 0

    def submit(self, requests: Sequence[wire.WireRequest]) -> None:
        """One request for each choice, in order, all or none."""
        death = self._client.death
        if death is not None:
            raise unavailable(f"The engine has failed: {death}")
        self._num_open = len(self.choices)
        self._client.submit(list(zip(requests, self.choices, strict=True)))

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    async def wait(self) -> list[Choice]:
        """The choices that gained something since the last call; where nothing is streamed, all of them at the end.
        Raises RequestError where the engine refused or failed."""
        await self._progress.wait()
        self._progress.clear()
        if self.error is not None:
            raise self.error
        dirty = list(self._dirty.values())
        self._dirty.clear()
        return dirty

    def abort(self) -> None:
        """Gives up whatever still runs: its pages are free a step later. Harmless when nothing does."""
        self._client.abort([choice.request_id for choice in self.choices if choice.finish_reason is None])
        self._num_open = 0

    def stop_choice(self, choice: Choice) -> None:
        """Its text is complete: the engine need not go on, and counts it as finished."""
        self._client.abort([choice.request_id], FinishReason.STOP)

    def on_progress(self, choice: Choice) -> None:
        if choice.finish_reason is not None:
            self._num_open -= 1
        self._dirty[choice.index] = choice
        if self._stream or self._num_open == 0:
            self._progress.set()

    def fail(self, error: Exception) -> None:
        """Ends all choices; `wait` raises the error."""
        if self.error is None:
            self.error = error
            self.abort()
            self._progress.set()


def _error_of(output: wire.Output) -> RequestError:
    if output.error is None:
        return unavailable("The server is shutting down.")
    message = output.error
    match output.status:
        case 429:
            return overloaded(message)
        case 503:
            return unavailable(message, retry_after_s=1)
        case 400:
            return RequestError(400, message, param=output.param)
        case _:
            return internal(message)
