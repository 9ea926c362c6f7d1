"""The scheduler under a workload, in simulated time: the real engine core over a device that only takes time."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import numpy as np

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.core import EngineCore
from batcher.request import Request, RequestOutput, SamplingParams, Targets
from batcher.requests.admission import make_request_state
from batcher.requests.live_requests import Staged
from batcher.scheduling.forecast import Forecast
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import StepPlan
from batcher.step import Capacity, StepOutput, WeightsKind
from batcher.step_times import PerTokenEstimate, StepEstimate
from scripts.lab.simulation.instant_runner import TOKEN, InstantRunner

EOS = 1
VOCAB_SIZE = 1 << 20  # its last tokens are those of prefixes that requests share
NO_TARGETS = Targets()
DEFAULT_COST = PerTokenEstimate(0.008, 0.00002)  # of a step on the device


@dataclass(frozen=True, kw_only=True)
class SimulatedRequest:
    """One request of a workload. It draws EOS after `num_output` tokens; `max_tokens` may end it earlier."""

    arrival_s: float
    num_prompt: int
    num_output: int
    max_tokens: int | None = None  # None: up to the context's length
    num_shared: int = 0  # leading tokens of the prompt that all requests with the same `prefix` have in common
    prefix: int = 0
    model: int = 0  # 0: the one that is always on the device
    ttft_ms: float | None = None  # its own target; None: that of all


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The simulated server: the shapes of its steps, its pages, and the cost of a step."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int = 8192  # tokens
    num_pages: int = 1024
    page_size: int = 64  # tokens
    min_decode_rows: int = 1
    cost: StepEstimate = DEFAULT_COST
    # Seconds of the host per step and per row of it. With two steps in flight they pass while the device runs.
    host_step_s: float = 0.0
    host_row_s: float = 0.0
    max_models: int = 0  # on the device at once; 0: there is one model only
    bring_s: float = 0.0  # in which the weights of a model come to the device, while steps of others run


@dataclass(frozen=True, kw_only=True)
class Served:
    """The times of one finished request, in seconds of the simulation."""

    arrived_s: float
    first_s: float
    last_s: float
    num_prompt: int
    num_output: int

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.first_s - self.arrived_s

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for a single token."""
        return (self.last_s - self.first_s) / (self.num_output - 1) if self.num_output > 1 else None


@dataclass(kw_only=True)
class Result:
    """Totals over one run. Inter-token latencies (ITL) are in seconds."""

    num_steps: int = 0
    seconds: float = 0.0
    num_preemptions: int = 0
    recomputed_tokens: int = 0  # known tokens of preempted requests that were computed again
    output_tokens: int = 0
    row_seconds: float = 0.0  # rows with a use, times the seconds of their steps
    device_s: float = 0.0  # seconds in which a step ran
    most_pages: int = 0  # that were in use at once
    num_brought: int = 0  # copies of a model's weights to the device
    itl: list[float] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    served: list[Served] = field(default_factory=list)  # in the order of their ends
    token_times: list[float] = field(default_factory=list)  # of all output tokens, ascending
    num_late_first: int = 0  # first tokens that came later than the target
    num_late: int = 0  # other tokens
    num_within: int = 0  # requests within their targets, as the engine counts them
    keeps_targets: bool = True  # so few tokens were late that the percentile is kept

    @property
    def worst_itl(self) -> float:
        """Seconds of the longest pause between two tokens."""
        return max(self.itl, default=0.0)


class SimulatedEngine:
    """The engine's core on a machine, with a time of its own.

    Args:
        forecast: used by admission; None: the scheduler's own.
        max_stalls: steps that a decode may wait for a page before another request is preempted; None: the scheduler's.
        max_concurrency: requests in the server at once. The next one is sent when another has ended, and counts as
            arrived then. None: there is no limit.
        targets: by which tokens count as late.
        follows_targets: the engine is told of them.
        ends_early: as soon as too many tokens are late to keep them.
        adapt: called before each step is planned.
    """

    def __init__(
        self,
        machine: Machine,
        *,
        forecast: Forecast | None = None,
        max_stalls: int | None = None,
        prefix_caching: bool = True,
        max_concurrency: int | None = None,
        max_steps: int = 1_000_000,
        targets: Targets = NO_TARGETS,
        follows_targets: bool = False,
        ends_early: bool = False,
        adapt: Callable[[EngineCore, Result], None] | None = None,
    ) -> None:
        self.result = Result()
        self._targets, self._follows_targets, self._ends_early = targets, follows_targets, ends_early
        self._adapt = adapt
        self._machine = machine
        self._capacity = Capacity(
            num_slots=machine.max_num_seqs,
            num_pages=machine.num_pages,
            page_size=machine.page_size,
            max_model_len=machine.max_model_len,
            max_num_batched_tokens=machine.max_num_batched_tokens,
            vocab_size=VOCAB_SIZE,
            max_models=machine.max_models,
        )
        limits = BucketConfig(
            max_num_batched_tokens=machine.max_num_batched_tokens, max_num_seqs=machine.max_num_seqs,
            min_decode_rows=machine.min_decode_rows, min_mixed_tokens=64,
        )  # fmt: skip
        config = EngineConfig(eos_token_ids=(EOS,), prefix_caching=prefix_caching, seed=0)
        if follows_targets:
            config = replace(config, targets=targets, step_estimate=machine.cost)
        self.core = EngineCore(InstantRunner(self._capacity), config, BucketLadder(limits), lambda: self.now)
        if forecast is not None:
            self.core.scheduler.forecast = forecast
        if max_stalls is not None:
            self.core.scheduler.max_stalls = max_stalls
        self.now = 0.0
        self._max_concurrency = max_concurrency
        self._max_steps = max_steps
        self._wanted: dict[str, SimulatedRequest] = {}
        self._coming: deque[tuple[int, SimulatedRequest]] = deque()
        self._ends: deque[float] = deque()  # of the steps in flight
        self._brought: deque[tuple[float, WeightsKind, int]] = deque()  # weights, and when they have come
        self._last_heard: dict[str, float] = {}
        self._num_late: defaultdict[str, int] = defaultdict(int)  # tokens of each request
        self._num_requests = self._num_pauses = 0

    def add(self, number: int, request: SimulatedRequest) -> None:
        """The request is sent, and arrives at its time. Numbers are those of the run, and times only grow."""
        self._wanted[str(number)] = request
        self._coming.append((number, request))
        self._num_requests += 1
        self._num_pauses += request.num_output - 1

    @property
    def is_idle(self) -> bool:
        """Whether all requests that were sent have ended."""
        return not self.core.requests.sequences and not self._coming

    def run_until(self, time_s: float, hear: Callable[[RequestState, RequestOutput], None] | None = None) -> None:
        """Takes in what arrives until then, and all steps that end until then. `hear` gets their outputs."""
        while self._admit(time_s):
            self._stage()
            self._dispatch()
            if not self.core.in_flight:
                self._stage()  # a model for which others leave, because none of them can run
            end_s = self._ends[0] if self._ends else math.inf
            other_s, take = min(self._others(), key=itemgetter(0), default=(math.inf, _nothing))
            if other_s <= min(end_s, time_s):
                self.now = max(self.now, other_s)
                take()
                continue
            if end_s > time_s or not self._ends:
                return
            self.now = max(self.now, self._ends.popleft())
            delivery = self.core.complete(_drawn(self.core, self._wanted))
            for sequence, output in chain(delivery.outputs, delivery.plain_outputs()):
                self._hear(sequence, output)
                if hear is not None:
                    hear(sequence, output)
            if self._ends_early and not self._keeps_targets():
                return

    def _others(self) -> Iterator[tuple[float, Callable[[], object]]]:
        """What happens next besides the end of a step, and when."""
        if self._brought:
            yield self._brought[0][0], self._take_brought
        models = self.core.scheduler.models
        if models is not None and not self._ends:
            if (departure := models.next_departure()) is not None:
                yield departure, _nothing
            if self._coming and self._coming[0][1].arrival_s > self.now:
                yield self._coming[0][1].arrival_s, _nothing

    def _stage(self) -> None:
        """The weights of models come one after the other."""
        for kind, identity in self.core.next_to_stage(may_stage=True):
            began_s = max(self.now, self._brought[-1][0] if self._brought else 0.0)
            self._brought.append((began_s + self._machine.bring_s, kind, identity))

    def _take_brought(self) -> None:
        _, kind, identity = self._brought.popleft()
        self.core.requests.take_staged(Staged(kind, identity, None, self._machine.bring_s))

    def _admit(self, time_s: float) -> bool:
        """Adds requests that have arrived. Returns whether there is anything to do."""
        core, coming = self.core, self._coming
        if not core.requests.sequences:
            if not coming or coming[0][1].arrival_s > time_s:
                return False
            if not core.in_flight:
                self.now = max(self.now, coming[0][1].arrival_s)
        most = self._max_concurrency
        while coming and coming[0][1].arrival_s <= self.now and (most is None or len(core.requests.sequences) < most):
            number, request = coming.popleft()
            arrived_s = request.arrival_s if most is None else self.now
            core.requests.add(_sequence(number, request, self._capacity, arrived_s, self._told(request)))
        return True

    def _dispatch(self) -> None:
        core, machine, ends, result = self.core, self._machine, self._ends, self.result
        while core.can_dispatch():
            if self._adapt is not None:
                self._adapt(core, result)
            if (step := core.dispatch()) is None:
                break
            cost = _seconds(step.plan, machine.cost)
            self.now += machine.host_step_s + machine.host_row_s * len(step.plan.rows)
            ends.append(max(self.now, ends[-1] if ends else 0.0) + cost)
            result.num_steps += 1
            result.device_s += cost
            result.row_seconds += cost * len(step.plan.rows)
            result.most_pages = max(result.most_pages, core.scheduler.pool.num_used)
            result.recomputed_tokens += sum(
                chunk.count for chunk in step.plan.chunks if step.plan.rows[chunk.row].num_preemptions
            )
        if result.num_steps > self._max_steps:
            raise RuntimeError(f"the workload takes more than {self._max_steps} steps")

    def _told(self, request: SimulatedRequest) -> Targets | None:
        """What a request itself says of its targets."""
        return None if request.ttft_ms is None or not self._follows_targets else self._targets_of(request)

    def _targets_of(self, request: SimulatedRequest) -> Targets:
        return self._targets if request.ttft_ms is None else replace(self._targets, ttft_ms=request.ttft_ms)

    def _hear(self, sequence: RequestState, output: RequestOutput) -> None:
        result, now, name = self.result, self.now, sequence.request_id
        targets = self._targets_of(self._wanted[name])
        result.output_tokens += len(output.token_ids)
        result.token_times += [now] * len(output.token_ids)
        before = self._last_heard.get(name)
        if before is None:
            result.ttft.append(now - sequence.arrived_s)
            result.num_late_first += _is_late(now - sequence.arrived_s, targets.ttft_ms)
        else:
            result.itl.append(now - before)
            is_late = _is_late(now - before, targets.itl_ms)
            result.num_late += is_late
            self._num_late[name] += is_late
        self._last_heard[name] = now
        if output.finish_reason is None:
            return
        served = Served(
            arrived_s=sequence.arrived_s,
            first_s=sequence.first_token_s,
            last_s=now,
            num_prompt=sequence.num_prompt,
            num_output=len(sequence.output),
        )
        result.served.append(served)
        del self._last_heard[name]
        result.num_within += targets.are_kept(served.ttft, served.num_output - 1, self._num_late.pop(name, 0))

    def _keeps_targets(self) -> bool:
        """Whether the share of late tokens can still be as small as it must."""
        result, late = self.result, 1 - self._targets.percentile
        return result.num_late_first <= late * self._num_requests and result.num_late <= late * self._num_pauses

    def finish(self) -> Result:
        """Runs to the end of all requests."""
        self.run_until(math.inf)
        self.result.seconds = self.now
        self.result.num_preemptions = self.core.scheduler.num_preemptions
        if self.core.scheduler.models is not None:
            self.result.num_brought = self.core.scheduler.models.num_brought
        self.result.keeps_targets = self._keeps_targets()
        if self.core.requests.sequences and (self.result.keeps_targets or not self._ends_early):
            raise RuntimeError(f"{len(self.core.requests.sequences)} requests have not ended, and no step can run")
        self.core.scheduler.check_integrity()
        return self.result


def simulate(requests: Sequence[SimulatedRequest], machine: Machine, **options: Any) -> Result:
    """Runs a workload to its end.

    Args:
        requests: in the order of their arrival.
        options: of `SimulatedEngine`.

    Raises:
        RuntimeError: the workload takes more than `max_steps` steps.
    """
    engine = SimulatedEngine(machine, **options)
    for number, request in enumerate(requests):
        engine.add(number, request)
    return engine.finish()


def prompt_of(number: int, request: SimulatedRequest) -> np.ndarray:
    """i32[n], the tokens of a request's prompt."""
    prompt = np.full(request.num_prompt, TOKEN, np.int32)
    prompt[: request.num_shared] = VOCAB_SIZE - 1 - request.prefix
    prompt[min(request.num_shared, request.num_prompt - 1)] = 10 + number  # no two requests share more
    return prompt


def _sequence(
    number: int, request: SimulatedRequest, capacity: Capacity, arrived_s: float, targets: Targets | None
) -> RequestState:
    room = capacity.max_model_len - request.num_prompt
    sampling = SamplingParams(max_tokens=min(request.max_tokens or room, room), temperature=0.0, seed=0)
    return make_request_state(
        Request(
            request_id=str(number),
            prompt=tuple(prompt_of(number, request).tolist()),
            sampling=sampling,
            model=request.model,
            targets=targets,
        ),
        lambda _output: None,
        capacity=capacity,
        eos_token_ids=(EOS,),
        seed=0,
        arrived_s=arrived_s,
    )


def _nothing() -> None:
    """Only the time goes on."""


def _drawn(core: EngineCore, wanted: Mapping[str, SimulatedRequest]) -> StepOutput:
    """The tokens of the oldest step in flight."""
    plan = core.in_flight[0].plan
    tokens = [EOS if len(seq.output) + 1 >= wanted[seq.request_id].num_output else TOKEN for seq in plan.rows]
    return StepOutput(tokens=np.array(tokens, np.int32)[:, None], finite=np.ones(len(tokens), bool))


def _seconds(plan: StepPlan, cost: StepEstimate) -> float:
    """The time of a step on the device."""
    pairs, tokens = 0.0, 0
    for seq, count in zip(plan.rows, plan.q_lens, strict=True):
        tokens += seq.num_computed
        pairs += count * (seq.num_computed - (count - 1) / 2)
    return cost.seconds(plan.bucket.num_tokens, plan.bucket.num_rows, kv_tokens=tokens, pairs=pairs)


def _is_late(waited_s: float, target_ms: float | None) -> bool:
    return target_ms is not None and waited_s * 1e3 > target_ms
