"""The traffic of a plan: a kind by name, lengths, or a recorded trace; and the objectives for its latencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from batcher.request import Targets
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.load.lengths import Lengths, Trace
from scripts.lab.load.presets import TRAFFIC, Traffic
from scripts.lab.simulation.machine import SimulatedRequest

METRICS = ("ttft_ms", "tpot_ms", "itl_ms")
DEFAULT_PERCENTILE = 95.0
MEDIAN_OF = 1001  # requests


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Lengths of requests. `draw` gives as many requests as a simulation needs."""

    name: str
    traffic: Traffic | None  # None: the trace
    trace: Trace | None = None

    def draw(self, count: int, max_model_len: int) -> list[SimulatedRequest]:
        """Requests that all arrive at once, cut to the context. The same call gives the same requests."""
        if self.traffic is not None:
            random = np.random.default_rng(0)
            prompts, outputs = self.traffic.prompts.draw(count, random), self.traffic.outputs.draw(count, random)
            num_shared = self.traffic.num_shared
        else:
            assert self.trace is not None
            at = np.arange(count) % len(self.trace.input_lens)
            prompts, outputs, num_shared = self.trace.input_lens[at], self.trace.output_lens[at], 0
        requests = []
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True):
            num_prompt = min(max(prompt, 1), max_model_len - 1)
            num_output = min(max(output, 1), max_model_len - num_prompt)
            requests.append(
                SimulatedRequest(
                    arrival_s=0.0, num_prompt=num_prompt, num_output=num_output, num_shared=min(num_shared, num_prompt)
                )
            )
        return requests

    def typical_context(self) -> int:
        """Tokens of a request in the middle of its output, by the median lengths."""
        requests = self.draw(MEDIAN_OF, 1 << 30)
        prompt, output = (
            int(np.median([getattr(request, name) for request in requests])) for name in ("num_prompt", "num_output")
        )
        return prompt + output // 2

    def shortest(self) -> int:
        """Tokens of the shortest request that can be drawn."""
        if self.traffic is not None:
            return sum(int(lengths.numbers[-2:][0]) for lengths in (self.traffic.prompts, self.traffic.outputs))
        assert self.trace is not None
        return int((self.trace.input_lens + self.trace.output_lens).min())

    def longest(self) -> int:
        """Tokens of the longest request that can be drawn."""
        if self.traffic is not None:
            return int(self.traffic.prompts.numbers[-1] + self.traffic.outputs.numbers[-1])
        assert self.trace is not None
        return int((self.trace.input_lens + self.trace.output_lens).max())


def parse_workload(text: str) -> Workload:
    """A kind by name, PROMPTS/OUTPUTS with lengths as `Lengths` writes them, or a CSV file as `Trace` reads it.

    Raises ValueError for any other text.
    """
    if text in TRAFFIC:
        return Workload(name=text, traffic=TRAFFIC[text])
    if text.endswith(".csv"):
        path = Path(text).expanduser()
        if not path.is_file():
            raise ValueError(f"--workload {text}: there is no such file")
        return Workload(name=path.name, traffic=None, trace=Trace.read(path))
    prompts, slash, outputs = text.partition("/")
    if not slash:
        raise ValueError(
            f"--workload {text}: it is one of {', '.join(TRAFFIC)}, PROMPTS/OUTPUTS (1800/128) or a .csv file"
        )
    try:
        return Workload(name=text, traffic=Traffic(prompts=Lengths.parse(prompts), outputs=Lengths.parse(outputs)))
    except ValueError as error:
        raise ValueError(f"--workload {text}: {error}") from error


def arriving(requests: list[SimulatedRequest], rate: float) -> list[SimulatedRequest]:
    """The requests as a Poisson process of `rate` per second. Another rate only stretches the same arrivals."""
    times = arrival_times(len(requests), rate=1.0, burstiness=1.0, random=np.random.default_rng(1)) / rate
    return [replace(request, arrival_s=float(at)) for request, at in zip(requests, times, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Limits in milliseconds that so many per cent of the requests (for `itl_ms`: of the gaps) must keep."""

    limits: dict[str, float]
    percentile: float = DEFAULT_PERCENTILE

    @classmethod
    def of(cls, targets: Targets) -> Objectives:
        """The engine's own targets."""
        limits = {"itl_ms": targets.itl_ms, "ttft_ms": targets.ttft_ms}
        return cls(
            limits={name: limit for name, limit in limits.items() if limit is not None},
            percentile=100 * targets.percentile,
        )

    def met(self, figures: dict[str, float]) -> bool:
        """`figures`: the percentile of each metric."""
        return all(figures[name] <= limit for name, limit in self.limits.items())

    def described(self, judged: str) -> str:
        """The limits of the figures that are judged: `p95`, or `mean`."""
        limits = ", ".join(f"{name.removesuffix('_ms').upper()} {limit:g} ms" for name, limit in self.limits.items())
        return f"{judged} within {limits}"


def parse_objectives(text: str) -> Objectives:
    """`ttft_ms=500,tpot_ms=40`, optionally with `percentile=99`. Raises ValueError for any other text."""
    limits: dict[str, float] = {}
    percentile = DEFAULT_PERCENTILE
    for item in text.split(","):
        name, _, value = item.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name == "percentile" and 0 < number < 100:
            percentile = number
        elif name in METRICS and 0 < number < float("inf"):
            limits[name] = number
        else:
            raise ValueError(f"--slo {item}: it is {', '.join(METRICS)} and milliseconds, or percentile=95")
    if not limits:
        raise ValueError(f"--slo {text}: it needs at least one of {', '.join(METRICS)}")
    return Objectives(limits=limits, percentile=percentile)
