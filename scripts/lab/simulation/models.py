"""Several models on few chips, in simulated time: in one engine, in processes that sleep and wake up, or apart."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from scripts.lab.simulation.machine import Machine, Served, SimulatedEngine, SimulatedRequest, simulate


@dataclass(kw_only=True)
class Fleet:
    """What came of a run."""

    served: list[Served] = field(default_factory=list)
    num_changes: int = 0  # copies of a model's weights to a device

    def share_within(self, ttft_s: float, tpot_s: float) -> float:
        """The share of the requests whose first token, and whose other tokens in the mean, came in time."""
        good = [each.ttft <= ttft_s and (each.tpot or 0.0) <= tpot_s for each in self.served]
        return sum(good) / len(good)

    def percentiles(self, *points: float) -> tuple[list[float], list[float]]:
        """Of the times to the first token, and of the times per output token, in seconds."""
        ttft = [each.ttft for each in self.served]
        tpot = [each.tpot for each in self.served if each.tpot is not None]
        return np.percentile(ttft, points).tolist(), np.percentile(tpot or [0.0], points).tolist()


def among(requests: Sequence[SimulatedRequest], num_models: int, *, zipf: float = 0.0) -> list[SimulatedRequest]:
    """The requests, each with a model. The model of rank k gets a share in proportion to 1 / k ** `zipf`; 0: evenly."""
    shares = 1 / np.arange(1, num_models + 1) ** zipf
    drawn = np.random.default_rng(2).choice(num_models, len(requests), p=shares / shares.sum())
    return [replace(request, model=model) for request, model in zip(requests, drawn.tolist(), strict=True)]


def together(requests: Sequence[SimulatedRequest], machine: Machine) -> Fleet:
    """One engine serves all models. `machine` says how many are on the device at once."""
    result = simulate(requests, machine)
    return Fleet(served=result.served, num_changes=result.num_brought)


def apart(requests: Sequence[SimulatedRequest], machine: Machine, num_models: int) -> Fleet:
    """Each model has an engine with chips of its own."""
    fleet = Fleet()
    for model in range(num_models):
        own = [replace(request, model=0) for request in requests if request.model == model]
        fleet.served += simulate(own, machine).served
    return fleet


def asleep(
    requests: Sequence[SimulatedRequest], machine: Machine, num_models: int, *, wake_s: float, turn_s: float
) -> Fleet:
    """Each model has an engine, of which one is awake at a time and has the chips. Requests of the others wait.

    The engine that is awake takes requests until another model has one and `turn_s` have passed, or until it is idle
    then. It ends those that it has, and the model whose request has waited longest wakes up.

    Args:
        wake_s: seconds in which its weights come to the chips.
    """
    waiting: list[deque[tuple[int, SimulatedRequest]]] = [deque() for _ in range(num_models)]
    for number, request in enumerate(requests):
        waiting[request.model].append((number, replace(request, model=0)))
    engines = [SimulatedEngine(machine) for _ in range(num_models)]
    fleet, awake, now = Fleet(), requests[0].model, 0.0

    def first(model: int) -> float:
        """When the first of its waiting requests has arrived or will arrive."""
        return waiting[model][0][1].arrival_s if waiting[model] else math.inf

    while True:
        engine, own = engines[awake], waiting[awake]
        other_s = min((first(model) for model in range(num_models) if model != awake), default=math.inf)
        engine.now = max(engine.now, now)
        stop_s = max(now + turn_s, other_s)
        while own and first(awake) <= stop_s:
            if first(awake) > engine.now:
                engine.run_until(first(awake))
                if engine.is_idle and max(engine.now, other_s) < first(awake):
                    break
            engine.add(*own.popleft())
        engine.run_until(math.inf)
        if not any(waiting):
            break
        now = max(engine.now, other_s) + wake_s
        awake = min(range(num_models), key=first)
        fleet.num_changes += 1
    for engine in engines:
        fleet.served += engine.finish().served
    return fleet
