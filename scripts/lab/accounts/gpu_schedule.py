"""A model of one kernel's launch on a GPU: CTAs take units of work, and share the memory's bandwidth.

A unit has bytes that come from memory, and a time that it takes a CTA at least, however fast the memory is. The CTAs
that run at the same time get the bandwidth in proportion to what they could use. Between two events (a CTA starts,
a unit ends) all rates are constant, so the model is exact in itself. What it leaves out: the L2 cache (the caller says
which bytes come from memory), bank conflicts, clocks that fall, and everything else on the chip.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One of the works of a persistent CTA."""

    bytes: float  # from memory
    alone_s: float  # at least, while it is loading


@dataclass(frozen=True, kw_only=True)
class Launch:
    """One kernel's launch, with as many persistent CTAs as the chip runs at once. They take the units in rounds of
    alternating direction."""

    units: Sequence[Unit]
    slots: int  # CTAs
    start_s: float  # of a CTA, before its first bytes arrive
    between_s: float  # after each unit, before the CTA's next one loads


def seconds(launch: Launch, bytes_per_s: float) -> float:
    """How long the launch takes."""
    rounds = [0] * launch.slots

    def next_of(cta: int) -> Unit | None:
        turn = rounds[cta]
        rounds[cta] += 1
        index = turn * launch.slots + (cta if turn % 2 == 0 else launch.slots - 1 - cta)
        return launch.units[index] if index < len(launch.units) else None

    waiting: list[tuple[float, int, Unit]] = []  # when it begins to load
    bytes_left, alone_left, ctas = np.zeros(0), np.zeros(0), np.zeros(0, int)
    now = end = 0.0
    for cta in range(launch.slots):
        if (unit := next_of(cta)) is not None:
            heapq.heappush(waiting, (launch.start_s, cta, unit))
    while waiting or len(ctas):
        # A share 1 of the time alone is done per `alone_left`; those that load share what the memory gives.
        demand = (bytes_left / np.maximum(alone_left, 1e-12)).sum() if len(ctas) else 0.0
        speed = np.where(bytes_left > 0, min(1.0, bytes_per_s / demand) if demand else 1.0, 1.0)
        finish = now + (alone_left / speed).min() if len(ctas) else np.inf
        until = min(finish, waiting[0][0] if waiting else np.inf)
        done = (until - now) * speed
        bytes_left = bytes_left * (1 - np.minimum(done / np.maximum(alone_left, 1e-12), 1.0))
        alone_left = alone_left - done
        now = until
        ended = alone_left <= 1e-12
        for cta in ctas[ended]:
            end = now + launch.between_s
            if (unit := next_of(int(cta))) is not None:
                heapq.heappush(waiting, (end, int(cta), unit))
        bytes_left, alone_left, ctas = bytes_left[~ended], alone_left[~ended], ctas[~ended]
        while waiting and waiting[0][0] <= now:
            _, cta, unit = heapq.heappop(waiting)
            bytes_left, alone_left = np.append(bytes_left, unit.bytes), np.append(alone_left, max(unit.alone_s, 1e-9))
            ctas = np.append(ctas, cta)
    return end
