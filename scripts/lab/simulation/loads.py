"""Loads that arrive over time: production traces, bursts, long prompts among chats, agents that come back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from scripts.lab.load.arrivals import arrival_times, at_rate
from scripts.lab.load.lengths import Trace
from scripts.lab.load.presets import TRAFFIC
from scripts.lab.simulation.machine import SimulatedRequest

CONTEXT = 32_768  # tokens of the longest request that a load has
LONG_PROMPT, LONG_OUTPUT, LONG_EVERY = 30_000, 100, 25  # tokens, and one such request among so many
LONG_TTFT_MS = 10_000.0  # a prompt of 30,000 tokens takes a chip a second by itself
BURSTINESS = 0.1  # of arrivals, see `arrival_times`
TURNS = 8  # of an agent
PAUSE_S = (2.0, 6.0)  # from an agent's turn to its next one
FIRST_PROMPT, RESULT, CALL = (2000, 6000), (200, 1500), (20, 200)  # tokens: the range of each

Draw = Callable[[int, float], list[SimulatedRequest]]  # of a number of requests, and their rate per second


def _lengths(kind: str, count: int) -> list[SimulatedRequest]:
    random, traffic = np.random.default_rng(0), TRAFFIC[kind]
    lengths = zip(traffic.prompts.draw(count, random), traffic.outputs.draw(count, random), strict=True)
    return [SimulatedRequest(arrival_s=0.0, num_prompt=int(p), num_output=int(o)) for p, o in lengths]


def _arriving(requests: list[SimulatedRequest], times: np.ndarray) -> list[SimulatedRequest]:
    return [replace(request, arrival_s=float(at)) for request, at in zip(requests, times, strict=True)]


def _drawn(kind: str, count: int, rate: float, burstiness: float = 1.0) -> list[SimulatedRequest]:
    """Another rate only stretches the same arrivals."""
    times = arrival_times(count, rate=1.0, burstiness=burstiness, random=np.random.default_rng(1)) / rate
    return _arriving(_lengths(kind, count), times)


def _recorded(trace: Trace, count: int, rate: float) -> list[SimulatedRequest]:
    window = trace.window(0, count)
    lengths = zip(window.input_lens.tolist(), window.output_lens.tolist(), strict=True)
    requests = [SimulatedRequest(arrival_s=0.0, num_prompt=p, num_output=o) for p, o in lengths]
    return _arriving(requests, at_rate(window.arrival_s, rate))


def long_prompts_among_chats(count: int, rate: float) -> list[SimulatedRequest]:
    """Every 25th request has a prompt of 30,000 tokens, and ten seconds for its first token."""
    chats = _drawn("chat", count, rate)
    for i in range(LONG_EVERY - 1, count, LONG_EVERY):
        chats[i] = replace(chats[i], num_prompt=LONG_PROMPT, num_output=LONG_OUTPUT, ttft_ms=LONG_TTFT_MS)
    return chats


def agents(count: int, rate: float) -> list[SimulatedRequest]:
    """Agents begin as a Poisson process. Each sends its whole history again, and what a tool has answered; more of them
    come at a higher rate, and their pauses stay."""
    random = np.random.default_rng(0)
    before_s = TURNS * sum(PAUSE_S) / 2  # they began so long before, and have no pages from then
    num_agents = -(-count // TURNS) * 2 + int(before_s * rate / TURNS)
    begins = arrival_times(num_agents, rate=1.0, burstiness=1.0, random=random) * TURNS / rate - before_s
    pauses = random.uniform(*PAUSE_S, (num_agents, TURNS)).cumsum(axis=1)
    results, calls = random.integers(*RESULT, (num_agents, TURNS)), random.integers(*CALL, (num_agents, TURNS))
    results[:, 0] = random.integers(*FIRST_PROMPT, num_agents)
    prompts = results.cumsum(axis=1) + calls.cumsum(axis=1) - calls
    requests = [
        SimulatedRequest(
            arrival_s=float(begins[agent] + pauses[agent, turn]), num_prompt=int(prompts[agent, turn]),
            num_output=int(calls[agent, turn]), num_shared=int(prompts[agent, turn]), prefix=agent,
        )
        for agent in range(num_agents) for turn in range(TURNS)
    ]  # fmt: skip
    return sorted((r for r in requests if r.arrival_s >= 0), key=lambda request: request.arrival_s)[:count]


def loads(traces: Mapping[str, Trace]) -> dict[str, Draw]:
    """Name -> the load. `traces` are those of "code" and "conversation"; without one its lengths are drawn from its
    distribution, and its arrivals are a Poisson process."""

    def production(kind: str, drawn: str) -> Draw:
        trace = traces.get(kind)
        if trace is None:
            return lambda count, rate: _drawn(drawn, count, rate)
        return lambda count, rate: _recorded(trace, count, rate)

    return {
        "code": production("code", "code"),
        "conversation": production("conversation", "chat"),
        "bursts": lambda count, rate: _drawn("chat", count, rate, BURSTINESS),
        "long prompts": long_prompts_among_chats,
        "agents": agents,
    }
