from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.forecast import OutputForecast, peak_pages
from batcher.sequence import Sequence
from tests.batcher.harness import make_request


def make_sequence(*, limit: int, output: int = 0, stops: bool = True) -> Sequence:
    seq = Sequence(
        make_request("a", [3], max_tokens=limit),
        np.array([3], np.int32),
        limit=limit,
        stop_ids=frozenset({1} if stops else ()),
        seed=0,
        arrived_s=0.0,
        on_output=lambda _output: None,
    )
    seq.output = [5] * output
    seq.num_emitted = output
    return seq


@pytest.mark.parametrize(
    ("own_tokens", "remaining", "expected"),
    [
        ([4], [4], 2),
        ([4], [5], 3),
        ([4, 4], [4, 4], 4),
        # When the second ends they hold 5 + 4 tokens (2 + 1 pages); when the first does, it alone holds 12 (3 pages).
        ([4, 3], [8, 1], 3),
        # The short one has gone by the time the long one is at its longest: 3 + 4 pages, then 4; never 4 + 4.
        ([1, 8], [15, 8], 7),
    ],
)
def test_the_peak_by_hand(own_tokens: list[int], remaining: list[int], expected: int) -> None:
    assert peak_pages(np.array(own_tokens), np.array(remaining), 4) == expected


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_the_peak_is_that_of_a_simulation(rows: list[tuple[int, int]], page_size: int) -> None:
    own, remaining = (np.array(column) for column in zip(*rows, strict=True))
    in_use = [sum(-(-(o + t) // page_size) for o, r in rows if (r >= t)) for t in range(int(remaining.max()) + 1)]
    assert peak_pages(own, remaining, page_size) == max(in_use)


def test_the_peak_of_many_is_that_of_a_simulation() -> None:
    rng = np.random.default_rng(0)
    own, remaining = rng.integers(1, 300, 200), rng.integers(0, 300, 200)
    in_use = [(-(-(own + t) // 64))[remaining >= t].sum() for t in range(300)]
    assert peak_pages(own, remaining, 64) == max(in_use)


def test_what_cannot_stop_early_is_forecast_exactly() -> None:
    assert OutputForecast().remaining([make_sequence(limit=100, output=30, stops=False)]) == [70]


def test_the_forecast_follows_what_finished_requests_used_and_jumps_at_a_preemption() -> None:
    forecast = OutputForecast()
    assert forecast.remaining([make_sequence(limit=100, output=20), make_sequence(limit=9)]).tolist() == [40, 5]
    forecast.finished(make_sequence(limit=100, output=10))
    assert forecast.share == pytest.approx(0.3)  # the mean of the start and the first
    for _ in range(200):
        forecast.finished(make_sequence(limit=100, output=10))
    assert forecast.share == pytest.approx(0.1, abs=0.01)
    forecast.finished(make_sequence(limit=10, output=10, stops=False))  # says nothing about those that may stop
    assert forecast.share == pytest.approx(0.1, abs=0.01)
    before = forecast.share
    forecast.preempted()
    assert forecast.share > 1.2 * before
    for _ in range(30):
        forecast.preempted()
    assert forecast.share == 1.0
