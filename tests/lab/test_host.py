from __future__ import annotations

import pytest

from scripts.lab.host import measure


@pytest.mark.parametrize("arrivals", [False, True])
def test_the_host_benchmark_runs(arrivals: bool) -> None:
    figures = measure(4, 50, arrivals=arrivals)
    assert figures.keys() == {"schedule", "pack", "complete", "send", "parts"}
    assert all(0 < part.median <= part.p99 and part.mean > 0 for part in figures.values())
