"""The requests of an engine from arrival to end: their deadlines in the queue, masks under grammars, last outputs."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable
from typing import NamedTuple

from batcher.delivery import Delivery
from batcher.grammar import GrammarError
from batcher.request import ErrorCode, FinishReason, RequestOutput
from batcher.requests import counting
from batcher.requests.masks import Ask, MaskResult
from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.scheduler import Scheduler
from batcher.stats import EngineStats
from batcher.step import WeightsKind

_log = logging.getLogger(__name__)


class Staged(NamedTuple):
    """An adapter or a model is on the device, or its weights cannot be read."""

    kind: WeightsKind
    identity: int
    error: Exception | None
    seconds: float  # that it took


class LiveRequests:
    """The requests that have not ended. Not thread-safe: the thread of the engine's core calls everything here.

    Args:
        counts: requests that end are counted here.
    """

    def __init__(self, scheduler: Scheduler, counts: EngineStats, clock: Callable[[], float]) -> None:
        self.sequences: dict[str, RequestState] = {}  # waiting and running, by request id
        self.asks: list[Ask] = []  # for masks; the engine passes them on and empties the list
        self.num_masks_wanted = 0  # asked for and not taken in yet
        self.num_compiling = 0  # whose grammar is not compiled yet
        self._scheduler = scheduler
        self._counts = counts
        self._clock = clock
        # A heap of (seconds by the clock, rank, request). The entries of admitted and of ended requests are stale.
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._num_deadlines = 0

    def add(self, sequence: RequestState) -> None:
        """A request arrives. It joins the scheduler's queue, under a grammar when its first mask is there."""
        self.sequences[sequence.request_id] = sequence
        if sequence.matcher is None:
            self._scheduler.add(sequence)
        else:
            self.num_compiling += 1
            self.ask(sequence, ())
        if sequence.request.deadline_s is not None:
            due = sequence.arrived_s + sequence.request.deadline_s
            self._num_deadlines += 1
            heapq.heappush(self._deadlines, (due, self._num_deadlines, sequence))

    def abort(self, sequence: RequestState, reason: FinishReason) -> list[Delivery]:
        """Ends a request in any state. For a request that has ended it does nothing."""
        return [] if sequence.state is State.FINISHED else [self.end(sequence, reason)]

    def next_deadline(self) -> float | None:
        """The earliest deadline of a queued request, by the clock. None if there is none."""
        if self._scheduler.late:
            return self._clock()
        while self._deadlines:
            due, _, seq = self._deadlines[0]
            if seq.state in (State.COMPILING, State.WAITING) and seq.started_s < 0:  # not if it was admitted before
                return due
            heapq.heappop(self._deadlines)
        return None

    def expire(self) -> list[Delivery]:
        """Ends the queued requests whose deadline has passed, and those that are refused because they are late."""
        deliveries = [self._refuse(*late) for late in self._scheduler.take_late()]
        while (due := self.next_deadline()) is not None and due <= self._clock():
            _, _, sequence = heapq.heappop(self._deadlines)
            waited = f"the request waited longer than its limit of {sequence.request.deadline_s} s in the queue"
            deliveries.append(self.end(sequence, FinishReason.ERROR, waited, ErrorCode.QUEUE_DEADLINE))
        return deliveries

    def _refuse(self, seq: RequestState, retry_after_s: int) -> Delivery:
        counting.count_target(self._counts, seq, "refused")
        message = f"the first token would come later than the target of {seq.ttft_s} s; try again in {retry_after_s} s"
        _, output = self.end(seq, FinishReason.ERROR, message, ErrorCode.LATE)
        output.retry_after_s = retry_after_s
        return seq, output

    def ask(self, seq: RequestState, tokens: tuple[int, ...]) -> None:
        """Asks for the mask of the request's next token, after these tokens."""
        self.asks.append(Ask(seq, tokens))
        self.num_masks_wanted += 1

    def take_mask(self, answer: MaskResult) -> list[Delivery]:
        """Takes in the mask of a request's next token."""
        self.num_masks_wanted -= 1
        seq, permit = answer.sequence, answer.permit
        if seq.state is State.FINISHED:
            return []
        if isinstance(permit, GrammarError):
            return [self.end(seq, FinishReason.ERROR, str(permit), ErrorCode.GRAMMAR)]
        if isinstance(permit, Exception):
            _log.error("the mask of request %r could not be computed", seq.request_id, exc_info=permit)
            return [self.end(seq, FinishReason.ERROR, f"its mask could not be computed: {permit}")]
        if permit.is_over:
            return [self.end(seq, FinishReason.STOP)]
        mask = permit.mask if seq.allowed is None else permit.mask & seq.allowed
        if not mask.any():
            nothing = "of the tokens that allowed_token_ids and bad_words leave, the grammar allows none next"
            return [self.end(seq, FinishReason.ERROR, nothing, ErrorCode.GRAMMAR)]
        seq.mask, seq.is_blocked, seq.is_slow_to_mask = mask, False, answer.was_slow
        if seq.state is State.COMPILING:
            seq.is_slow_to_mask = False
            seq.state = State.WAITING
            self.num_compiling -= 1
            self._scheduler.add(seq)
        return []

    def take_staged(self, staged: Staged) -> list[Delivery]:
        """An adapter or a model has been staged. If its weights cannot be read, the requests that wait for it end."""
        kind, identity, error = staged.kind, staged.identity, staged.error
        self._scheduler.staged[kind].staged(identity, is_there=error is None, seconds=staged.seconds)
        if error is None:
            return []
        message = f"the weights of this request's {kind} cannot be read: {error}"
        if kind is WeightsKind.ADAPTER:
            waiting, code = self._scheduler.adapters.waiting_for(identity), ErrorCode.ADAPTER
        else:
            waiting, code = [seq for seq in self.sequences.values() if seq.request.model == identity], ErrorCode.MODEL
        return [self.end(seq, FinishReason.ERROR, message, code) for seq in waiting]

    def end_all(self, reason: FinishReason, *, by_pause: bool = False) -> list[Delivery]:
        """Ends all requests."""
        return [self.end(seq, reason, by_pause=by_pause) for seq in list(self.sequences.values())]

    def end(
        self,
        seq: RequestState,
        reason: FinishReason,
        error: str | None = None,
        code: ErrorCode | None = None,
        *,
        by_pause: bool = False,
    ) -> Delivery:
        """Ends the request, with an output that has no tokens."""
        self.forget(seq, reason)
        return seq, RequestOutput(
            request_id=seq.request_id,
            number=seq.number,
            num_cached_tokens=seq.num_hit_tokens,
            finish_reason=reason,
            error=error,
            error_code=code,
            by_pause=by_pause,
        )

    def forget(self, seq: RequestState, reason: FinishReason) -> None:
        """Takes an ended request out of everything. Its last output is the caller's."""
        self.num_compiling -= seq.state is State.COMPILING
        self._scheduler.finish(seq)
        del self.sequences[seq.request_id]
        if reason is not FinishReason.ERROR and seq.output:
            self._scheduler.forecast.finished(seq, stopped=reason is FinishReason.STOP)
        counting.count_end(self._counts, seq, reason)
