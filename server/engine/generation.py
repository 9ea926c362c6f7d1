"""Collects the output of one HTTP request's sequences between the engine and the client.

Outputs are decoded to text when they arrive, so a stop string ends its sequence at once, even if the client reads
slowly. Each choice collects its text until the response takes it. A slow reader gets fewer and larger pieces, and
`max_tokens` bounds the memory for them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from batcher.request import FinishReason
from server.engine import wire
from server.engine.protocol import Engine
from server.http.request_error import NOT_FOUND, RequestError, internal, invalid, overloaded, unavailable
from server.text.stream import TextStream
from server.text.tool_calls.parser import CallParser
from server.text.tool_calls.pieces import CallDelta, Content, Piece, Reasoning

logger = logging.getLogger("pallas_serve")

CUT = (FinishReason.LENGTH.value, FinishReason.ABORT.value)  # finish reasons that the model has not chosen


@dataclass(slots=True)
class ScoredToken:
    """A token with its log-probability and those of the most likely ones."""

    token_id: int
    offset: int  # in characters of the sequence's text
    scores: wire.Logprobs | None  # None: nothing predicts the first token of a prompt


@dataclass(slots=True)
class ChoiceDelta:
    """A choice's new output since the last `take`."""

    pieces: list[Piece] = field(default_factory=list)  # none is empty
    scored: list[ScoredToken] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # including those that are not shown as text
    sampled_logprobs: list[float] = field(default_factory=list)  # of `token_ids`, if the request asks for them

    @property
    def text(self) -> str:
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Content)])

    @property
    def reasoning(self) -> str:
        return "".join([piece.text for piece in self.pieces if isinstance(piece, Reasoning)])

    @property
    def is_content(self) -> bool:
        """Whether the output has neither reasoning nor calls."""
        return all(isinstance(piece, Content) for piece in self.pieces)

    @property
    def calls(self) -> list[CallDelta]:
        return [piece for piece in self.pieces if isinstance(piece, CallDelta)]


class Choice:
    """Collects the outputs of one sequence. The response takes text, tool calls and scored tokens from it.

    `calls` finds tool calls in the stream's text; None: all of it is content.
    """

    def __init__(
        self,
        generation: Generation,
        index: int,
        stream: TextStream,
        num_prompt_tokens: int,
        *,
        include_stop: bool,
        calls: CallParser | None = None,
    ) -> None:
        # A generation and its choices die when the answer is complete, not when the garbage collector runs next: until
        # then hundreds of requests' log-probabilities would pile up.
        self._generation: Generation = weakref.proxy(generation)
        self._stream = stream
        self._include_stop = include_stop
        self._calls = calls
        self._overdue = False
        self._texts: list[str] = []
        self._num_taken = 0  # characters, if the whole answer is content
        self._scored: list[ScoredToken] = []
        self._token_ids: list[int] = []
        self._versions = [(wire.DEFAULT_VERSION, 0)]  # of the weights, with the number of tokens before them
        self._sampled_logprobs: list[float] = []
        self.index = index
        self.request_id = f"{generation.request_id}-{index}"
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.drafts = (0, 0)  # accepted and rejected, if the request asks for the counts
        self.first_token_s: float | None = None  # by the monotonic clock
        self.times: tuple[float, float] | None = None  # seconds in the engine's queue, and of the prefill
        self.prompt_logprobs: list[wire.Logprobs] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def take(self) -> ChoiceDelta:
        """The new output since the last call."""
        reasoning = self._stream.reasoning
        start = 0 if reasoning is None else reasoning.answer_start
        pieces: list[Piece] = [] if reasoning is None else [*reasoning.take()]
        if self._calls is not None:
            pieces += [
                Content(piece.text, start + piece.start) if isinstance(piece, Content) else piece
                for piece in self._calls.take()
            ]
        elif text := "".join(self._texts):
            pieces.append(Content(text, start + self._num_taken))
            self._num_taken += len(text)
        choice_delta = ChoiceDelta(pieces, self._scored, self._token_ids, self._sampled_logprobs)
        self._texts, self._scored, self._token_ids, self._sampled_logprobs = [], [], [], []
        return choice_delta

    def so_far(self) -> ChoiceDelta:
        """The result of the next `take`, without taking it. The choice must have neither reasoning nor calls."""
        text = "".join(self._texts)
        pieces: list[Piece] = [Content(text, self._num_taken)] if text else []
        return ChoiceDelta(pieces, [*self._scored], [*self._token_ids], [*self._sampled_logprobs])

    @property
    def num_calls(self) -> int:
        """The number of tool calls that have begun. A call that a limit or a stop string has cut does not count."""
        return 0 if self._calls is None else self._calls.num_calls

    def on_output(self, output: wire.Output) -> None:
        if output.expired:
            self._generation.on_limit("deadline_waiting")
        if output.error is not None or (output.finish_reason == FinishReason.ABORT and not output.by_pause):
            self._generation.fail(error_of(output, self._generation.grammar_field))
            return
        self._take_in(self._read, output)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self._take_in(self._read_tokens, token_ids)

    def on_weight_version(self, version: str) -> None:
        if self._versions[-1][1] == self.num_tokens:
            self._versions.pop()
        if not self._versions or self._versions[-1][0] != version:
            self._versions.append((version, self.num_tokens))

    @property
    def weight_versions(self) -> list[tuple[str, int]]:
        """(version of the weights, number of tokens), in the order of the tokens. Without tokens it has one entry: the
        version at the choice's end, and 0."""
        starts = [start for _, start in self._versions]
        ends = [*starts[1:], self.num_tokens]
        return [(version, end - start) for (version, start), end in zip(self._versions, ends, strict=True)]

    def _take_in[T](self, read: Callable[[T], None], news: T) -> None:
        try:
            read(news)
        except Exception:
            logger.exception("request %s: its output could not be turned into text", self.request_id)
            self._generation.fail(internal("The output could not be turned into text."))
            return
        if self._overdue and self.finish_reason is None:
            self._cut()
        self._generation.on_progress(self)

    def pass_deadline(self) -> None:
        """Ends the sequence at its deadline and keeps its output. A sequence without output ends after its first
        token, unless the engine refuses it before."""
        self._overdue = True
        if self.num_tokens and self.finish_reason is None:
            self._cut()
            self._generation.on_progress(self)

    def _cut(self) -> None:
        self._add(self._stream.finish())
        self._finish(FinishReason.LENGTH.value, None)
        self._generation.stop_choice(self, FinishReason.LENGTH)
        self._generation.on_limit("deadline_running")

    def _read(self, output: wire.Output) -> None:
        if output.num_cached_tokens:
            self.num_cached_tokens = output.num_cached_tokens
        if output.drafts is not None:
            self.drafts = output.drafts
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if self.first_token_s is None and output.token_ids:
            self.first_token_s, self.times = time.monotonic(), output.times
        hides_last = output.finish_reason == FinishReason.STOP and not self._include_stop
        num_before = self.num_tokens
        is_over = self._push(output.token_ids, output.logprobs, hides_last=hides_last)
        self._sampled_logprobs += output.sampled_logprobs[: self.num_tokens - num_before]
        if is_over:
            if output.finish_reason is None:
                self._generation.stop_choice(self)
        elif output.finish_reason is not None:
            self._add(self._stream.finish())
            if self._stream.matched_stop is not None:
                self._finish(FinishReason.STOP.value, self._stream.matched_stop)
            else:
                self._finish(output.finish_reason, output.stop_reason)

    def _read_tokens(self, token_ids: Sequence[int]) -> None:
        if self._push(token_ids):
            self._generation.stop_choice(self)

    def _push(
        self, token_ids: Sequence[int], scores: list[wire.Logprobs] | None = None, *, hides_last: bool = False
    ) -> bool:
        """Adds new tokens. Returns whether the text ended in them. Tokens after its end are left out.

        With `hides_last` the last token is counted and scored, but not shown as text.
        """
        stream = self._stream
        for i, token_id in enumerate(token_ids, 1):
            self.num_tokens += 1
            self._token_ids.append(token_id)
            is_hidden = hides_last and i == len(token_ids)
            text = "" if is_hidden else stream.push(token_id)
            if scores is not None:
                offset = stream.num_chars if is_hidden else stream.start
                self._scored.append(ScoredToken(token_id, offset, scores[i - 1]))
            if is_hidden:
                break
            self._add(text)
            if stream.reasoning is not None:
                self.num_reasoning_tokens += stream.reasoning.is_reasoning
            if stream.matched_stop is not None or (self._calls is not None and self._calls.is_full):
                self._finish(FinishReason.STOP.value, stream.matched_stop)
                return True
        return False

    def _add(self, text: str) -> None:
        if self._calls is None:
            self._texts.append(text)
        else:
            self._calls.push(text)

    def _finish(self, finish_reason: str, stop_reason: str | int | None) -> None:
        if self._calls is not None:
            by_limit = finish_reason in CUT
            self._calls.finish(cut=by_limit or isinstance(stop_reason, str), by_limit=by_limit)
        self.finish_reason, self.stop_reason = finish_reason, stop_reason


class Generation:
    """All choices of one HTTP request. Only the task that writes the answer awaits `wait`.

    Args:
        on_limit: called for each choice that a deadline has ended, with `deadline_waiting` or `deadline_running`.
        on_end: called when all choices have finished, with the number of tokens of the longest.
        grammar_field: the request's field with the grammar, for the error of a grammar that costs too much.
    """

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        *,
        stream: bool,
        on_limit: Callable[[str], None] = lambda limit: None,
        on_end: Callable[[int], None] = lambda num_tokens: None,
        grammar_field: str | None = None,
    ) -> None:
        self.grammar_field = grammar_field
        self.request_id = request_id
        self.choices: list[Choice] = []
        self.error: Exception | None = None  # why it has failed
        self.on_limit = on_limit
        self._on_end = on_end
        self._engine = engine
        self._stream = stream
        self._deadline: asyncio.TimerHandle | None = None
        self._progress = asyncio.Event()
        self._dirty: dict[int, Choice] = {}
        self._num_open = 0

    def submit(self, requests: Sequence[wire.WireRequest], *, timeout_s: float | None = None) -> None:
        """Submits one request for each choice, in order. Ends running choices after `timeout_s`.

        Raises RequestError 503 if the engine is dead.
        """
        death = self._engine.death
        if death is not None:
            raise unavailable(f"The engine has failed: {death}")
        self._num_open = len(self.choices)
        self._engine.submit(list(zip(requests, self.choices, strict=True)))
        if timeout_s is not None and self._num_open:
            self._deadline = asyncio.get_running_loop().call_later(timeout_s, self._pass_deadline)

    def complete(self, outputs: Sequence[wire.Output]) -> None:
        """Takes the only output of each choice, in order, in place of the engine's."""
        self._num_open = len(self.choices)
        for choice, output in zip(self.choices, outputs, strict=True):
            choice.on_output(output)

    @property
    def finished(self) -> bool:
        return self._num_open == 0

    async def wait(self) -> list[Choice]:
        """Waits for output and returns the choices that have it. Without streaming it returns all choices at the end.

        Raises RequestError if the engine refused the request or failed.
        """
        await self._progress.wait()
        self._progress.clear()
        if self.error is not None:
            raise self.error
        dirty = list(self._dirty.values())
        self._dirty.clear()
        return dirty

    def abort(self) -> None:
        """Aborts the choices that still run, if any. Their pages are free a step later."""
        self._engine.abort([choice.request_id for choice in self.choices if choice.finish_reason is None])
        self._num_open = 0
        if self._deadline is not None:
            self._deadline.cancel()

    def stop_choice(self, choice: Choice, reason: FinishReason = FinishReason.STOP) -> None:
        """Ends a choice whose text is complete. The engine counts it as finished with `reason`."""
        self._engine.abort([choice.request_id], reason)

    def _pass_deadline(self) -> None:
        for choice in self.choices:
            choice.pass_deadline()

    def on_progress(self, choice: Choice) -> None:
        """Notes that a choice has gained tokens or ended."""
        if choice.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._on_end(max(choice.num_tokens for choice in self.choices))
        self._dirty[choice.index] = choice
        if self._stream or self._num_open == 0:
            self._progress.set()

    def fail(self, error: Exception) -> None:
        """Ends all choices; `wait` raises the error."""
        if self.error is None:
            self.error = error
            self.abort()
            self._progress.set()


def error_of(output: wire.Output, grammar_field: str | None = None) -> RequestError:
    """The error of a request that has ended without all of its output.

    `grammar_field` is the request's field with the grammar; None: it has none.
    """
    if output.by_pause:
        return unavailable("The engine was paused, and the request has ended.", retry_after_s=1)
    if output.error is None:
        return unavailable("The server is shutting down.")
    message = output.error
    match output.status:
        case 429:
            return overloaded(message, output.retry_after_s or 1)
        case 503:
            return unavailable(message, retry_after_s=1)
        case 400 if output.param is None and grammar_field is not None:
            return invalid(grammar_field, message)
        case 400:
            return RequestError(400, message, param=output.param)
        case 404:
            return RequestError(404, message, type=NOT_FOUND, param="model", code="model_not_found")
        case _:
            return internal(message)
