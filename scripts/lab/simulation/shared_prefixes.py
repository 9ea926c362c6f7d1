"""Workloads for routers: requests that begin with one of several prefixes, and requests that share nothing."""

from __future__ import annotations

import numpy as np

from scripts.lab.load.arrivals import arrival_times
from scripts.lab.simulation.machine import SimulatedRequest


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
