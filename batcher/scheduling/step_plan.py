"""The plan of one step. The scheduler makes it, and the packer packs it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batcher.scheduling.request_state import RequestState
from batcher.step import AdapterWrite, Bucket


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of one row that a step computes: `to_compute[start:start + count]`."""

    row: int
    offset: int  # index of its first token in the step
    start: int  # index of its first token in the sequence
    count: int


@dataclass(kw_only=True, slots=True)
class StepPlan:
    """The plan of a step. Rows with one token come first (`num_singles` of them), and longer chunks follow."""

    number: int
    bucket: Bucket
    rows: list[RequestState]
    slots: np.ndarray  # i64[rows]
    q_lens: list[int]
    emits: list[int]  # 0 or 1
    num_singles: int
    num_tokens: int
    looks_up: bool = False  # the step has no drafts, and tells if the first one would have been right
    chunks: list[Chunk] = field(default_factory=list)  # rows not listed here read their slot's last token
    admitted: list[RequestState] = field(default_factory=list)
    masks: list[tuple[RequestState, np.ndarray]] = field(default_factory=list)  # of the tokens drawn under a grammar
    model: int = 0  # the identity of the model of all rows
    adapters: list[AdapterWrite] = field(default_factory=list)  # of the adapters that `admitted` brings to the slots
    grown: list[tuple[RequestState, int]] = field(default_factory=list)  # running rows and the indices of new pages
