"""Arrival times of requests. In a closed loop a request is sent when another ends; otherwise times are independent."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, *, rate: float, burstiness: float, random: np.random.Generator) -> np.ndarray:
    """Seconds after the start at which `count` requests arrive, `rate` a second on average, the first at 0.

    Gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process, below 1 comes in bursts, above 1 is
    more regular. An infinite rate sends everything at once.

    Raises:
        ValueError: the rate or the burstiness is not positive.
    """
    if not rate > 0 or not burstiness > 0:
        raise ValueError(f"must be positive: {rate=} {burstiness=}")
    if math.isinf(rate):
        return np.zeros(count)
    gaps = random.gamma(shape=burstiness, scale=1.0 / (rate * burstiness), size=count)
    gaps[:1] = 0.0
    return np.cumsum(gaps)


def at_rate(times: np.ndarray, rate: float) -> np.ndarray:
    """Recorded arrivals in seconds, ascending, stretched or shortened to `rate` a second on average."""
    span = float(times[-1] - times[0])
    return (times - times[0]) * ((len(times) - 1) / span / rate if span else 0.0)
