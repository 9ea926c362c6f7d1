from __future__ import annotations

import pytest

from scripts.lab.host import PARTS, TARGETS, TIERS, measure


@pytest.mark.parametrize("arrivals", [False, True])
def test_the_host_benchmark_runs(arrivals: bool) -> None:
    benches = measure(4, 600, TIERS, (None, TARGETS), arrivals=arrivals)
    for bench in benches.values():
        figures = bench.figures()
        assert figures.keys() == {*PARTS, "parts"}
        assert all(0 < part.median <= part.p99 and part.mean > 0 for part in figures.values())
    for targets in (None, TARGETS):
        counts = [benches[tier, targets].counts() for tier in TIERS]
        moved = [(each.num_saved > 0, each.num_loaded > 0) for each in counts]
        assert moved == [(False, False), (arrivals, arrivals), (True, arrivals)]  # off, host, disk
