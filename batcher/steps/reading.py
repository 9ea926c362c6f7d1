"""A step's result while it is read."""

from __future__ import annotations

from itertools import chain

import numpy as np

from batcher.delivery import Delivery, StepDelivery, Tokens
from batcher.scheduling.request_state import RequestState
from batcher.step import StepOutput


class StepReading:
    """A step that is being read: its rows by columns, and those that were looked at."""

    def __init__(self, output: StepOutput, now: float) -> None:
        self.output = output
        self.now = now
        self.outputs: list[Delivery] = []
        self.rows: list[RequestState] = []  # by columns, with one token each
        self.numbers = np.empty(0, np.int64)  # i64[n], of these
        self.tokens = np.empty(0, np.int32)  # i32[n], of these
        self._looked_at: list[RequestState] = []  # those with plain tokens
        self._their_tokens: list[tuple[int, ...]] = []

    def add(self, seq: RequestState, tokens: tuple[int, ...]) -> None:
        """Adds the plain tokens of a request that was looked at."""
        self._looked_at.append(seq)
        self._their_tokens.append(tokens)

    def delivery(self) -> StepDelivery:
        """What the step has for its requests."""
        if not self._looked_at:
            return StepDelivery(self.outputs, self.rows, Tokens(self.numbers, self.tokens) if self.rows else None)
        numbers = np.concatenate([self.numbers, [seq.number for seq in self._looked_at]])
        token_ids = np.concatenate([self.tokens, np.array(list(chain.from_iterable(self._their_tokens)), np.int32)])
        counts = None
        if len(token_ids) > len(numbers):
            counts = np.ones(len(numbers), np.int32)
            counts[len(self.rows) :] = list(map(len, self._their_tokens))
        return StepDelivery(self.outputs, self.rows + self._looked_at, Tokens(numbers, token_ids, counts))
