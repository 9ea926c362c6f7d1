"""Several engines behind a router, in simulated time: each request goes where a policy says when it arrives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from batcher.request import RequestOutput
from batcher.scheduling.request_state import RequestState
from scripts.lab.simulation.machine import Machine, SimulatedEngine, SimulatedRequest, prompt_of
from server.engine.routing import Route, Router
from server.shared_counts import Load


@dataclass(kw_only=True)
class Replicas:
    """What came of a run."""

    ttft: list[float] = field(default_factory=list)  # seconds, in the order of the first tokens
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompts
    num_sent: list[int]  # requests of each engine
    most_ahead: int = 0  # open requests of an engine that got one, beyond those of the least loaded

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that came from prefix caches."""
        return self.cached_tokens / self.prompt_tokens


def simulate_replicas(
    requests: Sequence[SimulatedRequest],
    machine: Machine,
    num_engines: int,
    kind: type[Router],
) -> Replicas:
    """Runs a workload to its end.

    Args:
        requests: in the order of their arrival.
        kind: of the router.
    """
    now = 0.0
    router = kind(page_size=machine.page_size, clock=lambda: now)
    engines = [SimulatedEngine(machine) for _ in range(num_engines)]
    num_open, num_queued = [0] * num_engines, [0] * num_engines
    routes: dict[str, Route] = {}  # of the requests without a first token
    replicas = Replicas(num_sent=[0] * num_engines)

    def advance(time_s: float) -> None:
        for number, engine in enumerate(engines):

            def hear(sequence: RequestState, output: RequestOutput, number: int = number) -> None:
                num_open[number] -= output.finish_reason is not None
                route = routes.pop(output.request_id, None)
                if route is not None:
                    num_queued[number] -= route.num_missing
                    router.learn(route, output.num_cached_tokens)
                    replicas.prompt_tokens += route.num_prompt
                    replicas.cached_tokens += output.num_cached_tokens

            engine.run_until(time_s, hear)

    for number, request in enumerate(requests):
        now = request.arrival_s
        advance(now)
        prompt = prompt_of(number, request).tobytes()
        loads = {i: Load(*load) for i, load in enumerate(zip(num_open, num_queued, strict=True))}
        route = router.choose(prompt, 0, loads)
        routes[str(number)] = route
        replicas.most_ahead = max(replicas.most_ahead, num_open[route.engine] - min(num_open))
        replicas.num_sent[route.engine] += 1
        num_open[route.engine] += 1
        num_queued[route.engine] += route.num_missing
        engines[route.engine].add(number, request)
    advance(math.inf)
    for engine in engines:
        replicas.ttft += engine.finish().ttft
    return replicas
