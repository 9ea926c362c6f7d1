"""The engine's figures of the last two minutes, which a new dashboard shows at once."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from batcher.stats import EngineStats

SPAN_S = 120
INTERVAL_S = 1.0


class StatsHistory:
    """Reads `stats` once a second while `record` runs. A reading has only the figures that the dashboard draws."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats
        self._readings: deque[tuple[float, dict[str, Any]]] = deque(maxlen=int(SPAN_S / INTERVAL_S))

    async def record(self) -> None:
        """Reads until it is cancelled."""
        while True:
            self._readings.append((time.monotonic(), figures_of(self._stats())))
            await asyncio.sleep(INTERVAL_S)

    def last(self, seconds: float) -> list[dict[str, Any]]:
        """The readings of the last `seconds`, oldest first, each with its age in seconds."""
        now = time.monotonic()
        return [{"age_s": now - at, **figures} for at, figures in self._readings if now - at <= seconds]


def figures_of(stats: EngineStats) -> dict[str, Any]:
    """The figures that the dashboard draws over time."""
    return {
        "running": stats.num_requests_running,
        "waiting": stats.num_requests_waiting,
        "pages": stats.num_pages,
        "pages_used": stats.num_pages_used,
        "pages_reusable": stats.num_pages_reusable,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "num_steps": stats.num_steps,
        "time_to_first_token": {"counts": stats.time_to_first_token.counts},
        "inter_token_latency": {"counts": stats.inter_token_latency.counts},
    }
