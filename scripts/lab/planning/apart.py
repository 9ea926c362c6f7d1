"""Whether prefill apart from decode pays: the replicas of a plan in both layouts, under the same load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd

from scripts.lab.planning.sweep import Outcome, latencies, settled_from
from scripts.lab.planning.workload import Workload, arriving
from scripts.lab.simulation.apart import simulate_apart

NETWORK_BYTES_S = 10e9  # between two hosts: 80 % of 100 Gbit/s
SHARES = (0.25, 0.5, 0.75)  # of the replicas that compute prompts


@dataclass(frozen=True, kw_only=True)
class Apart:
    """A layout, and its latencies: metric -> percentile -> milliseconds."""

    num_prefill: int
    num_decode: int
    latencies: dict[str, dict[str, float]]


def layouts(together: Outcome, workload: Workload) -> Iterator[Apart]:
    """Some divisions of the replicas, at the rate of the outcome. None, if there is one replica or a closed loop."""
    candidate, rate = together.candidate, together.offered_per_s
    replicas, memory = candidate.num_replicas, candidate.memory
    if rate is None:
        return
    page_bytes = memory.kv_bytes / memory.num_pages * candidate.sizes.chips
    for num_prefill in sorted({round(share * replicas) for share in SHARES} - {0, replicas}):
        # The smallest number of engines in this proportion stands for all of them.
        parts = gcd(num_prefill, replicas)
        engines = replicas // parts
        drawn = workload.draw(candidate.num_requests * engines, memory.max_model_len)
        result = simulate_apart(
            arriving(drawn, rate / parts),
            candidate.machine,
            num_prefill=num_prefill // parts,
            num_decode=(replicas - num_prefill) // parts,
            page_s=page_bytes / NETWORK_BYTES_S,
        )
        yield Apart(
            num_prefill=num_prefill,
            num_decode=replicas - num_prefill,
            latencies=latencies(result, settled_from(result)[0], [float(together.judged.removeprefix("p"))]),
        )
