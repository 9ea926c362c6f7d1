"""The fields of running requests that are needed to read a step, in columns by slot.

Most tokens change nothing but counts. The counts are columns, so a step of any number of rows is read with a few array
operations. A row *needs a look* of its own if its request may end, wants more than the token, or has left its slot.
"""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from batcher.scheduling.request_state import RequestState

NEVER = np.iinfo(np.int64).max // 2  # tokens
_AT_ONCE = -NEVER


class SlotColumns:
    """The columns. The scheduler enters requests and lets them leave; whoever reads tokens keeps the counts.

    Args:
        vocab_size: tokens.
        page_size: tokens of a page; None: pages are not stored as prefixes.
    """

    def __init__(self, num_slots: int, vocab_size: int, page_size: int | None) -> None:
        self.numbers = np.zeros(num_slots, np.int64)  # the requests' numbers
        self.left = np.full(num_slots, _AT_ONCE)  # i64, tokens until the row needs a look of its own: at 0 or below
        self.left_of_page = np.full(num_slots, NEVER)  # i64, tokens until a page can be stored: at 0 or below
        self.last_token_s = np.zeros(num_slots)
        self.itl_s = np.full(num_slots, np.inf)  # the targets of the gaps between two tokens; inf: none
        self.num_late = np.zeros(num_slots, np.int64)  # gaps that were longer
        self.num_ended_by = np.zeros(vocab_size, np.int32)  # requests in slots that the token may end
        self._page_size = page_size
        self._owners: list[RequestState | None] = [None] * num_slots
        # Model, whether it goes last, and ITL target of the requests in slots that have one -> requests.
        self._classes = Counter[tuple[int, bool, float]]()

    def enter(self, seq: RequestState) -> None:
        """Enters a request that has got its slot. Its next token needs a look."""
        slot = seq.slot
        self._owners[slot] = seq
        self.numbers[slot] = seq.number
        self.last_token_s[slot] = seq.last_token_s
        self.itl_s[slot], self.num_late[slot] = seq.itl_s, seq.num_late_gaps
        if seq.itl_s < math.inf:
            self._classes[_class_of(seq)] += 1
        self._count_stop_ids(seq, 1)

    def leave(self, seq: RequestState) -> None:
        """The request gives up its slot, or has ended in it. Rows of it in flight need a look. It may have left
        before."""
        slot = seq.slot
        if slot < 0 or self._owners[slot] is not seq:
            return
        seq.last_token_s, seq.num_late_gaps = float(self.last_token_s[slot]), int(self.num_late[slot])
        if self.itl_s[slot] < math.inf:
            self.itl_s[slot] = math.inf
            self._classes[its_class := _class_of(seq)] -= 1
            if not self._classes[its_class]:
                del self._classes[its_class]
        self._owners[slot] = None
        self.left[slot], self.left_of_page[slot] = _AT_ONCE, NEVER
        self._count_stop_ids(seq, -1)

    def last_token_of(self, seq: RequestState) -> float:
        """The time at which the request's last token was read; below 0 if there was none."""
        return float(self.last_token_s[seq.slot]) if self._is_in(seq) else seq.last_token_s

    def itl_targets(self, model: int | None = None) -> list[float]:
        """The ITL targets, in seconds, of the requests in slots that do not go last, of one model or of all."""
        return [itl_s for of, is_last, itl_s in self._classes if not is_last and model in (None, of)]

    @property
    def shortest_itl_s(self) -> float:
        """The shortest ITL target of all requests in slots; infinity: there is none."""
        return min((itl_s for _, _, itl_s in self._classes), default=math.inf)

    def count_late(self, seq: RequestState, gap_s: float, num_gaps: int) -> None:
        """Counts gaps of a row that was looked at, if they were longer than its target."""
        if self._is_in(seq) and gap_s > self.itl_s[seq.slot]:
            self.num_late[seq.slot] += num_gaps

    def looked(self, seq: RequestState, now: float) -> None:
        """After a look at a row: it has a token since `now`, and its request goes on. Says when the next look is."""
        if not self._is_in(seq):
            seq.last_token_s = now
            return
        self.last_token_s[seq.slot] = now
        asked = seq.sampling
        scores = asked.logprobs is not None or asked.logprob_token_ids or asked.sampled_logprobs
        wants_looks = seq.matcher is not None or scores
        self.left[seq.slot] = _AT_ONCE if wants_looks else seq.limit - len(seq.output)

    def look_at_page(self, seq: RequestState) -> None:
        """Says when the request's next page will be full of tokens that are known and computed."""
        if self._page_size is not None and self._is_in(seq):
            end = (seq.num_committed + 1) * self._page_size
            self.left_of_page[seq.slot] = end - min(seq.num_computed, seq.num_known)

    def _is_in(self, seq: RequestState) -> bool:
        return seq.slot >= 0 and self._owners[seq.slot] is seq

    def _count_stop_ids(self, seq: RequestState, change: int) -> None:
        ids = [token for token in seq.stop_ids if token < self.num_ended_by.size]
        self.num_ended_by[ids] += change


def _class_of(seq: RequestState) -> tuple[int, bool, float]:
    """A request in a slot stays in its class."""
    return seq.request.model, seq.is_last, seq.itl_s
