"""The counts of an HTTP process for /metrics, in a dataclass that can be sent to another process and added there."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from batcher.stats import LATENCY_BOUNDS, TOKEN_BOUNDS, Histogram

COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
HTTP_BOUNDS = (0.01, 0.05, 0.1, *LATENCY_BOUNDS)

CPU_SECONDS = "process_cpu_seconds"

# the deadline passed in the queue, or during the output; the key already had its share of requests
LIMITS = ("deadline_waiting", "deadline_running", "key_share")
MOST_NAMES = 100  # of keys and of models; the usage of others is counted under OTHERS
OTHERS = "others"


@dataclass(kw_only=True, slots=True)
class HttpCounts:
    """Counts since the start of the process. Some of `process` are present values."""

    max_generation_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    params_n: Histogram = field(default_factory=partial(Histogram, COUNT_BOUNDS))
    params_max_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    limited: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    responses: dict[tuple[str, str, str], int] = field(default_factory=dict)  # handler, method, status -> count
    durations: dict[tuple[str, str], Histogram] = field(default_factory=dict)  # handler, method -> seconds
    key_requests: dict[str, int] = field(default_factory=dict)  # by the name of an API key, as the next two
    key_prompt_tokens: dict[str, int] = field(default_factory=dict)
    key_generation_tokens: dict[str, int] = field(default_factory=dict)
    model_requests: dict[str, int] = field(default_factory=dict)  # by the name of a model, as the next two
    model_prompt_tokens: dict[str, int] = field(default_factory=dict)
    model_generation_tokens: dict[str, int] = field(default_factory=dict)
    process: dict[str, float] = field(default_factory=dict)  # figures of the process -> value, for sums

    def add_usage(self, kind: str, name: str, **counts: int) -> None:
        """Counts a request of the `key` or the `model` of this name, and its tokens."""
        for counted, count in {"requests": 1, **counts}.items():
            _add(getattr(self, f"{kind}_{counted}"), {name: count})

    def retire(self) -> None:
        """Removes the present values of a process that has ended. Its CPU time stays counted."""
        self.process = {name: value for name, value in self.process.items() if name == CPU_SECONDS}

    def add(self, other: HttpCounts) -> None:
        """Adds the counts of another process."""
        for each in fields(self):
            _add(getattr(self, each.name), getattr(other, each.name))


def _add(mine: Any, theirs: Any) -> None:
    if isinstance(theirs, Histogram):
        mine.add(theirs)
        return
    for key, count in theirs.items():
        if isinstance(count, Histogram):
            mine.setdefault(key, Histogram(count.bounds)).add(count)
        else:
            mine[key] = mine.get(key, 0) + count
