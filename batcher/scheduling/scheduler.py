"""Plans the next step: iteration-level scheduling under a token budget. The plan depends on the scheduler's state only.

Waiting requests are admitted in the order of `fair_queue.py`: by priority, then by the rows that their clients and
groups hold, then by arrival. Running requests are served in the order of their key (level, quanta of their group at
admission, arrival rank), lowest first. Preemption changes neither priority nor arrival.

1. Every decoding request gets one token. A request stalls when it needs a page and none is available: it keeps its slot
   and pages and waits for another request to end. It stalls for at most `_MAX_STALLS` steps in a row, and only if no
   running request has a lower priority. Otherwise the running request with the highest key is preempted: it gives up
   its slot and pages, returns to the queue and is recomputed later.
2. The rest of the budget goes to prompt chunks, in the order of the key. The chunks belong to requests that are already
   running or are admitted in this step. The chunk that completes a request's `to_compute` emits its next token.
3. Admission is in the order of the queue (exceptions: 4, 5 and 9). A request gets all pages of its tokens to
   compute. The pages that all running requests are expected to hold, now and later (`forecast.py`), must fit the pool.
   When nothing else runs, the forecast is skipped: the pool holds at least one request of full length. So the first
   request in the queue is eventually admitted, and the running request with the lowest key is never preempted for
   pages. Hence there is no deadlock and no starvation.
4. A request waits one step if this step computes its next missing prefix page. In the next step it finds that page in
   the prefix cache: of n samples of one prompt, only the first computes it. Other requests may pass it in the meantime,
   at most once per page.
5. A request with a grammar is skipped until the mask of its next token is computed. It keeps its place.
6. The last chunk is shortened to the next smaller bucket if this saves more padding than its rest costs later.
7. If the first request in the queue finds no room or no time, and `fair_queue.py` names a running request of a client
   or a group that holds more rows, that request is preempted. Its full pages stay in the prefix cache, so little is
   recomputed.
8. In a step without prompts, a row may have drafts (`speculation.py`). The request's limit and the available pages
   bound their number.
9. A request whose LoRA adapter waits for an adapter slot is skipped. It keeps its place. `adapter_slots.py` limits how
    often it is passed.
10. A request whose pages come from the host's memory or from a store is admitted, and computes nothing until they have
    arrived (`offloading.py`).
11. With several models, all rows of a step are of one, which `model_turns.py` chooses. The rules above then hold among
    its requests, but preemption takes the highest key of all models. Requests of others are skipped and keep their
    place. After the first request that finds no room in its model's turn, no request of any model is admitted.
12. If requests have latency targets, `targets.py` limits the tokens of prompts in a step, orders prompts, and may let a
    row wait. Without targets there is no such policy.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from enum import Enum
from itertools import islice
from typing import Any

import numpy as np

from batcher.buckets import BucketLadder
from batcher.config import EngineConfig
from batcher.request import Pooling, Targets
from batcher.scheduling.digests import add_digests
from batcher.scheduling.model_turns import ModelTurns
from batcher.scheduling.offloading import OffloadedPages
from batcher.scheduling.request_queues import RequestQueues
from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.speculation import Drafts
from batcher.scheduling.step_plan import Chunk, StepPlan
from batcher.scheduling.targets import LAST_FIRST, MOST_BEHIND, USUAL_TTFT_S, Begun, StepPolicy, begun_of, turn_of
from batcher.step import Bucket, Capacity, Variant

# The most waiting requests that one step tries to admit in vain. It bounds the work for a long queue. Requests that
# wait for their adapters do not count: the try is short, and they are not tried again until something has changed for
# them.
_MAX_PASSED = 8
_MAX_STALLS = 16  # steps in a row: less time than most recomputations, and a short delay for the client


class Verdict(Enum):
    """What admission decides for a waiting request."""

    ADMITTED = "it runs now"
    NO_ROOM = "it waits, and so do all requests after it"
    LOADING = "it runs now, and waits for pages that come back to the device"
    NEXT_STEP = "it waits for a page of this step, or one that is on its way; others may pass"
    PROMISED = "it waits for a slot that a step in flight will release; others are looked at"
    NOT_READ = "it waits until its last token is read, and so do all requests after it"
    NO_MASK = "it waits for its mask; others may pass"
    NO_ADAPTER = "it waits for its LoRA adapter; others may pass"
    NO_MODEL = "it waits for a turn of its model; others may pass"
    NO_TIME = "it waits until a step has time for one more row, and so do all requests after it"
    LATE = "its first token would come too late: it goes on after the others, or is refused"


class Scheduler(RequestQueues):
    """Plans the steps of the requests that run and wait. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        capacity: Capacity,
        ladder: BucketLadder,
        config: EngineConfig,
        drafts: Drafts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(capacity, ladder.config.max_num_seqs, clock, prefix_caching=config.prefix_caching)
        if config.offloading is not None:
            self.offloaded = OffloadedPages(config.offloading, capacity, self.pool, clock)
            self.pool.observers.append(self.offloaded)
        self.drafts = drafts
        self.max_model_len = capacity.max_model_len
        self.ladder = ladder
        self.step_cost_tokens = config.step_cost_tokens
        self.token_budget = ladder.config.max_num_batched_tokens
        self.max_stalls = _MAX_STALLS
        self._without_room: RequestState | None = None  # the first in the queue for which the last step had no room
        self._lacks_pages = False  # there was a free slot for it, so it lacked pages
        self._lacks_time = False  # there was room for it, but no time (rule 12)
        self._num_promised = 0  # slots that steps in flight will release to requests before it
        self._mine = self.running  # the running requests of the model whose step is planned
        self._barrier: RequestState | None = None  # the request of rule 11; only with several models
        self._config = config
        self._clock = clock
        self.policy: StepPolicy | None = None  # of rule 12; made for the first request with a target
        self._strictest_s = math.inf  # the ITL target of the step that is planned
        self.late: dict[RequestState, int] = {}  # waiting requests to refuse -> seconds after which to try again

    def _take_targets(self, sequence: RequestState) -> None:
        request, config = sequence.request, self._config
        sequence.targets = None if request.is_flex or sequence.pooling else request.targets or config.targets
        if self.policy is None:
            if sequence.targets is None:
                return
            percentile = (config.targets or Targets()).percentile
            self.policy = StepPolicy(config.step_estimate, self.ladder, percentile)
        ttft_s = sequence.ttft_s
        sequence.order = (sequence.arrived_s + (USUAL_TTFT_S if ttft_s is None else ttft_s), sequence.arrival)
        if ttft_s is not None and self.models is not None:
            self.models.expect(sequence)
        if not config.refuses_late or ttft_s is None:
            return
        if (wait_s := self.policy.wait_s(sequence, self.waiting)) > ttft_s:
            self.late[sequence] = math.ceil(wait_s - ttft_s)

    def take_late(self) -> list[tuple[RequestState, int]]:
        """The waiting requests to refuse, with the seconds after which to try again."""
        late, self.late = self.late, {}
        return [(seq, seconds) for seq, seconds in late.items() if seq.state is State.WAITING]

    def schedule(self) -> StepPlan | None:
        """The plan of the next step, or None if nothing can run now."""
        self._outlook = None
        if self.offloaded is not None:
            self.offloaded.save_ahead()
        self._exchange_rows()
        if self.models is None:
            return self._plan(0)
        for model in self._turns(self.models):
            self._mine = [seq for seq in self.running if seq.request.model == model]
            self.waiting.put_back((Verdict.NO_MODEL, model))
            plan = self._plan(model)
            if plan is not None:
                plan.model = model
                self.models.took(model, plan.number)
                return plan
        is_under_way = self.last_done < self.last_step or any(seq.is_blocked or seq.load for seq in self.running)
        self.models.none_can_run(for_long=not is_under_way)
        return None

    def _turns(self, models: ModelTurns) -> list[int]:
        """The models that may have this step, the first one first."""
        if (policy := self.policy) is None:
            return models.order()
        return models.order(policy.usual_s, lambda model: policy.strictest(self.columns.itl_targets(model)))

    def _plan(self, model: int) -> StepPlan | None:
        """The plan of a step of this model; None: it can compute nothing now."""
        singles, grown = self._decodes()
        chunks, admitted = self._prompts(self.token_budget - len(singles), len(singles), model)
        if not singles and not chunks:
            return None
        return self._plan_ones(singles, chunks, admitted, grown) if chunks else self._plan_decodes(singles, grown)

    def _exchange_rows(self) -> None:
        """Preempts a running request by rule 7, for the first request that found no room in the last step."""
        seq, self._without_room = self._without_room, None
        if seq is None or seq.state is not State.WAITING or not self.may_start:
            return
        if self._free_slots:
            is_coming = bool(self._held) or not (self._lacks_pages or self._lacks_time)
        else:
            is_coming = len(self._held) > self._num_promised
        if not is_coming and (giver := self.waiting.giver(seq, of_last=self._lacks_time)) is not None:
            self.preempt(giver)

    def _decodes(self) -> tuple[list[RequestState], list[tuple[RequestState, int]]]:
        """The requests that decode in this step, each with a page to write to, and the new pages (`StepPlan.grown`)."""
        rows: list[RequestState] = []
        grown: list[tuple[RequestState, int]] = []
        stalled: list[RequestState] = []
        running, page_size = self._mine, self.page_size
        promised = 0  # pages for requests that wait for a step in flight to release pages
        i = 0
        while i < len(running):  # preemption shortens the list from its end
            seq = running[i]
            i += 1
            if not seq.decoding or seq.is_blocked or seq.num_emitted == seq.limit:
                continue
            if seq.num_computed == len(seq.pages) * page_size:
                may_stall = (
                    seq.num_stalls < self.max_stalls and self.running[-1].request.priority <= seq.request.priority
                )
                if not self.pool.num_available and may_stall:
                    seq.num_stalls += 1
                    stalled.append(seq)
                    continue
                if not self._make_room(seq, promised):
                    promised += seq.state is State.RUNNING
                    continue
                grown.append(self._grow(seq))
            rows.append(seq)
        is_stuck = stalled and not rows and self.last_done == self.last_step
        if is_stuck and all(seq.decoding and not seq.is_blocked for seq in self.running):
            # No other request can end and release pages, so the last request is preempted for the first.
            self._make_room(stalled[0], 0)
            rows = [seq for seq in stalled if seq.state is State.RUNNING][: self.pool.num_available]
            grown = [self._grow(seq) for seq in rows]
        return rows, grown

    def _make_room(self, sequence: RequestState, promised: int) -> bool:
        """Makes a page available for `sequence`. Returns whether there is one now.

        It preempts requests from the end of `running`, which may include `sequence`. It stops when a page is available,
        or when steps in flight will release enough pages.
        """
        while not self.pool.num_available:
            coming = sum(self.pool.num_held_once(pages) for _, _, pages in self._held)
            if coming > promised:
                return False
            victim = self.running[-1]
            self.preempt(victim)
            if self._mine and self._mine[-1] is victim:  # the step's rows are a list of their own
                self._mine.pop()
            if victim is sequence:
                return False
        return True

    def _prompts(
        self, budget: int, num_rows: int, model: int
    ) -> tuple[list[tuple[RequestState, int]], list[RequestState]]:
        """The prompt chunks (sequence, number of tokens) within the budget, and the requests that are admitted."""
        chunks: list[tuple[RequestState, int]] = []
        admitted: list[RequestState] = []
        started = [seq for seq in self._mine if not seq.decoding and not seq.is_blocked and seq.load is None]
        in_this_step: set[bytes] = set()  # digests of the pages that this step's chunks fill
        num_passed = self._num_promised = 0
        is_full = False
        if self._barrier is not None and self._barrier.request.model == model:
            self._barrier = None
        for adapter in self.adapters.to_look_at_again():
            self.waiting.put_back(adapter)
        costs, cost_left = None, 0.0  # of chunks, where a target limits the step
        last_first = (self.last_step + 1) % LAST_FIRST == 0
        if last_first and self.policy is not None:
            have_last = self.waiting.have_last or any(seq.is_last for seq in started)
            last_first = self.policy.lets_last_first(self._clock(), have_last=have_last)
        if self.policy is not None or last_first:
            started.sort(key=lambda seq: self._turn(seq, last_first=last_first))
        if self.policy is not None and (started or self.waiting):
            self._strictest_s = self.policy.strictest(self.columns.itl_targets())
            past = started[0].num_computed if started else 0
            share_held = self.pool.num_used / self.pool.num_pages
            most = self.policy.prompt_tokens(num_rows, self.kv_tokens, self._strictest_s, past, share_held, model)
            if num_rows and self._strictest_s < math.inf:
                costs, budget, cost_left = self.policy, most, self.policy.chunk_cost(past, most)
            if not budget and (head := self.waiting.first()) is not None:
                self._without_room, self._lacks_time = head, True
        begun = [] if self.policy is None else [begun_of(seq) for seq in started]  # and those that are admitted below
        while budget > 0:
            seq = started[0] if started else None
            head = None if is_full or num_passed == _MAX_PASSED else self.waiting.first(last_first=last_first)
            if head is not None and (
                seq is None or self._turn(head, last_first=last_first) < self._turn(seq, last_first=last_first)
            ):
                seq = head
                if seq.request.model != model:
                    is_full = seq is self._barrier
                    if not is_full:
                        self.waiting.set_aside(seq, (Verdict.NO_MODEL, seq.request.model))
                    continue
                verdict = self._admit(seq, in_this_step, begun)
                if verdict in (Verdict.NO_ROOM, Verdict.NO_TIME, Verdict.NOT_READ):
                    is_full = True
                    if verdict is not Verdict.NOT_READ:
                        self._without_room, self._lacks_time = seq, verdict is Verdict.NO_TIME
                        self._lacks_pages = bool(self._free_slots) and not self._lacks_time
                    if verdict is Verdict.NO_ROOM and self.models is not None:
                        self._barrier = seq
                elif verdict is Verdict.NO_ADAPTER:
                    self.waiting.set_aside(seq, seq.request.adapter)
                elif verdict is Verdict.LATE:
                    self._demote(seq)
                elif verdict not in (Verdict.ADMITTED, Verdict.LOADING):
                    self.waiting.set_aside(seq, Verdict.NEXT_STEP)
                    num_passed += 1
                if verdict is not Verdict.ADMITTED:
                    continue
                if self.policy is not None:
                    begun.append(begun_of(seq))
            elif seq is None:
                break
            else:
                started.pop(0)
            count = min(len(seq.to_compute) - seq.num_computed, budget)
            if costs is not None:
                count = costs.chunk_within(cost_left, seq.num_computed, count)
                if count == 0:
                    if chunks:
                        break
                    count = 1
                cost_left -= costs.chunk_cost(seq.num_computed, count)
            budget -= count
            chunks.append((seq, count))
            if seq.is_new:
                seq.is_new = False
                admitted.append(seq)
            if self.prefix_caching:
                first, last = seq.num_computed // self.page_size, (seq.num_computed + count) // self.page_size
                in_this_step.update(seq.digests[first:last])
        self.waiting.put_back(Verdict.NEXT_STEP)
        if chunks:
            self._trim(chunks, num_rows)
        return chunks, admitted

    def _turn(self, seq: RequestState, *, last_first: bool) -> tuple[Any, ...]:
        """The place of a request in the order of prompts."""
        if self.policy is not None:
            return turn_of(seq, last_first=last_first)
        level, *rest = seq.key if seq.state is State.RUNNING else self.waiting.key(seq)
        return (level ^ last_first, *rest)

    def _demote(self, seq: RequestState) -> None:
        """Lets a late request go last, or has it refused."""
        self._wait_no_longer(seq)
        seq.is_last = True
        self._wait(seq)
        if self._config.refuses_late and not seq.num_preemptions:
            self.waiting.set_aside(seq, Verdict.LATE)
            self.late[seq] = 1

    @property
    def kv_tokens(self) -> int:
        """The tokens whose K/V the running requests of the step's model hold, shared ones counted for each."""
        pages = self.num_row_pages if self.models is None else sum(len(seq.pages) for seq in self._mine)
        return pages * self.page_size

    def _in_time(self, policy: StepPolicy, seq: RequestState, begun: list[Begun]) -> Verdict | None:
        """Whether rule 12 keeps a waiting request from being admitted now. `begun`: the prompts that are computed."""
        left = seq.num_known - len(seq.prefix.pages) * self.page_size
        slack_s = math.inf if seq.is_last else policy.slack_s(seq, left, begun, self._clock())
        if slack_s < 0:
            return Verdict.LATE
        kv_tokens, strictest_s = self.kv_tokens + seq.num_known, self._strictest_s
        if not seq.is_last:
            strictest_s = min(strictest_s, policy.strictest([seq.itl_s]))
        is_urgent = slack_s < policy.step_s
        if not policy.may_enter(len(self.running), kv_tokens, strictest_s, is_urgent=is_urgent):
            return Verdict.NO_TIME
        if slack_s < math.inf and policy.makes_late(seq, left, slack_s, islice(self.waiting.behind(seq), MOST_BEHIND)):
            return Verdict.LATE
        return None

    def _admit(self, seq: RequestState, in_this_step: set[bytes], begun: list[Begun]) -> Verdict:
        """Admits a waiting request if there is room for it. `begun` are the prompts that are computed, if there is a
        policy."""
        if seq.last_step > self.last_done:  # preempted in flight
            return Verdict.NOT_READ
        if seq.is_blocked:
            return Verdict.NO_MASK
        if not self.adapters.may_enter(seq):
            return Verdict.NO_ADAPTER
        prefix, usable = seq.prefix, 0
        if self.prefix_caching:
            add_digests(seq, self.page_size)
            if not seq.needs_every_position:
                usable = (seq.num_known - 1) // self.page_size  # the last token is always computed
                self.pool.extend(prefix, seq.digests, usable, lambda page: seq.page_bytes(page, self.page_size))
                missing = seq.digests[len(prefix.pages)] if len(prefix.pages) < usable else b""
                is_loading = self.offloaded is not None and self.offloaded.is_loading(missing)
                if missing in in_this_step or is_loading:
                    return Verdict.NEXT_STEP
        if self.policy is not None and (verdict := self._in_time(self.policy, seq, begun)) is not None:
            return verdict
        if not self._free_slots:
            if self._num_promised == len(self._held):
                return Verdict.NO_ROOM
            self._num_promised += 1
            return Verdict.PROMISED
        num_new = -(-seq.num_known // self.page_size) - len(prefix.pages)
        seq.num_hit_pages = len(prefix.pages)
        if not self._has_room(seq, num_new, prefix.num_reusable):
            return Verdict.NO_ROOM
        first = len(prefix.pages)
        away = [] if self.offloaded is None else self.offloaded.find(seq, first, usable)
        self._enter(seq, num_new)
        if self.offloaded is not None and not seq.num_preemptions:
            self.offloaded.counts.num_query_tokens += seq.num_prompt - seq.num_hit_tokens
        if self.offloaded is None or not away:
            return Verdict.ADMITTED
        self.offloaded.load(seq, first, away)
        return Verdict.LOADING

    def _has_room(self, seq: RequestState, num_new: int, num_revived: int) -> bool:
        """Whether the pool is expected to suffice if `seq` gets `num_new` pages and reuses `num_revived` others."""
        if num_new + num_revived > self.pool.num_available:
            return False
        everybody_to_the_limit = self._pages_at_limits + self._full_pages(seq)
        if not self._held and (not self.running or everybody_to_the_limit <= self.pool.num_pages):
            return True
        # Pages found in the prefix cache may have other holders, so they are assumed to stay in use.
        num_own = sum(len(s.pages) - s.num_hit_pages for s in self.running)
        if self._outlook is None:
            self._outlook = self.forecast.outlook(self.running, self.page_size)
        return self._outlook.fits(seq, self.pool.num_pages - (self.pool.num_used + num_revived - num_own))

    def _trim(self, chunks: list[tuple[RequestState, int]], num_decodes: int) -> None:
        """Shortens the last chunk if that saves padding (rule 6)."""
        seq, count = chunks[-1]
        more_to_come = bool(self.waiting) or len(seq.to_compute) > seq.num_computed + count
        rest = self.ladder.better_left(
            num_decodes + sum(c for _, c in chunks),
            next_decodes=None if more_to_come else len(self.running) - 1,
            step_cost_tokens=self.step_cost_tokens,
        )
        if rest < count:
            chunks[-1] = (seq, count - rest)

    def _plan_decodes(self, decodes: list[RequestState], grown: list[tuple[RequestState, int]]) -> StepPlan:
        """The step of decodes only. Rows may have drafts by rule 8."""
        drafts = None
        if self.drafts is not None:
            has_adapters = self._have_adapters(decodes)
            drafts = self.drafts.choose(decodes, self.last_step + 1, has_adapters=has_adapters)
        if drafts is None or not self._keeps_targets(drafts.bucket):
            return self._plan_ones(decodes, [], [], grown)
        q_lens = {seq: self._fit(seq, 1 + count, grown) for seq, count in drafts.counts.items()}
        if any(q_len > 1 for q_len in q_lens.values()):
            return self._plan_drafts([(seq, q_lens.get(seq, 1)) for seq in decodes], drafts.bucket, grown)
        plan = self._plan_ones(decodes, [], [], grown)
        plan.looks_up = drafts.looks_up
        return plan

    def _keeps_targets(self, bucket: Bucket) -> bool:
        """Whether a step of decodes with this bucket keeps the strictest target."""
        if self.policy is None:
            return True
        strictest_s = self.policy.strictest(self.columns.itl_targets())
        return self.policy.has_time(bucket.num_tokens, bucket.num_rows, self.kv_tokens, strictest_s)

    def _fit(self, seq: RequestState, most: int, grown: list[tuple[RequestState, int]]) -> int:
        """The number of tokens that a row computes, at most `most`. They are within the request's limit, and within
        pages that are available now, so no other request is preempted for them."""
        most = min(most, seq.limit - seq.num_emitted)
        while seq.num_computed + most > len(seq.pages) * self.page_size and self.pool.num_available:
            grown.append(self._grow(seq))
        return min(most, len(seq.pages) * self.page_size - seq.num_computed)

    def _plan_drafts(
        self, rows: list[tuple[RequestState, int]], bucket: Bucket, grown: list[tuple[RequestState, int]]
    ) -> StepPlan:
        """The step of these rows (request, number of tokens). Rows of one token come first."""
        self.last_step += 1
        rows = [row for row in rows if row[1] == 1] + [row for row in rows if row[1] > 1]
        plan = StepPlan(
            number=self.last_step,
            bucket=bucket,
            rows=[seq for seq, _ in rows],
            slots=np.array([seq.slot for seq, _ in rows]),
            q_lens=[q_len for _, q_len in rows],
            emits=[1] * len(rows),
            num_singles=sum(q_len == 1 for _, q_len in rows),
            num_tokens=sum(q_len for _, q_len in rows),
            grown=grown,
        )
        for seq, q_len in rows:
            seq.num_computed += q_len
            seq.num_emitted += q_len
            seq.last_step = plan.number
            if seq.mask is not None:
                plan.masks.append((seq, seq.take_mask()))
        return plan

    def _plan_ones(
        self,
        decodes: list[RequestState],
        chunks: list[tuple[RequestState, int]],
        admitted: list[RequestState],
        grown: list[tuple[RequestState, int]],
    ) -> StepPlan:
        """The step in which each decoding row draws one token. `chunks` are prompt chunks (request, number of
        tokens)."""
        self.last_step += 1
        number = self.last_step
        ones = [seq for seq, count in chunks if count == 1]
        longer = [chunk for chunk in chunks if chunk[1] > 1]
        rows = [*decodes, *ones, *(seq for seq, _ in longer)]
        q_lens = [1] * (len(decodes) + len(ones)) + [count for _, count in longer]
        emits = [1] * len(decodes)
        listed: list[Chunk] = []
        masks: list[tuple[RequestState, np.ndarray]] = []
        sampling = scoring = embedding = False
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
            embedding = embedding or seq.pooling is Pooling.MEAN or (seq.pooling is Pooling.LAST and seq.decoding)
            emits.append(int(seq.decoding))
            if seq.decoding:
                seq.num_emitted += 1
                sampling = sampling or seq.needs_sampling
                if seq.mask is not None:
                    masks.append((seq, seq.take_mask()))
            self.commit(seq)
        asked = ((embedding, Variant.EMBED), (scoring, Variant.SCORE), (sampling, Variant.SAMPLE))
        variant = next((variant for is_asked, variant in asked if is_asked), Variant.GREEDY)
        return StepPlan(
            number=number,
            bucket=self.ladder.choose(
                num_tokens,
                len(rows),
                decode_only=not longer,
                variant=variant,
                has_adapters=self._have_adapters(rows),
            ),
            rows=rows,
            slots=self._slots(rows),
            q_lens=q_lens,
            emits=emits,
            num_singles=len(decodes) + len(ones),
            num_tokens=num_tokens,
            chunks=listed,
            admitted=admitted,
            adapters=self.adapters.take_writes(),
            masks=masks,
            grown=grown,
        )

    def _have_adapters(self, rows: list[RequestState]) -> bool:
        """Whether one of the rows has an adapter."""
        return self.adapters.has_rows and any(seq.adapter_slot for seq in rows)
