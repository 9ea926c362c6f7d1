"""Routers in simulated time: on requests that begin with one of several prefixes, and on such that share nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from batcher.step_times import PerTokenEstimate
from scripts.lab.load.arrivals import arrival_times
from scripts.lab.simulation.machine import Machine, SimulatedRequest
from scripts.lab.simulation.replicas import Replicas, simulate_replicas
from scripts.lab.simulation.routers import ROUTERS

PREFIX_TOKENS, NUM_PREFIXES = 1024, 40
OUTPUT_TOKENS = 60
SEEDS = range(3)


def shared_prefixes(
    count: int, *, num_prefixes: int, prefix_len: int, tail_len: int, output_len: int, rate: float, seed: int = 0
) -> list[SimulatedRequest]:
    """Prefixes are drawn evenly, and arrivals are a Poisson process.

    Args:
        prefix_len: tokens; 0: nothing is shared.
        tail_len: tokens of a prompt's own, in the mean, and half of it at least.
        output_len: tokens, in the mean.
        rate: requests a second.
    """
    random = np.random.default_rng(seed)
    arrivals = arrival_times(count, rate=rate, burstiness=1.0, random=random)
    prefixes = random.integers(0, num_prefixes, count).tolist()
    tails = random.integers(tail_len // 2, tail_len * 3 // 2, count).tolist()
    outputs = np.maximum(1, random.poisson(output_len, count)).tolist()
    return [
        SimulatedRequest(
            arrival_s=float(arrival_s), num_prompt=prefix_len + tail, num_output=output, num_shared=prefix_len,
            prefix=prefix,
        )
        for arrival_s, prefix, tail, output in zip(arrivals, prefixes, tails, outputs, strict=True)
    ]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A workload and its machines."""

    pool: float  # of the prefixes, that one engine has pages for
    rate: float  # requests a second
    prefix_len: int = PREFIX_TOKENS
    tail_len: int = 64
    num_prefixes: int = NUM_PREFIXES
    num_engines: int = 2

    @property
    def machine(self) -> Machine:
        """A prompt of 1,000 tokens takes a tenth of a second, a step at least 8 ms."""
        num_pages = int(self.pool * NUM_PREFIXES * PREFIX_TOKENS) // 64
        return Machine(num_pages=num_pages, page_size=64, cost=PerTokenEstimate(0.008, 0.0001))


CASES = {
    "40 prefixes, two pools have all": Case(pool=0.6, rate=14.0),
    "40 prefixes, two pools have six tenths": Case(pool=0.3, rate=12.0),
    "nothing shared": Case(pool=0.6, rate=9.0, prefix_len=0, tail_len=1000),
}


@dataclass(frozen=True)
class Figures:
    """The figures of a router in a case, over all seeds."""

    runs: list[Replicas]

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that the caches had."""
        return sum(run.cached_tokens for run in self.runs) / sum(run.prompt_tokens for run in self.runs)

    @property
    def ttft(self) -> np.ndarray:
        """f64[n], seconds."""
        return np.concatenate([run.ttft for run in self.runs])

    def percentile(self, q: float) -> float:
        """A percentile of the times to the first token, in seconds."""
        return float(np.percentile(self.ttft, q))


def compare_routers(case: Case, count: int = 300) -> dict[str, Figures]:
    """Router -> its figures, with `count` requests of each seed."""
    runs: dict[str, list[Replicas]] = {name: [] for name in ROUTERS}
    for seed in SEEDS:
        requests = shared_prefixes(
            count, num_prefixes=case.num_prefixes, prefix_len=case.prefix_len, tail_len=case.tail_len,
            output_len=OUTPUT_TOKENS, rate=case.rate, seed=seed,
        )  # fmt: skip
        for name, router in ROUTERS.items():
            runs[name].append(simulate_replicas(requests, case.machine, case.num_engines, router))
    return {name: Figures(own) for name, own in runs.items()}
