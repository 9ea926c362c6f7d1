"""What the next step computes: iteration-level scheduling under a token budget. A pure function of its state.

The order of service is the key (priority, arrival rank), lower first; a preempted request keeps its rank.

1. Every decoding request gets its one token. One that needs a page when there is none stalls: it keeps what it has and
   waits for another request to end, at most `_MAX_STALLS` steps long, and never for a request of a lower priority.
   After that the request with the highest key is preempted: it gives up slot and pages and waits to be recomputed.
2. The rest of the budget goes to prompt chunks in the order of the key, of requests that run already or are admitted
   now. The chunk that computes the last of a request's tokens to compute emits its next token.
3. Admission is strictly in the order of the key (one exception: 4), and gives a request all the pages of its tokens
   to compute. It looks ahead: after it, the pages that all running requests are expected to hold, now and later
   (`forecast.py`), must fit the pool. Where nothing else runs the forecast is not asked: the pool holds at least one
   request of full length, so the first in line always gets on, and what is first in line is never preempted. Hence no
   deadlock and no starvation.
4. A request whose next missing prefix page is being computed in this very step waits for the next one, in which it will
   find it: of n samples of one prompt only the first computes it. That may let others pass it, at most once per page.
5. A request with a grammar is passed over until the mask of its next token is there; it then goes on where it was.
6. The last chunk is shortened to the next smaller bucket where the padding it would cause costs more than what its
   rest then costs a later step.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from enum import Enum
from itertools import pairwise
from operator import attrgetter

import numpy as np

from batcher.buckets import BucketLadder
from batcher.forecast import Forecast, Outlook, OutputForecast
from batcher.pages import PagePool, next_digest
from batcher.plan import Chunk, StepPlan
from batcher.sequence import Sequence, State
from batcher.step import Bucket, Capacity, Variant

_MAX_PASSED = 8  # requests that may be passed in one step, so that a long queue is not searched in each
_MAX_STALLS = 16  # steps; shorter than most recomputations, and short enough to be a hitch and no pause

_key: Callable[[Sequence], tuple[int, int]] = attrgetter("key")


class Verdict(Enum):
    """What admission decides for a waiting request."""

    ADMITTED = "it runs now"
    NO_ROOM = "it waits, and so do all requests after it"
    NEXT_STEP = "it waits for a page of this step; others may pass"
    NO_MASK = "it waits for its mask; others may pass"


class Scheduler:
    """Who runs and who waits, and their slots and pages. Not thread-safe: the engine's thread owns it."""

    _states_of_running: tuple[State, ...] = (State.RUNNING,)

    def __init__(
        self, capacity: Capacity, ladder: BucketLadder, *, prefix_caching: bool, step_cost_tokens: int
    ) -> None:
        if capacity.num_pages < capacity.pages_per_seq:
            raise ValueError(
                "the page pool must hold at least one request of full length: "
                f"{capacity.num_pages=} {capacity.pages_per_seq=}"
            )
        self.page_size = capacity.page_size
        self.max_model_len = capacity.max_model_len
        self.pool = PagePool(capacity.num_pages, capacity.page_size)
        self.ladder = ladder
        self.prefix_caching = prefix_caching
        self.step_cost_tokens = step_cost_tokens
        self.token_budget = ladder.config.max_num_batched_tokens
        self.max_stalls = _MAX_STALLS
        self.forecast: Forecast = OutputForecast(capacity.max_model_len)
        self.running: list[Sequence] = []  # sorted by key
        self.waiting: list[Sequence] = []  # sorted by key
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens, at first admissions only
        self.prefix_hits = 0
        self.last_step = -1  # the last step planned
        self.last_done = -1  # the last step that has returned
        self._free_slots = list(range(ladder.config.max_num_seqs - 1, -1, -1))
        self._outlook: Outlook | None = None  # of `running`, from the first admission of a step that asks for it
        self._num_arrivals = 0
        self._pages_at_limits = 0  # of the running requests if all of them come to their limits
        # (step, slot, pages) of requests that left while a step in flight still has a row of them; steps ascending
        self._held: list[tuple[int, int, list[int]]] = []

    # --- what the engine tells ---

    def add(self, sequence: Sequence) -> None:
        """A new request joins the queue."""
        sequence.arrival = self._num_arrivals
        sequence.key = (sequence.request.priority, sequence.arrival)
        self._num_arrivals += 1
        insort(self.waiting, sequence, key=_key)

    def finish(self, sequence: Sequence) -> None:
        """It ends now, wherever it stands. Its pages go back when no step in flight holds a row of it."""
        if sequence.state is State.RUNNING:
            self.commit(sequence)
            self._leave(sequence)
        elif sequence.state is State.WAITING:
            del self.waiting[bisect_left(self.waiting, sequence.key, key=_key)]
        sequence.state = State.FINISHED

    def step_returned(self, number: int) -> None:
        """Step `number` is over on the device; steps return in order."""
        self.last_done = number
        keep = 0
        for step, slot, pages in self._held:
            if step > number:
                break
            self._give_back(slot, pages)
            keep += 1
        del self._held[:keep]

    def commit(self, sequence: Sequence) -> None:
        """Makes those of its pages findable that are full of known, dispatched tokens."""
        if not self.prefix_caching or sequence.num_computed < sequence.commit_at:
            return
        count = min(sequence.num_computed, sequence.num_known) // self.page_size
        if count <= sequence.num_committed:
            return
        for i in range(sequence.num_committed, count):
            tokens = sequence.page_tokens(i, self.page_size)
            if i == len(sequence.digests):
                sequence.digests.append(next_digest(sequence.digests, tokens, sequence.request.cache_salt))
            self.pool.commit(sequence.pages[i], sequence.digests[i], tokens)
        sequence.num_committed = count
        sequence.commit_at = (count + 1) * self.page_size

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue, at its old rank. All it had computed is computed again, or found in the prefix cache."""
        self._leave(sequence)
        sequence.state = State.WAITING
        sequence.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, sequence, key=_key)

    # --- the next step ---

    def schedule(self) -> StepPlan | None:
        """The next step, or None where nothing can run before a step in flight returns (or at all)."""
        self._outlook = None
        singles, grown = self._decodes()
        chunks, admitted = self._prompts(self.token_budget - len(singles), len(singles))
        if not singles and not chunks:
            return None
        return self._plan(singles, chunks, admitted, grown)

    def _decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """The requests that decode in this step, each with a page to write to, and those that got a new page."""
        rows: list[Sequence] = []
        grown: list[Sequence] = []
        stalled: list[Sequence] = []
        running, page_size = self.running, self.page_size
        promised = 0  # pages of requests that stand still until a step in flight gives pages back
        i = 0
        while i < len(running):  # preemption shortens the list from its end
            seq = running[i]
            i += 1
            if not seq.decoding or seq.is_blocked or seq.num_emitted == seq.limit:
                continue
            if seq.num_computed == len(seq.pages) * page_size:
                if not self.pool.num_available and self._may_stall(seq):
                    seq.num_stalls += 1
                    stalled.append(seq)
                    continue
                if not self._make_room(seq, promised):
                    promised += seq.state is State.RUNNING
                    continue
                self._grow(seq)
                grown.append(seq)
            rows.append(seq)
        is_stuck = stalled and not rows and self.last_done == self.last_step
        if is_stuck and all(seq.decoding and not seq.is_blocked for seq in running):
            # No other request is left that could end: the first of them gets on at the expense of the last.
            self._make_room(stalled[0], 0)
            rows = [seq for seq in stalled if seq.state is State.RUNNING][: self.pool.num_available]
            for seq in rows:
                self._grow(seq)
            grown = list(rows)
        return rows, grown

    def _may_stall(self, seq: Sequence) -> bool:
        return seq.num_stalls < self.max_stalls and self.running[-1].request.priority <= seq.request.priority

    def _grow(self, seq: Sequence) -> None:
        seq.pages += self.pool.allocate(1)
        seq.num_stalls = 0

    def _make_room(self, sequence: Sequence, promised: int) -> bool:
        """Whether there is a page for it now. Preempts from the end of the line, it included, until there is one
        or until enough of them are known to come back with the steps in flight."""
        while not self.pool.num_available:
            coming = sum(self.pool.num_held_once(pages) for _, _, pages in self._held)
            if coming > promised:
                return False
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def _prompts(self, budget: int, num_rows: int) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Prompt chunks (sequence, tokens) within the budget, and the requests admitted for them."""
        chunks: list[tuple[Sequence, int]] = []
        admitted: list[Sequence] = []
        started = [seq for seq in self.running if not seq.decoding and not seq.is_blocked]
        in_this_step: set[bytes] = set()  # digests of the pages that the chunks will have filled
        position, open_ = 0, bool(self.waiting)
        while budget > 0:
            seq = started[0] if started else None
            if open_ and (seq is None or self.waiting[position].key < seq.key):
                seq = self.waiting[position]
                verdict = self._admit(seq, in_this_step)
                position += verdict in (Verdict.NEXT_STEP, Verdict.NO_MASK)
                open_ = verdict is not Verdict.NO_ROOM and position < min(len(self.waiting), _MAX_PASSED)
                if verdict is not Verdict.ADMITTED:
                    continue
                admitted.append(seq)
            elif seq is None:
                break
            else:
                started.pop(0)
            count = min(len(seq.to_compute) - seq.num_computed, budget)
            budget -= count
            chunks.append((seq, count))
            if self.prefix_caching:
                first, last = seq.num_computed // self.page_size, (seq.num_computed + count) // self.page_size
                in_this_step.update(seq.digests[first:last])
        if chunks:
            self._trim(chunks, num_rows)
        return chunks, admitted

    def _admit(self, seq: Sequence, in_this_step: set[bytes]) -> Verdict:
        """Lets a waiting request in if there is room for it."""
        if not self._free_slots or seq.last_step > self.last_done:  # one preempted in flight: its token is on the way
            return Verdict.NO_ROOM
        if seq.is_blocked:
            return Verdict.NO_MASK
        known = seq.tokens()
        hits: list[int] = []
        if self.prefix_caching:
            for i in range(len(seq.digests), len(known) // self.page_size):
                page = known[i * self.page_size : (i + 1) * self.page_size]
                seq.digests.append(next_digest(seq.digests, page, seq.request.cache_salt))
            if not seq.wants_prompt_logprobs:
                usable = seq.digests[: (len(known) - 1) // self.page_size]  # the last token is always computed
                hits = self.pool.find(usable, known)
                if len(hits) < len(usable) and usable[len(hits)] in in_this_step:
                    return Verdict.NEXT_STEP
        num_new = -(-seq.num_known // self.page_size) - len(hits)
        seq.num_hit_pages = len(hits)
        if not self._has_room(seq, num_new, self.pool.num_reusable_among(hits)):
            return Verdict.NO_ROOM
        self._enter(seq, known, hits, num_new)
        return Verdict.ADMITTED

    def _full_pages(self, seq: Sequence) -> int:
        """Its pages when it has come to its limit; the last token of all is never stored."""
        return -(-(seq.num_prompt + seq.limit - 1) // self.page_size)

    def _has_room(self, seq: Sequence, num_new: int, num_revived: int) -> bool:
        """Whether the pool is expected to last if `seq` gets `num_new` pages and revives `num_revived` others."""
        if num_new + num_revived > self.pool.num_available:
            return False
        everybody_to_the_limit = self._pages_at_limits + self._full_pages(seq)
        if not self._held and (not self.running or everybody_to_the_limit <= self.pool.num_pages):
            return True
        # Pages found in the prefix cache may have other holders: they are taken to stay in use to the end.
        num_own = sum(len(s.pages) - s.num_hit_pages for s in self.running)
        if self._outlook is None:
            self._outlook = self.forecast.outlook(self.running, self.page_size)
        return self._outlook.fits(seq, self.pool.num_pages - (self.pool.num_used + num_revived - num_own))

    def _enter(self, seq: Sequence, known: np.ndarray, hits: list[int], num_new: int) -> None:
        self.pool.acquire(hits)
        seq.pages = hits + self.pool.allocate(num_new)
        seq.slot = self._free_slots.pop()
        seq.to_compute = known
        seq.num_computed = len(hits) * self.page_size
        seq.num_committed = len(hits)
        seq.commit_at = (len(hits) + 1) * self.page_size
        seq.decoding = False
        if not seq.num_preemptions:
            seq.num_hit_tokens = seq.num_computed
            if self.prefix_caching and not seq.wants_prompt_logprobs:
                self.prefix_queries += seq.num_prompt
                self.prefix_hits += seq.num_hit_tokens
        seq.state = State.RUNNING
        del self.waiting[bisect_left(self.waiting, seq.key, key=_key)]
        insort(self.running, seq, key=_key)
        self._pages_at_limits += self._full_pages(seq)
        if self._outlook is not None:
            self._outlook.add(seq)

    def _leave(self, seq: Sequence) -> None:
        """Out of `running`; slot and pages go back at once, or with the last step that has a row of it."""
        del self.running[bisect_left(self.running, seq.key, key=_key)]
        self._pages_at_limits -= self._full_pages(seq)
        if seq.last_step > self.last_done:
            insort(self._held, (seq.last_step, seq.slot, seq.pages))
        else:
            self._give_back(seq.slot, seq.pages)
        seq.slot, seq.pages = -1, []
        seq.num_computed = seq.num_committed = seq.num_hit_pages = seq.num_stalls = 0
        seq.decoding = False

    def _give_back(self, slot: int, pages: list[int]) -> None:
        self.pool.release(pages)
        self._free_slots.append(slot)

    def _trim(self, chunks: list[tuple[Sequence, int]], num_decodes: int) -> None:
        """Shortens the last chunk where that saves padding."""
        seq, count = chunks[-1]
        more_to_come = bool(self.waiting) or len(seq.to_compute) > seq.num_computed + count
        rest = self.ladder.better_left(
            num_decodes + sum(c for _, c in chunks),
            next_decodes=None if more_to_come else len(self.running) - 1,
            step_cost_tokens=self.step_cost_tokens,
        )
        if rest < count:
            chunks[-1] = (seq, count - rest)

    def _plan(
        self,
        decodes: list[Sequence],
        chunks: list[tuple[Sequence, int]],
        admitted: list[Sequence],
        grown: list[Sequence],
    ) -> StepPlan:
        self.last_step += 1
        number = self.last_step
        ones = [seq for seq, count in chunks if count == 1]
        longer = [chunk for chunk in chunks if chunk[1] > 1]
        rows = [*decodes, *ones, *(seq for seq, _ in longer)]
        q_lens = [1] * (len(decodes) + len(ones)) + [count for _, count in longer]
        emits = [1] * len(decodes)
        listed: list[Chunk] = []
        masks: list[tuple[Sequence, np.ndarray]] = []
        sampling = scoring = False
        for seq in decodes:
            seq.num_computed += 1
            seq.num_emitted += 1
            seq.last_step = number
            sampling = sampling or seq.needs_sampling
            if seq.mask is not None:
                masks.append((seq, seq.take_mask()))
        num_tokens = len(decodes)
        for row in range(len(decodes), len(rows)):
            seq, count = rows[row], q_lens[row]
            listed.append(Chunk(row, num_tokens, seq.num_computed, count))
            num_tokens += count
            seq.num_computed += count
            seq.last_step = number
            scoring = scoring or seq.wants_prompt_logprobs
            seq.decoding = seq.num_computed == len(seq.to_compute)
            emits.append(int(seq.decoding))
            if seq.decoding:
                seq.num_emitted += 1
                sampling = sampling or seq.needs_sampling
                if seq.mask is not None:
                    masks.append((seq, seq.take_mask()))
            self.commit(seq)
        variant = Variant.SCORE if scoring else Variant.SAMPLE if sampling else Variant.GREEDY
        return StepPlan(
            number=number,
            bucket=self._bucket(num_tokens, len(rows), decode_only=not longer, variant=variant),
            rows=rows,
            q_lens=q_lens,
            emits=emits,
            num_singles=len(decodes) + len(ones),
            num_tokens=num_tokens,
            chunks=listed,
            admitted=admitted,
            masks=masks,
            grown=grown,
        )

    def _bucket(self, num_tokens: int, num_rows: int, *, decode_only: bool, variant: Variant) -> Bucket:
        return self.ladder.choose(num_tokens, num_rows, decode_only=decode_only, variant=variant)

    # --- for tests and for recovery ---

    def recover(self) -> None:
        """The device lost its state and no step is in flight: everything running is to be recomputed."""
        assert self.last_done == self.last_step and not self._held
        for seq in reversed(list(self.running)):
            self.preempt(seq)
        self.pool.clear_cache()

    def check_integrity(self) -> None:
        """AssertionError where slots, pages or queues are not consistent."""
        holders = [seq.pages for seq in self.running] + [pages for _, _, pages in self._held]
        self.pool.check_integrity(holders)
        slots = [seq.slot for seq in self.running] + [slot for _, slot, _ in self._held]
        assert sorted(slots + self._free_slots) == list(range(self.ladder.config.max_num_seqs))
        for queue, states in ((self.running, self._states_of_running), (self.waiting, (State.WAITING,))):
            assert all(seq.state in states for seq in queue)
            assert all(a.key < b.key for a, b in pairwise(queue))
