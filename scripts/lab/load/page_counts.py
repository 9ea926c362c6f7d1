"""A server's counts of prefixes found and of pages moved."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from scripts.flags.errors import FailedError
from scripts.lab.load.measured import Measured
from scripts.lab.load.servers import METRICS_S, Server

QUERIES, HITS = "prefix_cache_queries_total", "prefix_cache_hits_total"  # tokens
AWAY_HITS = "external_prefix_cache_hits_total"  # tokens whose pages came back to the device
FILES = "kv_offload_pages disk"
MOVED = (
    "kv_offload_saved_pages_total", "kv_offload_loaded_pages_total host", "kv_offload_loaded_pages_total disk", FILES,
)  # fmt: skip
LOST = ("kv_offload_lost_pages_total", "kv_offload_broken_pages_total", "kv_offload_unwritten_pages_total")
MOST_MOVING_S = 60.0


def counted(server: Server, load: Callable[[Server], Measured]) -> Measured:
    """What `load` measures of an idle server, and by how much the counts have grown when it is idle again."""
    before, result = server.counters(), load(server)
    after = settled(server)
    result.counts = {name: after[name] - before[name] for name in (QUERIES, HITS, AWAY_HITS, *MOVED, *LOST)}
    return result


def settled(server: Server) -> Mapping[str, float]:
    """The counters of an idle server when no page moves any more. Raises FailedError if pages move for ever."""
    deadline = time.monotonic() + MOST_MOVING_S
    found, before = server.counters(), None
    while (moved := [found[name] for name in MOVED]) != before:
        if time.monotonic() > deadline:
            raise FailedError(f"pages still move {MOST_MOVING_S:.0f} s after the last request: {dict(found)}")
        before = moved
        time.sleep(METRICS_S)
        found = server.counters()
    return found
