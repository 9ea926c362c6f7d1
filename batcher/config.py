"""The engine's settings, built once in `scripts/`."""

from __future__ import annotations

from dataclasses import dataclass

from batcher.page_store import Offloading
from batcher.request import Targets
from batcher.step_times import PerTokenEstimate, StepEstimate, StepTimes

DEFAULT_MAX_WAITING = 1024
DEFAULT_PIPELINE_DEPTH = 2  # step N+1 is dispatched before step N is read
# Reading the weights takes as long as computing 16 tokens, and both take their time.
_ANY_TIMES = StepTimes(num_tokens=(0, 1), times=(16, 17))
_ANY_ESTIMATE = PerTokenEstimate(16e-4, 1e-4)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """The engine's settings that do not depend on the runner's capacity."""

    eos_token_ids: tuple[int, ...]  # every end-of-sequence id of the model's generation_config
    prefix_caching: bool = True
    max_waiting: int = DEFAULT_MAX_WAITING  # requests that may wait beyond the ones that the slots can hold
    pipeline_depth: int = DEFAULT_PIPELINE_DEPTH  # steps in flight; 1: no overlap
    step_cost_tokens: int = 16  # tokens whose computation takes as long as one more step; steers chunk trimming
    step_times: StepTimes = _ANY_TIMES  # times of decodes by their tokens, which decide whether drafts pay
    draft_cost: float = 0.0  # time of a pass of the draft model, in passes of the model; 0: drafts are looked up
    targets: Targets | None = None  # of requests that name none
    refuses_late: bool = False  # requests that would miss their TTFT are refused; otherwise they are served last
    step_estimate: StepEstimate = _ANY_ESTIMATE  # by which targets are kept
    step_timeout_s: float | None = None  # least time that a step is given before the device counts as stuck; None: any
    offloading: Offloading | None = None  # settings for pages that leave the device; None: they do not
    seed: int | None = None  # for drawing the seeds of requests without one; None: the operating system's

    def __post_init__(self) -> None:
        if self.pipeline_depth < 1:
            raise ValueError(f"at least one step is in flight: {self.pipeline_depth=}")
        if self.offloading is not None and not self.prefix_caching:
            raise ValueError("pages leave the device as prefixes, which need prefix caching")
        if self.max_waiting < 0:
            raise ValueError(f"the queue limit is not negative: {self.max_waiting=}")
        if self.step_timeout_s is not None and self.step_timeout_s <= 0:
            raise ValueError(f"a step is given some time: {self.step_timeout_s=}")
        if self.draft_cost < 0:
            raise ValueError(f"a draft model takes some time: {self.draft_cost=}")
        if self.step_cost_tokens < 0:
            raise ValueError(f"a step's fixed cost is not negative: {self.step_cost_tokens=}")
