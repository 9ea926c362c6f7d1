"""The best way to serve a workload on a target: the real scheduler in simulated time, over a grid of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from scripts.flags.settings import EngineSettings
from scripts.lab.planning.memory import MemoryPlan, Sizes
from scripts.lab.planning.roofline import HOST_ROW_S, HOST_STEP_S
from scripts.lab.planning.workload import DEFAULT_PERCENTILE, METRICS, Objectives, Workload, arriving
from scripts.lab.simulation.goodput import START_RATE, highest_rate
from scripts.lab.simulation.machine import NO_TARGETS, Machine, Result, SimulatedRequest, simulate
from scripts.lab.simulation.models import among

SEQS = (256, 64, 128, 512)
TOKENS = (2048, 512, 1024, 4096, 8192)
MIN_REQUESTS = 300  # of one simulation
TURNOVERS = 3  # requests of one simulation, as a multiple of `--max-num-seqs`
RATE_STEPS = 6  # bisections of the request rate
MAX_LOAD = 0.95  # of the rate at which no row is ever idle: above it, queues grow without end
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Settings of one replica that fit the chips."""

    sizes: Sizes
    settings: EngineSettings
    memory: MemoryPlan
    num_replicas: int

    @property
    def replicas_per_host(self) -> int:
        """`--data-parallel-size` of each host's server."""
        on_host = self.sizes.target.devices_per_host
        if on_host is None:
            return self.num_replicas
        return min(self.num_replicas, max(on_host // self.num_claimed, 1))

    @property
    def num_claimed(self) -> int:
        """The devices of one replica's process: as many as the model is split over, by whole chips."""
        return max(self.sizes.chips, self.sizes.target.devices_per_process)

    @property
    def num_idle(self) -> int:
        """Devices of the target on which nothing runs."""
        devices = self.sizes.target.num_devices
        return 0 if devices is None else devices - self.num_replicas * self.sizes.chips

    @property
    def machine(self) -> Machine:
        """What is simulated of it."""
        buckets = self.memory.buckets
        return Machine(
            max_num_seqs=buckets.max_num_seqs,
            max_num_batched_tokens=buckets.max_num_batched_tokens,
            max_model_len=self.memory.max_model_len,
            num_pages=self.memory.num_pages,
            page_size=self.memory.page_size,
            min_decode_rows=buckets.min_decode_rows,
            cost=self.sizes.roofline,
            host_step_s=HOST_STEP_S,
            host_row_s=HOST_ROW_S,
            max_models=self.memory.max_models,
            bring_s=self.sizes.bring_s,
        )

    @property
    def num_requests(self) -> int:
        """The requests of a simulation that is long against one request."""
        return max(MIN_REQUESTS, TURNOVERS * self.memory.buckets.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a candidate does under a load. Rates and tokens are of all replicas together, latencies in milliseconds."""

    candidate: Candidate
    offered_per_s: float | None  # None: a closed loop
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latencies: dict[str, dict[str, float]]  # metric -> percentile or mean -> milliseconds
    num_preemptions: int | None  # None: not known
    occupancy: float  # mean share of `--max-num-seqs` while a step runs
    device_busy: float  # share of the time in which a step runs
    pages_used: float  # largest share of the pages
    judged: str  # the figure of a latency that objectives limit: p95, or the mean
    meets: bool = True  # its objectives

    @property
    def max_num_seqs(self) -> int:
        """Rows of a step."""
        return self.candidate.memory.buckets.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens of a step."""
        return self.candidate.memory.buckets.max_num_batched_tokens


@dataclass(kw_only=True)
class Search:
    """The best outcome, and all outcomes that were simulated on the way to it."""

    best: Outcome | None = None
    tried: list[Outcome] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What is tried. The first of each is tried first."""

    parallel: Sequence[int]  # chips of a replica
    seqs: Sequence[int] = SEQS
    tokens: Sequence[int] = TOKENS


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come to the whole deployment. Both None: as many as the objectives allow, or as fit."""

    request_rate: float | None = None  # per second
    max_concurrency: int | None = None


class Simulator:
    """Runs the server's own scheduler in simulated time."""

    simulates = True

    def measure(
        self,
        candidate: Candidate,
        workload: Workload,
        *,
        rate: float | None,
        concurrency: int | None = None,
        objectives: Objectives | None,
    ) -> Outcome:
        """Simulates one replica under its share of the load.

        Args:
            rate: requests per second of all replicas; None: a closed loop.
            concurrency: of the closed loop over all replicas; None: as many requests as there are rows.
        """
        replicas = candidate.num_replicas
        requests = workload.draw(candidate.num_requests, candidate.memory.max_model_len)
        if candidate.memory.max_models:
            requests = among(requests, candidate.memory.num_models)
        in_flight = None
        if rate is None:
            rows = candidate.memory.buckets.max_num_seqs
            in_flight = rows if concurrency is None else max(1, -(-concurrency // replicas))
        else:
            requests = arriving(requests, rate / replicas)
        targets = candidate.settings.targets
        result = simulate(
            requests,
            candidate.machine,
            prefix_caching=candidate.settings.enable_prefix_caching,
            max_concurrency=in_flight,
            targets=targets or NO_TARGETS,
            follows_targets=targets is not None,
        )
        return _outcome(candidate, requests, result, rate, objectives)


def _outcome(
    candidate: Candidate,
    requests: list[SimulatedRequest],
    result: Result,
    rate: float | None,
    objectives: Objectives | None,
) -> Outcome:
    """Figures of the time from the arrival of a third of the requests until the last arrival: the load is steady."""
    replicas = candidate.num_replicas
    begin, until = settled_from(result)
    first, last = np.searchsorted(result.token_times, [begin, until], side="right")
    tokens_per_s = replicas * float(last - first) / (until - begin)
    outputs_per_request = result.output_tokens / len(requests)
    inputs_per_request = sum(request.num_prompt for request in requests) / len(requests)
    requests_per_s = tokens_per_s / outputs_per_request
    found = latencies(result, begin, [objectives.percentile] if objectives else [])
    met = result.keeps_targets
    if objectives is not None and candidate.settings.targets is None:
        met = objectives.met({name: found[name][f"p{objectives.percentile:g}"] for name in METRICS})
    return Outcome(
        candidate=candidate,
        offered_per_s=rate,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        total_tokens_per_s=requests_per_s * (inputs_per_request + outputs_per_request),
        latencies=found,
        num_preemptions=result.num_preemptions,
        occupancy=result.row_seconds / result.device_s / candidate.memory.buckets.max_num_seqs,
        device_busy=min(result.device_s / result.seconds, 1.0),
        pages_used=result.most_pages / candidate.memory.num_pages,
        judged=f"p{DEFAULT_PERCENTILE if objectives is None else objectives.percentile:g}",
        meets=met,
    )


def settled_from(result: Result) -> tuple[float, float]:
    """The arrival of a third of the requests, and the last one: the load is steady in between. Where all arrived nearly
    at once, it is the whole run."""
    arrivals = np.sort([served.arrived_s for served in result.served])
    begin, until = float(arrivals[len(arrivals) // 3]), float(arrivals[-1])
    return (begin, until) if until - begin >= result.seconds / 10 else (0.0, result.seconds)


def latencies(result: Result, begin_s: float, more: Sequence[float]) -> dict[str, dict[str, float]]:
    """metric -> percentile -> milliseconds, of the requests that arrived later; of pauses, all.

    Args:
        more: percentiles besides the usual ones.
    """
    settled = [served for served in result.served if served.arrived_s >= begin_s]
    values = {
        "ttft_ms": [served.ttft for served in settled],
        "tpot_ms": [served.tpot for served in settled if served.tpot is not None],
        "itl_ms": result.itl,
    }
    points = sorted({*PERCENTILES, *more})
    return {name: {f"p{p:g}": float(np.percentile(values[name] or [0.0], p)) * 1e3 for p in points} for name in METRICS}


def _rates(
    method: Simulator, candidate: Candidate, workload: Workload, objectives: Objectives, *, above: float = 0.0
) -> Iterator[Outcome]:
    """Outcomes at rates that close in on the highest one within the objectives. The best that meets them counts.

    Args:
        above: a rate that another candidate reaches: without more than it, the search ends after its first step.
    """
    if candidate.settings.targets is not None and method.simulates:
        yield from _rates_within_targets(method, candidate, workload, objectives, above)
        return
    saturated = method.measure(candidate, workload, rate=None, objectives=None).requests_per_s
    low, high = 0.0, saturated * MAX_LOAD
    if above:
        low = above * 1.01
        if low >= high:
            return
        outcome = method.measure(candidate, workload, rate=low, objectives=objectives)
        yield outcome
        if not outcome.meets:
            return
    for _ in range(RATE_STEPS):
        if high - low < 0.03 * high:
            return
        middle = (low + high) / 2
        outcome = method.measure(candidate, workload, rate=middle, objectives=objectives)
        yield outcome
        low, high = (middle, high) if outcome.meets else (low, middle)


def _rates_within_targets(
    method: Simulator, candidate: Candidate, workload: Workload, objectives: Objectives, above: float
) -> Iterator[Outcome]:
    """As `_rates`, for an engine that knows the targets: found as `lab simulate` does."""
    tried: list[Outcome] = []

    def keeps(rate: float) -> bool:
        tried.append(method.measure(candidate, workload, rate=rate, objectives=objectives))
        return tried[-1].meets

    highest_rate(keeps, start=START_RATE * candidate.num_replicas, above=above)
    yield from tried


def capacity(
    method: Simulator, candidate: Candidate, workload: Workload, objectives: Objectives | None, reached: Outcome
) -> float:
    """Tokens in and out per second at the highest load that meets the objectives; without them, with all rows in use.

    Args:
        reached: a load that the candidate serves.
    """
    if objectives is None:
        outcomes = [method.measure(candidate, workload, rate=None, objectives=None)]
    else:
        outcomes = [outcome for outcome in _rates(method, candidate, workload, objectives) if outcome.meets]
    return max(outcome.total_tokens_per_s for outcome in (*outcomes, reached))


def search(
    method: Simulator,
    candidates: Callable[[int, int, int], Candidate | None],
    grid: Grid,
    workload: Workload,
    objectives: Objectives | None,
    load: Load,
    report: Callable[[str], None],
) -> Search:
    """Looks for the best settings, one kind after the other: the chips of a replica, then tokens, then rows of a step.

    If nothing meets the objectives with the first limits of the grid, the others are tried with all chips.

    Args:
        candidates: of (chips of a replica, rows, tokens); None: they do not fit.
    """
    found = Search()
    seen: set[tuple[int, int, int]] = set()

    def consider(chips: int, rows: int, budget: int) -> None:
        if (chips, rows, budget) in seen or budget <= rows:
            return
        seen.add((chips, rows, budget))
        candidate = candidates(chips, rows, budget)
        if candidate is None:
            return
        report(f"trying {candidate.num_replicas} x {chips} chips, {rows} rows, {budget} tokens a step")
        for outcome in _outcomes(method, candidate, workload, objectives, load, found.best):
            found.tried.append(outcome)
            if outcome.meets and _is_better(outcome, found.best):
                found.best = outcome

    for chips in grid.parallel:
        consider(chips, grid.seqs[0], grid.tokens[0])
    for chips in grid.parallel if found.best is None else [found.best.candidate.sizes.chips]:
        for budget in grid.tokens:
            consider(chips, grid.seqs[0] if found.best is None else found.best.max_num_seqs, budget)
        for rows in grid.seqs:
            consider(chips, rows, grid.tokens[0] if found.best is None else found.best.max_num_batched_tokens)
    return found


def _outcomes(
    method: Simulator,
    candidate: Candidate,
    workload: Workload,
    objectives: Objectives | None,
    load: Load,
    best: Outcome | None,
) -> Iterator[Outcome]:
    if load.request_rate is not None or load.max_concurrency is not None or objectives is None:
        yield method.measure(
            candidate, workload, rate=load.request_rate, concurrency=load.max_concurrency, objectives=objectives
        )
    else:
        yield from _rates(method, candidate, workload, objectives, above=_rate(best) if best else 0.0)


def _is_better(outcome: Outcome, best: Outcome | None) -> bool:
    """More requests per second; at an equal rate, lower latency. Differences below 2% do not count."""
    if best is None:
        return True
    if outcome.offered_per_s is not None and outcome.offered_per_s == best.offered_per_s:
        return _latency(outcome) < 0.98 * _latency(best)
    return _rate(outcome) > (1.005 if outcome.offered_per_s else 1.02) * _rate(best)


def _rate(outcome: Outcome) -> float:
    return outcome.offered_per_s or outcome.requests_per_s


def _latency(outcome: Outcome) -> float:
    """Milliseconds of the first hundred tokens."""
    return outcome.latencies["ttft_ms"][outcome.judged] + 100 * outcome.latencies["tpot_ms"][outcome.judged]
