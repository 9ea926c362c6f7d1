"""What a bench measures of a server that it has started: rows of a table, in several rounds."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import uvloop

from scripts.lab.load.client import Outcome, run
from scripts.lab.load.metrics import summary
from scripts.lab.load.servers import ForeignLoad, Server
from scripts.lab.load.workload import BenchRequest
from scripts.lab.tables import ratio


@dataclass(kw_only=True)
class Measured:
    """One row in one round, or in all of them."""

    outcomes: list[Outcome]  # of the streams
    visits: list[Outcome]
    seconds: float
    foreign_cores: float
    counts: dict[str, float] = field(default_factory=dict)  # by how much some of the server's counters have grown

    def results(self) -> dict[str, Any]:
        """Figures of the streams, and of the visitors if there are any."""
        found = summary(self.outcomes, self.seconds) | {"foreign_cores": self.foreign_cores} | self.counts
        return found | ({"visitors": summary(self.visits, self.seconds)} if self.visits else {})


def measure(
    server: Server,
    requests: Sequence[BenchRequest],
    *,
    max_concurrency: int,
    send_until_s: float = math.inf,
    visits: Sequence[BenchRequest] = (),
    arrivals: Sequence[float] | np.ndarray = (),
) -> Measured:
    """Keeps so many streams in flight, while visitors arrive at these seconds."""

    async def load() -> tuple[tuple[list[Outcome], float], tuple[list[Outcome], float]]:
        return await asyncio.gather(
            run(server.target, requests, arrivals=None, max_concurrency=max_concurrency, send_until_s=send_until_s),
            run(server.target, visits, arrivals=arrivals, max_concurrency=max(1, len(visits))),
        )

    foreign = ForeignLoad(server.process)
    (outcomes, seconds), (visited, _) = uvloop.run(load())
    return Measured(outcomes=outcomes, visits=visited, seconds=seconds, foreign_cores=foreign.cores())


def together(parts: Sequence[Measured]) -> Measured:
    """All rounds of a row as one."""
    seconds = sum(part.seconds for part in parts)
    return Measured(
        outcomes=[outcome for part in parts for outcome in part.outcomes],
        visits=[outcome for part in parts for outcome in part.visits],
        seconds=seconds,
        foreign_cores=sum(part.foreign_cores * part.seconds for part in parts) / seconds,
        counts={name: sum(part.counts.get(name, 0) for part in parts) for part in parts for name in part.counts},
    )


def figure(result: dict[str, Any], metric: str) -> float | None:
    """`output tokens/s` of a row, or a latency's percentile, such as `ITL p99`."""
    if metric == "output tokens/s":
        return result["output_tokens_per_s"]
    latency, percentile = metric.split()
    return (result[f"{latency.lower()}_ms"] or {}).get(percentile)


def ratio_of_rounds(text: str, metric: str, above: Sequence[Measured], below: Sequence[Measured]) -> str:
    """A line with the quotient over all rounds, followed by the least and the greatest of a round."""
    figures = ([figure(part.results(), metric) for part in parts] for parts in (above, below))
    rounds = [a / b for a, b in zip(*figures, strict=True) if a and b]
    spread = f" ({min(rounds):.3f} to {max(rounds):.3f} in {len(rounds)} rounds)" if rounds else ""
    whole = (figure(together(parts).results(), metric) for parts in (above, below))
    return ratio(f"{text} ({metric})", *whole) + spread
