"""Latency targets: how much of each step prompts get, in which order requests are served, and who is late.

A request may have a target for the time to its first token (TTFT) and one for each gap between two tokens (ITL).

1. The time of a step with decodes is predicted. The prediction, with a margin for its error, must be within the
   shortest ITL target of the running requests. Prompts get the tokens of the largest program that is. They get the
   whole budget if nothing decodes, or no running request has an ITL target. Each gap counts by itself: a token that
   comes early does not let the next one come late. If prompts have had no token for `1 / (1 - percentile) - 1` steps,
   99 at the 99th percentile, they get the whole budget in the next step, however long it takes. So no prompt starves,
   and the percentile is still kept. With several models, each counts its own steps. A target that is shorter than the
   smallest step with a prompt limits no step, because it would stop all prompts. In longer steps requests also hold
   their pages longer: the pages in use grow in proportion to the mean time of a step. Where decodes have a target, a
   program may run if the pages in use would not exceed `_PAGES_HELD` of all pages with all steps as long as it.
   Programs that take hardly longer than the smallest one with a prompt may always run.
2. Within one priority, requests that can still keep their TTFT go first, in the order of the latest time of their first
   tokens. `fair_queue.py` still shares rows among clients. A request without a TTFT target takes its place as if it had
   one of `USUAL_TTFT_S`, and is never late.
3. A request that cannot keep its TTFT any more is late. If a client's waiting requests cannot all be in time, the
   longest prompt of those up to the first late one is late in its place, so as few as possible are (Moore and Hodgson's
   algorithm, whenever a request would be admitted). Late and `flex` requests go after all others of their priority,
   limit no step, and give their rows to others while they hold more than an eighth of all rows. When some have waited
   for `USUAL_TTFT_S`, they go first in every `LAST_FIRST`-th step, with their rows and their chunks, so the others
   cannot starve them. In a shorter overload they get no such step, because it would make others late.
4. A row is admitted if the decode step with it keeps the strictest target, its own included, with the margin. If its
   own TTFT would be missed otherwise, the margin is not added. A row is always admitted if no other one runs.
5. The wait in the queue is forecast from the prompt tokens before a request and from those that were admitted per
   second while requests waited.

The file has no clock. All times are seconds of the engine's clock, which are handed in.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heappush, heapreplace
from typing import NamedTuple

import numpy as np

from batcher.buckets import BucketLadder
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import StepPlan
from batcher.step_times import StepEstimate

type Turn = tuple[int, tuple[float, int]]  # level, and the deadline with the arrival: lower ones go first
type Begun = tuple[Turn, int]  # a prompt's turn, and its tokens that are still to be computed

LAST_FIRST = 8  # steps
USUAL_TTFT_S = 2.0
_SCALE = 64.0  # the estimate of all steps may be wrong by this factor, either way
_SHAPE_SCALE = 4.0  # and that of one shape, besides: if a table is wrong by two either way, its usual error may be two
_FIRST_MARGIN, _MOST_MARGIN = 1.1, 1.5  # before errors are known; a step that takes longer is an accident
_NUM_ERRORS, _ERRORS_AT_ONCE = 512, 32
_MEMORY_S = 2.0  # of the rate of admission
_PAGES_HELD = 0.6  # the rest is for bursts, and for what admission keeps free
_USUAL_STEPS = 128  # about as many steps as a request holds its pages
_HARDLY_LONGER = 1.1
_LEAST_MEMORY_S = 0.1
MOST_BEHIND = 32  # requests of a queue that are looked at for who is late


class _Median:
    """The median of the last values."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> float:
        """Adds a value; returns the median."""
        values, ordered = self._values, self._ordered
        if len(values) == self._most:
            del ordered[bisect_left(ordered, values.popleft())]
        values.append(value)
        insort(ordered, value)
        return ordered[len(ordered) // 2]


@dataclass(slots=True)
class _Shape:
    """The estimate of the steps of one padded shape, and how wrong it was."""

    base_s: float
    kv_token_s: float  # of reading the K/V of a token
    pair_s: float  # of the attention of a query to a token
    ratios: _Median = field(default_factory=lambda: _Median(15))  # seconds taken / estimated
    ratio: float | None = None  # the median; None: there are too few

    def raw_s(self, kv_tokens: float, pairs: float) -> float:
        """The estimate of a step, without the correction."""
        kv_s, pairs_s = kv_tokens * self.kv_token_s, pairs * self.pair_s
        return self.base_s + (kv_s if kv_s > pairs_s else pairs_s)

    def correction(self, usual: float) -> float:
        """By which to multiply the estimate. `usual` is the median ratio of all shapes."""
        if self.ratio is None:
            return usual
        least, most = usual / _SHAPE_SCALE, usual * _SHAPE_SCALE
        return least if self.ratio < least else most if self.ratio > most else self.ratio


class Prediction(NamedTuple):
    """The predicted time of a step."""

    shape: _Shape
    raw_s: float  # the estimate, without the correction
    seconds: float


class StepPredictor:
    """An estimate of steps' seconds, times a correction learnt from the steps that have run.

    The correction is the median of the last steps of the same shape, or of all shapes while there are few. A few slow
    steps do not move a median, and an estimate that is wrong by a constant factor is right after eight steps of a
    shape.

    Args:
        percentile: the share of steps that `margin` covers, of those that are no accidents.
    """

    def __init__(self, estimate: StepEstimate, percentile: float = 0.99) -> None:
        self.margin = _FIRST_MARGIN
        self._estimate = estimate
        self._percentile = percentile
        self._shapes: dict[tuple[int, int], _Shape] = {}
        self._recent = _Median(31)  # of the ratios of all shapes
        self.usual = 1.0  # their median
        self._taken: deque[float] = deque(maxlen=_NUM_ERRORS)  # seconds taken / predicted
        self._num_learnt = 0

    def predict(self, num_tokens: int, num_rows: int, kv_tokens: float, pairs: float) -> Prediction:
        """The expected time of a step. The arguments are those of `StepEstimate.seconds`."""
        shape = self.shape(num_tokens, num_rows)
        raw_s = shape.raw_s(kv_tokens, pairs)
        return Prediction(shape, raw_s, raw_s * shape.correction(self.usual))

    def seconds(self, num_tokens: int, num_rows: int, kv_tokens: float, pairs: float) -> float:
        """The expected seconds of a step."""
        return self.of_shape(self.shape(num_tokens, num_rows), kv_tokens, pairs)

    def of_shape(self, shape: _Shape, kv_tokens: float, pairs: float) -> float:
        """The expected seconds of a step of a shape."""
        return shape.raw_s(kv_tokens, pairs) * shape.correction(self.usual)

    def learn(self, predicted: Prediction, took_s: float) -> None:
        """Learns from a step that took `took_s`."""
        if predicted.raw_s <= 0 or took_s <= 0:
            return
        shape, ratio = predicted.shape, took_s / predicted.raw_s
        median = shape.ratios.add(ratio)
        if len(shape.ratios) > 2:
            shape.ratio = median
        self.usual = min(max(self._recent.add(ratio), 1 / _SCALE), _SCALE)
        self._taken.append(took_s / predicted.seconds)
        self._num_learnt += 1
        if self._num_learnt % _ERRORS_AT_ONCE == 0:
            taken = sorted(each for each in self._taken if each <= _MOST_MARGIN)
            self.margin = max(1.0, taken[int(self._percentile * (len(taken) - 1))]) if taken else 1.0

    def errors(self) -> dict[str, float]:
        """The median and the 95th percentile of the errors of the last predictions, as shares of them; 0 before there
        are any."""
        found = np.quantile(np.abs(np.array(self._taken) - 1), (0.5, 0.95)) if self._taken else np.zeros(2)
        return dict(zip(("p50", "p95"), found.tolist(), strict=True))

    def shape(self, num_tokens: int, num_rows: int) -> _Shape:
        """The estimate of a padded shape."""
        shape = self._shapes.get((num_tokens, num_rows))
        if shape is None:
            many, seconds = 1e6, self._estimate.seconds
            base_s = seconds(num_tokens, num_rows, kv_tokens=0, pairs=0)
            kv_s = seconds(num_tokens, num_rows, kv_tokens=many, pairs=0) - base_s
            pairs_s = seconds(num_tokens, num_rows, kv_tokens=0, pairs=many) - base_s
            shape = self._shapes[num_tokens, num_rows] = _Shape(base_s, kv_s / many, pairs_s / many)
        return shape


class StepPolicy:
    """The decisions of the module's docstring. The scheduler asks, and tells of steps in the order of their dispatch.

    Args:
        percentile: the share of a request's gaps that its ITL target is for.
    """

    def __init__(self, estimate: StepEstimate, ladder: BucketLadder, percentile: float = 0.99) -> None:
        self.predictor = StepPredictor(estimate, percentile)
        self.slack_tokens = 0  # that the last step had for prompts
        self._token_budget = ladder.config.max_num_batched_tokens
        plain = [b for b in ladder.buckets() if not b.num_drafts and not b.has_adapters]
        self._decodes = sorted({b.num_rows for b in plain if b.decode_only})
        mixed: dict[int, list[int]] = {}  # tokens, descending -> rows, ascending
        for tokens, rows in sorted({(b.num_tokens, -b.num_rows) for b in plain if not b.decode_only}, reverse=True):
            mixed.setdefault(tokens, []).append(-rows)
        # The programs of each number of tokens, the most first: their rows, ascending, and their shapes.
        self._mixed = [
            (tokens, rows, [self.predictor.shape(tokens, r) for r in rows]) for tokens, rows in mixed.items()
        ]
        self._patience = math.ceil(1 / (1 - percentile)) - 1  # steps without a token for prompts
        self._num_without = Counter[int]()  # such steps in a row, by model
        self.step_s = 0.0  # predicted, of the step that is planned now, if prompts use all that they may
        self._num_decodes = self._kv_tokens = 0  # of that step
        self._in_flight: deque[tuple[int, Prediction]] = deque()  # the steps' numbers
        self._busy_until_s = 0.0
        self._admitted_tokens = self._admitting_s = 0.0  # while requests waited; both fade
        self._num_steps, self.usual_s = 0, 0.0  # the mean time of the last steps with decodes
        self._last_since_s = math.inf  # since when late and flex requests wait

        most, _, (*_, largest) = self._mixed[0]
        self._pair_cost = largest.pair_s * most / largest.base_s
        self._smallest = self._mixed[-1][2][0]
        free_s = _HARDLY_LONGER * self._smallest.base_s
        self._free_tokens = max(tokens for tokens, _, (fewest, *_) in self._mixed if fewest.base_s <= free_s)

    # --- the next step ---

    def strictest(self, itl_s: Iterable[float]) -> float:
        """The shortest of these ITL targets, in seconds. Targets that limit no step (rule 1) do not count. Infinity:
        there is none."""
        shortest_s = self.predictor.of_shape(self._smallest, 0, 0)
        return min((each for each in itl_s if each >= shortest_s), default=math.inf)

    def prompt_tokens(
        self,
        num_decodes: int,
        kv_tokens: int,
        strictest_s: float,
        past: int = 0,
        share_held: float = 0.0,
        model: int = 0,
    ) -> int:
        """The tokens that prompts may have in the next step, where some could use them.

        Args:
            num_decodes: rows that decode in the step.
            kv_tokens: tokens whose K/V are read, of all running requests of the model.
            past: tokens before the chunk of the first prompt. All prompts together may take the time that their
                attention would take behind so many.
            share_held: of the pages, by running requests.
            model: the model of the step.
        """
        self._num_decodes, self._kv_tokens = num_decodes, kv_tokens
        if self._num_without[model] >= self._patience:
            strictest_s = math.inf
        self.slack_tokens = self._fitting(num_decodes, kv_tokens, strictest_s, past, share_held)
        self._num_without[model] = 0 if self.slack_tokens else self._num_without[model] + 1
        return self.slack_tokens

    def _fitting(self, num_decodes: int, kv_tokens: int, strictest_s: float, past: int, share_held: float) -> int:
        notices = num_decodes > 0 and strictest_s < math.inf
        longest_s = _PAGES_HELD / share_held * self.usual_s if share_held and self._num_steps else math.inf
        most_s = strictest_s / self.predictor.margin
        for tokens, row_rungs, shapes in self._mixed:
            if num_decodes >= row_rungs[-1]:
                break
            shape = shapes[bisect_left(row_rungs, num_decodes + 1)]
            count = min(tokens, self._token_budget) - num_decodes
            self.step_s = self.predictor.of_shape(shape, kv_tokens, kv_tokens + (past + count / 2) * count)
            if not notices or (self.step_s <= most_s and (tokens <= self._free_tokens or self.step_s <= longest_s)):
                return count
        return 0

    def chunk_cost(self, past: int, count: int) -> float:
        """The time of a chunk of `count` tokens after `past` tokens, in times of one token's products. Its attention
        grows with the context."""
        return count + (past + count / 2) * count * self._pair_cost

    def chunk_within(self, cost: float, past: int, most: int) -> int:
        """The largest number of tokens of a chunk, at most `most`, that cost no more than `cost`. It may be 0."""
        if self.chunk_cost(past, most) <= cost:
            return most
        per_token = 1 + past * self._pair_cost
        # The root of count^2 * pair_cost / 2 + count * per_token = cost, in the form that does not cancel.
        count = 2 * cost / (per_token + math.sqrt(per_token * per_token + 2 * max(0.0, cost) * self._pair_cost))
        return max(0, min(most, math.floor(count)))

    def has_time(self, num_tokens: int, num_rows: int, kv_tokens: int, strictest_s: float) -> bool:
        """Whether a step of this padded shape keeps the target."""
        return self.predictor.seconds(num_tokens, num_rows, kv_tokens, kv_tokens) * self.predictor.margin <= strictest_s

    def may_enter(self, num_rows: int, kv_tokens: int, strictest_s: float, *, is_urgent: bool) -> bool:
        """Whether one more row may run beside `num_rows` (rule 4). `is_urgent`: the request would miss its TTFT target
        if it waited for one more step."""
        if num_rows == 0 or strictest_s == math.inf:
            return True
        rung = bisect_left(self._decodes, num_rows + 1)
        if rung == len(self._decodes):
            return True  # there is no slot for it
        rows = self._decodes[rung]
        expected_s = self.predictor.seconds(rows, rows, kv_tokens, kv_tokens)
        return expected_s * (1.0 if is_urgent else self.predictor.margin) <= strictest_s

    # --- the queue ---

    def lets_last_first(self, now: float, *, have_last: bool) -> bool:
        """Whether late and `flex` requests go first in a `LAST_FIRST`-th step (rule 3). `have_last`: some of them have
        tokens of a prompt to compute."""
        self._last_since_s = min(self._last_since_s, now) if have_last else math.inf
        return now - self._last_since_s >= USUAL_TTFT_S

    def slack_s(self, seq: RequestState, num_left: int, begun: Iterable[Begun], now: float) -> float:
        """The time between a request's first token and its target, if its prompt starts in the step that is planned
        now. Below 0, it would be late.

        Args:
            num_left: tokens of its prompt to compute.
            begun: prompts that are computed. Those that go before it delay it.
        """
        if (ttft_s := seq.ttft_s) is None:
            return math.inf
        mine = turn_of(seq)
        before = sum(left for turn, left in begun if turn < mine)
        num_steps, rest = divmod(before + num_left, max(1, self.slack_tokens))
        first_s = max(now, self._busy_until_s) + num_steps * self.step_s
        if rest:
            fits = (shapes for tokens, _, shapes in reversed(self._mixed) if tokens >= rest + self._num_decodes)
            last = next(fits, self._mixed[0][2])[0]
            first_s += self.predictor.of_shape(last, self._kv_tokens, self._kv_tokens)
        return seq.arrived_s + ttft_s - first_s

    def makes_late(self, seq: RequestState, num_left: int, slack_s: float, behind: Iterable[RequestState]) -> bool:
        """Whether fewer requests are late if this one is, which has a TTFT target.

        Args:
            num_left: tokens of its prompt to compute.
            slack_s: of `slack_s`.
            behind: requests of the same client that wait behind it, in their order.
        """
        assert seq.ttft_s is not None
        token_s = self.step_s / max(1, self.slack_tokens)
        end_s = seq.arrived_s + seq.ttft_s - slack_s
        in_time = [(-num_left, 0)]  # a heap, the longest first
        for place, other in enumerate(behind, 1):
            num, ttft_s = other.num_known, other.ttft_s
            end_s += num * token_s
            if ttft_s is None:
                continue
            longest, late = in_time[0]
            if end_s <= (due_s := other.arrived_s + ttft_s):
                heappush(in_time, (-num, place))
            elif -longest <= num or end_s + longest * token_s > due_s:
                end_s -= num * token_s  # the other is late itself
            elif late == 0:
                return True
            else:
                end_s += longest * token_s
                heapreplace(in_time, (-num, place))
        return False

    def wait_s(self, seq: RequestState, waiting: Iterable[RequestState]) -> float:
        """The forecast of a request's wait in the queue; 0 if too little is known."""
        if self._admitting_s < _LEAST_MEMORY_S:
            return 0.0
        mine = turn_of(seq)
        before = sum(other.num_prompt for other in waiting if turn_of(other) < mine)
        return before * self._admitting_s / max(1.0, self._admitted_tokens)

    # --- steps ---

    def dispatched(self, plan: StepPlan, now: float, *, kv_tokens: int, have_waiting: bool) -> None:
        """Records a step, with its bucket as it is dispatched."""
        tokens, rows = plan.bucket.num_tokens, plan.bucket.num_rows
        pairs = kv_tokens + sum([(chunk.start + chunk.count / 2) * chunk.count for chunk in plan.chunks])
        predicted = self.predictor.predict(tokens, rows, kv_tokens, pairs)
        seconds = predicted.seconds
        self._in_flight.append((plan.number, predicted))
        self._busy_until_s = max(self._busy_until_s, now) + seconds
        if len(plan.rows) > len(plan.chunks):
            self._num_steps = min(self._num_steps + 1, _USUAL_STEPS)
            self.usual_s += (seconds - self.usual_s) / self._num_steps
        if not have_waiting:
            self._admitted_tokens = self._admitting_s = 0.0
            return
        kept = math.exp(-seconds / _MEMORY_S)
        self._admitting_s = kept * self._admitting_s + seconds
        self._admitted_tokens = kept * self._admitted_tokens + sum(seq.num_prompt for seq in plan.admitted)

    def returned(self, number: int, now: float, took_s: float) -> None:
        """Records that a step has returned after `took_s` seconds on the device."""
        if not self._in_flight or self._in_flight[0][0] != number:  # it was dispatched before there was a policy
            return
        self.predictor.learn(self._in_flight.popleft()[1], took_s)
        self._busy_until_s = now + sum([predicted.seconds for _, predicted in self._in_flight])


def turn_of(seq: RequestState, *, last_first: bool = False) -> Turn:
    """The place of a request in the order of prompts."""
    return seq.level ^ last_first, seq.order


def begun_of(seq: RequestState) -> Begun:
    """A prompt that is computed, for `slack_s`."""
    return turn_of(seq), len(seq.to_compute) - seq.num_computed
