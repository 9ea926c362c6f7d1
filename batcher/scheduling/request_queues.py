"""Which requests run and which wait, with the slots and the pages that they hold.

Running requests are in the order of their keys (level, quanta of their group at admission, arrival rank).
`fair_queue.py` orders waiting requests, and defines a quantum. A request that leaves `running` releases its slot and
pages when the last step in flight with a row of it returns: until then the device writes there.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter

import numpy as np

from batcher.page_events import PageEventRecorder, PageStored
from batcher.scheduling.adapter_slots import AdapterSlots
from batcher.scheduling.columns import NEVER, SlotColumns
from batcher.scheduling.digests import next_digest
from batcher.scheduling.fair_queue import FairQueue
from batcher.scheduling.forecast import Forecast, Outlook, OutputForecast
from batcher.scheduling.model_turns import ModelTurns
from batcher.scheduling.offloading import OffloadedPages
from batcher.scheduling.page_moves import PageLoad
from batcher.scheduling.pages import PagePool
from batcher.scheduling.request_state import RequestState, State
from batcher.step import Capacity, WeightsKind

_key: Callable[[RequestState], tuple[int, int, int]] = attrgetter("key")


class RequestQueues:
    """The running and waiting requests, and their slots and pages. Not thread-safe: the engine's thread owns it.

    Args:
        num_slots: the most requests that run at once.
        prefix_caching: full pages are kept for later requests with the same prefix.
    """

    def __init__(
        self, capacity: Capacity, num_slots: int, clock: Callable[[], float] = time.monotonic, *, prefix_caching: bool
    ) -> None:
        if capacity.num_pages < capacity.pages_per_seq:
            raise ValueError(
                "the page pool must hold at least one request of full length: "
                f"{capacity.num_pages=} {capacity.pages_per_seq=}"
            )
        self.page_size = capacity.page_size
        self.pool = PagePool(capacity.num_pages, capacity.page_size)
        self.columns = SlotColumns(num_slots, capacity.vocab_size, capacity.page_size if prefix_caching else None)
        self.prefix_caching = prefix_caching
        self.forecast: Forecast = OutputForecast(capacity.max_model_len)
        self.running: list[RequestState] = []  # sorted by key
        self.waiting = FairQueue(num_slots)
        self.adapters = AdapterSlots(capacity.max_loras)
        self.models = None if not capacity.max_models else ModelTurns(capacity.max_models, clock)
        self.staged: dict[WeightsKind, AdapterSlots | ModelTurns] = {}  # the kinds that requests may name
        if capacity.max_loras:
            self.staged[WeightsKind.ADAPTER] = self.adapters
        if self.models is not None:
            self.staged[WeightsKind.MODEL] = self.models
        self.offloaded: OffloadedPages | None = None
        self.page_events: PageEventRecorder | None = None
        self._held_back: dict[int, RequestState] | None = None  # arrival -> request; None: requests may start
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens, at first admissions only
        self.prefix_hits = 0
        self.last_step = -1  # the last step planned
        self.last_done = -1  # the last step that has returned
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._outlook: Outlook | None = None  # of `running`; made when the first admission of a step needs it
        self._num_arrivals = 0
        self._last_rows: list[RequestState] = []  # rows of the last step, and their slots
        self._last_slots = np.empty(0, np.int64)
        self._to_commit: deque[RequestState] = deque()  # a page of theirs is full, or they have left since
        self._pages_at_limits = 0  # of the running requests if all of them reach their limits
        self.num_row_pages = 0  # of the running requests, shared ones counted for each
        # (step, slot, pages) of requests that have left but still have a row in a step in flight; steps ascending
        self._held: list[tuple[int, int, list[int]]] = []

    # --- events from the engine ---

    def record_pages(self, recorder: PageEventRecorder) -> None:
        """Tells `recorder` from now on what happens to stored pages."""
        self.page_events = recorder
        self.pool.observers.append(recorder)
        if self.offloaded is not None:
            self.offloaded.events = recorder

    def add(self, sequence: RequestState) -> None:
        """Adds a new request to the queue."""
        sequence.arrival = self._num_arrivals
        sequence.order = (0.0, sequence.arrival)
        self._num_arrivals += 1
        self._take_targets(sequence)
        if self.models is not None:
            self.models.add(sequence.request.model)
        if self._held_back is None:
            self._wait(sequence)
        else:
            self._held_back[sequence.arrival] = sequence

    def _take_targets(self, sequence: RequestState) -> None:
        """Gives a new request its latency targets, and the place in the queue that follows from them."""

    def _wait(self, sequence: RequestState) -> None:
        self.waiting.add(sequence)
        self.adapters.add(sequence)

    def _wait_no_longer(self, sequence: RequestState) -> None:
        self.waiting.remove(sequence)
        self.adapters.remove(sequence)

    def hold(self) -> None:
        """Lets no request start until `let_go`. Requests that have started go on, also after a preemption."""
        if self._held_back is not None:
            return
        self._held_back = {seq.arrival: seq for seq in self.waiting if not seq.num_preemptions}
        for seq in self._held_back.values():
            self._wait_no_longer(seq)

    def let_go(self) -> None:
        """Lets requests start again."""
        held, self._held_back = self._held_back or {}, None
        for seq in held.values():
            self._wait(seq)

    @property
    def may_start(self) -> bool:
        """Whether requests may start."""
        return self._held_back is None

    @property
    def has_no_started(self) -> bool:
        """Whether no request has started and not ended, while none may start."""
        return not self.running and not len(self.waiting)

    @property
    def num_waiting(self) -> int:
        """The number of requests in the queue, and of those that are held back from it."""
        return len(self.waiting) + len(self._held_back or ())

    def finish(self, sequence: RequestState) -> None:
        """Ends a request in any state. Its slot and pages are released when no step in flight has a row of it."""
        if self.models is not None and sequence.state in (State.RUNNING, State.WAITING):
            self.models.remove(sequence.request.model)
        if sequence.state is State.RUNNING:
            self.commit(sequence)
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            if self._held_back is None or self._held_back.pop(sequence.arrival, None) is None:
                self._wait_no_longer(sequence)
            self.pool.let_go(sequence.prefix)
        sequence.state = State.FINISHED

    def step_returned(self, number: int) -> None:
        """Records that step `number` has finished on the device. Steps return in order."""
        self.last_done = number
        if self.models is not None:
            self.models.last_done = number
        keep = 0
        for step, slot, pages in self._held:
            if step > number:
                break
            self._give_back(slot, pages)
            keep += 1
        del self._held[:keep]

    def take_back(self, sequence: RequestState, num_tokens: int) -> None:
        """Corrects the counts of a request after a step that has drawn fewer tokens than it had places for."""
        sequence.num_emitted -= num_tokens
        if sequence.state is State.RUNNING:  # otherwise it was preempted in flight, and starts anew
            sequence.num_computed -= num_tokens

    def commit(self, sequence: RequestState) -> None:
        """Adds a request's pages to the prefix cache as far as they are full of known, dispatched tokens."""
        if not self.prefix_caching:
            return
        count = min(sequence.num_computed, sequence.num_known) // self.page_size
        if count <= sequence.num_committed:
            return
        digests = sequence.digests
        for page in range(sequence.num_committed, count):
            content = sequence.page_bytes(page, self.page_size)
            if page == len(digests):
                digests.append(next_digest(sequence.request, digests, content))
            is_new = self.pool.commit(sequence.pages[page], digests[page], content)
            if is_new and self.page_events is not None:
                parent = digests[page - 1] if page else None
                request = sequence.request
                event = PageStored(digests[page], parent, content, request.cache_salt, request.adapter, request.model)
                self.page_events.add(event)
        sequence.num_committed = count

    def commit_soon(self, sequence: RequestState) -> None:
        """A page of a decoding request is full. Requests that were admitted together fill their pages in the same step,
        and `commit_some` spreads the work over the next ones."""
        self.columns.left_of_page[sequence.slot] = NEVER
        self._to_commit.append(sequence)

    def commit_some(self) -> None:
        """Commits as many pages as the running requests fill in one step on average."""
        for _ in range(min(len(self._to_commit), 1 + len(self.running) // self.page_size)):
            sequence = self._to_commit.popleft()
            if sequence.state is State.RUNNING:
                self.commit(sequence)
                self.columns.look_at_page(sequence)

    def preempt(self, sequence: RequestState) -> None:
        """Returns a running request to the queue, at its old rank. Its tokens are recomputed or found in the cache."""
        self.commit(sequence)
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    # --- slots and pages ---

    def _full_pages(self, seq: RequestState) -> int:
        """Pages of a request at its limit. The K/V of its last token are never stored."""
        return -(-(seq.num_prompt + seq.limit - 1) // self.page_size)

    def _enter(self, seq: RequestState, num_new: int) -> None:
        hits = self.pool.let_go(seq.prefix)
        self.pool.acquire(hits)
        seq.pages = hits + self.pool.allocate(num_new)
        seq.slot = self._free_slots.pop()
        seq.to_compute = seq.tokens()
        seq.num_computed = len(hits) * self.page_size
        seq.num_committed = len(hits)
        seq.decoding = False
        seq.is_new = True
        if not seq.num_preemptions:
            seq.num_hit_tokens = seq.num_computed
            if self.prefix_caching and not seq.needs_every_position:
                self.prefix_queries += seq.num_prompt
                self.prefix_hits += seq.num_hit_tokens
        seq.state = State.RUNNING
        self.columns.enter(seq)
        seq.key = self.waiting.key(seq)
        self.waiting.admit(seq)
        self.adapters.remove(seq)
        self.adapters.enter(seq)
        insort(self.running, seq, key=_key)
        self._pages_at_limits += self._full_pages(seq)
        self.num_row_pages += len(seq.pages)
        if self._outlook is not None:
            self._outlook.add(seq)

    def _leave(self, seq: RequestState) -> None:
        """Removes a request from `running`. Slot and pages are released at once, or when its last step returns."""
        if seq.load is not None:
            self.end_load(seq.load)
        del self.running[bisect_left(self.running, seq.key, key=_key)]
        self.waiting.give_row(seq)
        self.columns.leave(seq)
        self._last_rows = []  # it may come back to another slot
        self._pages_at_limits -= self._full_pages(seq)
        self.num_row_pages -= len(seq.pages)
        if seq.last_step > self.last_done:
            insort(self._held, (seq.last_step, seq.slot, seq.pages))
        else:
            self._give_back(seq.slot, seq.pages)
        seq.slot, seq.adapter_slot, seq.pages = -1, 0, []
        seq.num_computed = seq.num_committed = seq.num_hit_pages = seq.num_stalls = 0
        seq.decoding = False

    def end_load(self, load: PageLoad) -> None:
        """Ends a row's wait for pages. The row goes on after the pages that have been written."""
        assert self.offloaded is not None
        seq = self.offloaded.end_load(load)
        if not load.num_written:
            return
        seq.num_hit_pages = load.first + load.num_written
        seq.num_computed = seq.num_hit_pages * self.page_size
        if not seq.num_preemptions:
            seq.num_loaded_tokens = seq.num_computed - seq.num_hit_tokens
            self.offloaded.counts.num_hit_tokens += seq.num_loaded_tokens
            seq.num_hit_tokens = seq.num_computed
        self.commit(seq)

    def _give_back(self, slot: int, pages: list[int]) -> None:
        self.pool.release(pages)
        self._free_slots.append(slot)
        self.adapters.give_back(slot)

    def _grow(self, seq: RequestState) -> tuple[RequestState, int]:
        """Gives the request one more page. Returns it with the page's index."""
        seq.pages += self.pool.allocate(1)
        self.num_row_pages += 1
        seq.num_stalls = 0
        return seq, len(seq.pages) - 1

    def _slots(self, rows: list[RequestState]) -> np.ndarray:
        """The slots i64[rows] of these rows. Most steps have the rows of the step before, so the last result is
        kept."""
        if rows != self._last_rows:
            self._last_rows, self._last_slots = rows, np.array([seq.slot for seq in rows])
        return self._last_slots

    # --- for tests and for recovery ---

    def recover(self) -> None:
        """The device has lost its state and no step is in flight: all running requests are recomputed."""
        assert self.last_done == self.last_step and not self._held
        for seq in reversed(list(self.running)):
            self.preempt(seq)
        self.pool.clear_cache()
        self.adapters.forget()
        if self.models is not None:
            self.models.forget()

    def check_integrity(self) -> None:
        """Raises AssertionError if slots, pages or queues are inconsistent."""
        holders = [seq.pages for seq in self.running] + [pages for _, _, pages in self._held]
        self.pool.check_integrity(holders)
        slots = [seq.slot for seq in self.running] + [slot for _, slot, _ in self._held]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots))
        assert all(seq.state is State.RUNNING for seq in self.running)
        assert all(a.key < b.key for a, b in pairwise(self.running))
        assert all(seq.state is State.WAITING for seq in self.waiting)
        self.waiting.check_integrity(self.running)
        if self.offloaded is not None:
            self.offloaded.check_integrity()
        self.adapters.check_integrity(self.running)
        if self.models is not None:
            self.models.check_integrity(self.running, [*self.waiting, *(self._held_back or {}).values()])
