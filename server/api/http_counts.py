"""The counts of an HTTP process for /metrics, in a dataclass that can be sent to another process and added there."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from batcher.stats import LATENCY_BOUNDS, TOKEN_BOUNDS, Histogram

COUNT_BOUNDS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
HTTP_BOUNDS = (0.01, 0.05, 0.1, *LATENCY_BOUNDS)

CPU_SECONDS = "process_cpu_seconds"

# the deadline passed in the queue, or during the output; the key already had its share of requests
LIMITS = ("deadline_waiting", "deadline_running", "key_share")


class Prefill(enum.StrEnum):
    """The outcome of a prompt that another server was to compute."""

    DONE = "done"
    FAILED = "failed"  # it was computed here
    SKIPPED = "skipped"  # it was computed here, because all other servers have recently failed


@dataclass(kw_only=True, slots=True)
class HttpCounts:
    """Counts since the start of the process. Some of `process` are present values."""

    max_generation_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    params_n: Histogram = field(default_factory=partial(Histogram, COUNT_BOUNDS))
    params_max_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BOUNDS))
    limited: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LIMITS, 0))
    prefills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(Prefill, 0))
    responses: dict[tuple[str, str, str], int] = field(default_factory=dict)  # handler, method, status -> count
    durations: dict[tuple[str, str], Histogram] = field(default_factory=dict)  # handler, method -> seconds
    process: dict[str, float] = field(default_factory=dict)  # figures of the process -> value, for sums

    def retire(self) -> None:
        """Removes the present values of a process that has ended. Its CPU time stays counted."""
        self.process = {name: value for name, value in self.process.items() if name == CPU_SECONDS}

    def add(self, other: HttpCounts) -> None:
        """Adds the counts of another process."""
        self.max_generation_tokens.add(other.max_generation_tokens)
        self.params_n.add(other.params_n)
        self.params_max_tokens.add(other.params_max_tokens)
        _add(self.limited, other.limited)
        _add(self.prefills, other.prefills)
        _add(self.responses, other.responses)
        for key, histogram in other.durations.items():
            self.durations.setdefault(key, Histogram(HTTP_BOUNDS)).add(histogram)
        _add(self.process, other.process)


def _add[K, N: (int, float)](mine: dict[K, N], theirs: Mapping[K, N]) -> None:
    for key, count in theirs.items():
        mine[key] = mine.get(key, 0) + count
