from __future__ import annotations

import pytest

from scripts.lab.host import PARTS, TIERS, measure
from scripts.lab.load.tiers import Tier


@pytest.mark.parametrize("arrivals", [False, True])
def test_the_host_benchmark_runs(arrivals: bool) -> None:
    benches = measure(4, 600, TIERS, arrivals=arrivals)
    for bench in benches.values():
        figures = bench.figures()
        assert figures.keys() == {*PARTS, "parts"}
        assert all(0 < part.median <= part.p99 and part.mean > 0 for part in figures.values())
    moved = {tier: (bench.counts().num_saved > 0, bench.counts().num_loaded > 0) for tier, bench in benches.items()}
    both = (arrivals, arrivals)
    assert moved == {Tier.OFF: (False, False), Tier.HOST: both, Tier.DISK: (True, arrivals)}
