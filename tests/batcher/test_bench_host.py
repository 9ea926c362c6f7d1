from __future__ import annotations

import pytest

from scripts.bench_host import measure


@pytest.mark.parametrize("arrivals", [False, True])
def test_the_host_benchmark_runs(arrivals: bool) -> None:
    figures = measure(4, 50, arrivals=arrivals)
    assert figures.keys() == {"schedule", "pack", "complete", "step"}
    assert all(median > 0 and mean > 0 for median, mean in figures.values())
