"""The results of a step for its requests: plain tokens in columns, and objects for rare cases.

A token is *plain* if its request goes on after it and nothing but the token is asked for. Nearly all tokens are. An
object per token would cost more than all other work of the host, so plain tokens leave the engine as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from batcher.request import RequestOutput
from batcher.scheduling.request_state import RequestState

Delivery = tuple[RequestState, RequestOutput]


@dataclass(frozen=True, slots=True)
class Tokens:
    """The plain tokens of a step. Every request in it has had its first token, as a `RequestOutput`."""

    numbers: np.ndarray  # i64[n], `RequestOutput.number` of the requests
    token_ids: np.ndarray  # i32[m], the tokens of the first request, then those of the second, and so on
    counts: np.ndarray | None = None  # i32[n], tokens of each request; None: one each


@dataclass(slots=True)
class StepDelivery:
    """The results of a step for its requests. A request is in `outputs` or in the columns, never in both."""

    outputs: list[Delivery] = field(default_factory=list)
    sequences: list[RequestState] = field(default_factory=list)  # the requests of `tokens`
    tokens: Tokens | None = None

    def plain_outputs(self) -> Iterator[Delivery]:
        """The plain tokens as an object for each request."""
        if self.tokens is None:
            return
        ids, start = self.tokens.token_ids.tolist(), 0
        counts = [1] * len(self.sequences) if self.tokens.counts is None else self.tokens.counts.tolist()
        for seq, count in zip(self.sequences, counts, strict=True):
            own = tuple(ids[start : start + count])
            start += count
            yield seq, plain_output(seq, own)


def plain_output(seq: RequestState, token_ids: tuple[int, ...]) -> RequestOutput:
    """An output with tokens and nothing else."""
    return RequestOutput(
        request_id=seq.request_id, number=seq.number, token_ids=token_ids, num_cached_tokens=seq.num_hit_tokens
    )
