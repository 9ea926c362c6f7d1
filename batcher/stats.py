"""The engine's statistics. Every figure is a running total or a present value, so a missed reading loses nothing.

They are numbers in dataclasses, which any serialiser can send to another process.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from functools import partial, reduce
from itertools import zip_longest
from typing import Any

from batcher.scheduling.page_moves import OffloadingCounts
from batcher.step_log import StepRecord

TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
PREEMPTION_BOUNDS = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
# where the K/V of a prompt's tokens come from: a step, the prefix cache, or the tiers behind it
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
TOKEN_BOUNDS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass(slots=True)
class Histogram:
    """Counts per bucket since start, not cumulative over buckets. The last count is of values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0  # sum of the observed values

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def add(self, other: Histogram) -> None:
        """Adds the observations of `other`, which has the same bounds."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        self.total += other.total


class ModelState(StrEnum):
    """Where a model's weights are. A later state has a greater name, so that of several engines is the maximum."""

    DISK = "disk"
    HOST = "host"
    RESIDENT = "resident"  # on the device
    RUNNING = "running"  # on the device, and requests run


@dataclass(slots=True)
class SpeculationCounts:
    """Draft tokens since start. A row of a step is counted if drafts were proposed for it."""

    num_drafts: int = 0  # rows with drafts
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)  # by the draft's place in its row
    num_undrafted_rows: int = 0  # rows of speculative steps whose requests cannot have drafts, such as under a grammar

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        if num_proposed:
            self.num_drafts += 1
            self.num_draft_tokens += num_proposed
            self.num_accepted_tokens += num_accepted
            per_pos = self.num_accepted_tokens_per_pos
            per_pos += [0] * (num_proposed - len(per_pos))
            for place in range(num_accepted):
                per_pos[place] += 1


_ttft, _itl, _latency, _preemptions, _tokens = (
    partial(Histogram, bounds) for bounds in (TTFT_BOUNDS, ITL_BOUNDS, LATENCY_BOUNDS, PREEMPTION_BOUNDS, TOKEN_BOUNDS)
)


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Gauges are present values. All other figures count from the engine's start. Units: seconds, tokens."""

    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_pages: int = 0
    num_pages_used: int = 0
    num_pages_reusable: int = 0  # held by the prefix cache alone
    num_programs_to_come: int = 0  # to be compiled while requests are served
    num_adapters_resident: int = 0  # LoRA adapters in adapter slots
    num_adapters_staged: int = 0  # on the device, but in no slot yet
    running_of_adapters: dict[int, int] = field(default_factory=dict)  # identity -> requests that run
    waiting_of_adapters: dict[int, int] = field(default_factory=dict)  # identity -> requests that wait
    models: dict[int, ModelState] = field(default_factory=dict)  # by identity; {}: there is one model only
    running_of_models: dict[int, int] = field(default_factory=dict)  # identity -> requests that run
    waiting_of_models: dict[int, int] = field(default_factory=dict)  # identity -> requests that wait
    recent_steps: list[StepRecord] = field(default_factory=list)  # a sample of the last seconds' steps
    slack_tokens: int = 0  # that the last step had for prompts, with latency targets
    prediction_error: dict[str, float] = field(default_factory=dict)  # p50, p95 -> of steps' times, as a share
    sleep_states: dict[str, int] = field(default_factory=lambda: {"awake": 1})  # vLLM's name -> 1: it is in this state
    # counters
    num_preemptions: int = 0
    num_adapter_loads: int = 0  # LoRA adapters written into adapter slots
    num_models_brought: int = 0  # copies of a model's weights to the device
    prompt_tokens: int = 0  # counted at a request's first admission
    prompt_tokens_by_source: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PROMPT_SOURCES, 0))
    prompt_tokens_computed: int = 0  # recomputation after preemptions included
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    kv_events_published: int = 0  # pages stored, copied, removed, and clearings, told to those who follow the pages
    kv_events_dropped: int = 0  # not told, for want of room
    corrupted_requests: int = 0  # ended because the model gave NaN or infinity
    failed_steps: int = 0  # including steps that were in flight behind a failed one
    num_steps: int = 0
    step_tokens: int = 0  # real tokens computed, with surplus tokens
    step_tokens_padded: int = 0  # tokens of the padded shapes
    step_rows: int = 0  # likewise
    step_rows_padded: int = 0
    num_compiles_after_warm_up: int = 0  # besides the programs that were left for later
    num_stand_in_steps: int = 0  # steps in a larger program than their own, which was still to come
    integrity_failures: int = 0  # idle periods in which slots, pages or queues were found inconsistent
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> requests
    # client, class of targets, `within`, `missed` or `refused` -> requests
    by_targets: dict[tuple[int, str, str], int] = field(default_factory=dict)
    speculation: SpeculationCounts = field(default_factory=SpeculationCounts)
    offloading: OffloadingCounts = field(default_factory=OffloadingCounts)
    # histograms
    queue_time: Histogram = field(default_factory=_latency)
    time_to_first_token: Histogram = field(default_factory=_ttft)
    inter_token_latency: Histogram = field(default_factory=_itl)
    time_per_output_token: Histogram = field(default_factory=_itl)  # a request's mean, without its first token
    e2e_latency: Histogram = field(default_factory=_latency)
    prefill_time: Histogram = field(default_factory=_latency)  # from admission to the first token
    decode_time: Histogram = field(default_factory=_latency)  # from the first token to the last
    inference_time: Histogram = field(default_factory=_latency)  # from admission to the last token
    request_preemptions: Histogram = field(default_factory=_preemptions)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)
    request_computed_tokens: Histogram = field(default_factory=_tokens)  # of its prompt; the others were found
    iteration_tokens: Histogram = field(default_factory=_tokens)  # real tokens of a step

    @property
    def kv_cache_usage(self) -> float:
        """Share of the pages that sequences hold, 0 to 1."""
        return self.num_pages_used / self.num_pages if self.num_pages else 0.0

    @property
    def prompt_tokens_cached(self) -> int:
        """Prompt tokens whose K/V were found when their requests were first admitted."""
        return sum(self.prompt_tokens_by_source.values()) - self.prompt_tokens_by_source["local_compute"]

    def copy(self) -> EngineStats:
        duplicate: EngineStats = _copied(self)
        return duplicate


def total_of(engines: Sequence[EngineStats]) -> EngineStats:
    """The sums over several engines, gauges included. There are no sampled steps: each engine numbers its own."""
    total: EngineStats = reduce(_sum, [replace(stats, recent_steps=[]) for stats in engines])
    return total


def _copied(value: Any) -> Any:
    if isinstance(value, list | dict):
        return value.copy()
    return _by_field(_copied, value) if is_dataclass(value) else value


def _sum(mine: Any, theirs: Any) -> Any:
    match mine:
        case dict():
            return theirs | {key: _sum(value, theirs[key]) if key in theirs else value for key, value in mine.items()}
        case str():  # a ModelState
            return max(mine, theirs)
        case list():
            return [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
        case tuple():  # the bounds of a histogram
            return mine
        case int() | float():
            return mine + theirs
    return _by_field(_sum, mine, theirs)


def _by_field(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """A dataclass with the result of the function for each field of these dataclasses."""
    figures = {f.name: function(*(getattr(each, f.name) for each in (first, *others))) for f in fields(first)}
    return replace(first, **figures)
