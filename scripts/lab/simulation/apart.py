"""Prefill apart from decode, in simulated time: some engines compute prompts, others fetch their pages and decode."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from batcher.request import RequestOutput
from batcher.scheduling.request_state import RequestState
from scripts.lab.simulation.machine import Machine, Result, SimulatedEngine, SimulatedRequest


def simulate_apart(
    requests: Sequence[SimulatedRequest], machine: Machine, *, num_prefill: int, num_decode: int, page_s: float
) -> Result:
    """Runs a workload to its end. Requests take turns with the engines of each kind.

    Args:
        requests: in the order of their arrival.
        page_s: seconds in which a decode engine fetches a page.

    Returns the totals of all decode engines; the times of a request are from its arrival at the prefill engine.
    """
    computed: list[tuple[float, int]] = []  # when and which prompt
    for first in range(num_prefill):
        engine = SimulatedEngine(machine)
        for number in range(first, len(requests), num_prefill):
            engine.add(number, replace(requests[number], num_output=1, max_tokens=1))

        def hear(sequence: RequestState, _output: RequestOutput, engine: SimulatedEngine = engine) -> None:
            computed.append((engine.now, int(sequence.request_id)))

        engine.run_until(math.inf, hear)
    computed.sort()
    total = Result()
    for first in range(num_decode):
        _decode(computed[first::num_decode], requests, SimulatedEngine(machine, fetched_page_s=page_s), total)
    return total


def _decode(
    computed: Sequence[tuple[float, int]],
    requests: Sequence[SimulatedRequest],
    engine: SimulatedEngine,
    total: Result,
) -> None:
    """Runs a decode engine to its end, and adds its figures."""
    ended: list[int] = []
    for time_s, number in computed:
        engine.add(number, replace(requests[number], arrival_s=time_s))

    def hear(sequence: RequestState, output: RequestOutput) -> None:
        if output.finish_reason is not None:
            ended.append(int(sequence.request_id))

    engine.run_until(math.inf, hear)
    result = engine.finish()
    served = zip(result.served, ended, strict=True)
    total.served += [replace(times, arrived_s=requests[number].arrival_s) for times, number in served]
    total.ttft += [times.ttft for times in total.served[-len(ended) :]]
    total.itl += result.itl
    total.output_tokens += result.output_tokens
    total.seconds = max(total.seconds, result.seconds)
