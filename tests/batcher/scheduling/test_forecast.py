from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batcher.scheduling.forecast import OutputForecast
from batcher.scheduling.request_state import RequestState
from tests.batcher.harness import make_request

PAGE_SIZE = 4


def make_request_state(*, prompt: int = 1, limit: int, output: int = 0, stops: bool = True) -> RequestState:
    seq = RequestState(
        make_request("a", [3] * prompt, max_tokens=limit),
        np.full(prompt, 3, np.int32),
        limit=limit,
        stop_ids=frozenset({1} if stops else ()),
        seed=0,
        arrived_s=0.0,
        on_output=lambda _output: None,
    )
    seq.output = [5] * output
    seq.num_emitted = output
    return seq


def least_pages(forecast: OutputForecast, running: list[RequestState], sequence: RequestState) -> int:
    """The fewest pages that are expected to last if `sequence` joins `running`."""
    outlook = forecast.outlook(running, PAGE_SIZE)
    return next(pages for pages in range(1, 10**6) if outlook.fits(sequence, pages))


def simulated_peak(rows: list[tuple[int, int]]) -> int:
    """rows: (own tokens, tokens still to come). Everybody gains a token a step and leaves when none is left."""
    longest = max(left for _, left in rows)
    return max(sum(-(-(own + t) // PAGE_SIZE) for own, left in rows if left >= t) for t in range(longest + 1))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 40)), min_size=1, max_size=6))
def test_what_cannot_stop_early_is_forecast_to_its_limit(rows: list[tuple[int, int]]) -> None:
    """At least the peak of a simulation, and no more than an interval's growth above it."""
    sequences = [make_request_state(prompt=own, limit=left, stops=False) for own, left in rows]
    needed = least_pages(OutputForecast(200), sequences[:-1], sequences[-1])
    peak = simulated_peak(rows)
    assert peak <= needed
    # Intervals are at most a quarter of their distance long.
    slack = sum(-(-(left // 4 + 1) // PAGE_SIZE) for _, left in rows)
    assert needed <= peak + slack


def test_answers_of_the_length_that_was_seen_need_their_pages_and_not_their_limits() -> None:
    forecast = OutputForecast(10_000)
    for _ in range(2000):
        forecast.finished(make_request_state(limit=8000, output=40), stopped=True)
    chats = [make_request_state(prompt=100, limit=8000) for _ in range(50)]
    needed = least_pages(forecast, chats[1:], chats[0])
    each = -(-140 // PAGE_SIZE)
    assert 50 * 25 < needed < 1.15 * 50 * each


def test_requests_that_cannot_stop_teach_nothing() -> None:
    forecast, untaught = OutputForecast(1000), OutputForecast(1000)
    for _ in range(50):
        forecast.finished(make_request_state(limit=10, output=10, stops=False), stopped=False)
    probe = make_request_state(prompt=10, limit=500)
    assert least_pages(forecast, [], probe) == least_pages(untaught, [], probe)


def test_short_answers_that_were_cut_off_do_not_make_chats_look_long() -> None:
    """64 chats with the whole context as their limit fit where they would use a fifth of the pages."""
    forecast = OutputForecast(131_072)
    for _ in range(20):
        forecast.finished(make_request_state(limit=16, output=16), stopped=False)
    chats = [make_request_state(prompt=1000, limit=130_000) for _ in range(64)]
    assert forecast.outlook(chats[1:], PAGE_SIZE).fits(chats[0], 524_288 // PAGE_SIZE)


def test_an_outlook_grows_by_what_is_added() -> None:
    forecast = OutputForecast(1000)
    chats = [make_request_state(prompt=100 + i, limit=500, stops=i % 2 == 0) for i in range(6)]
    whole = forecast.outlook(chats[:5], PAGE_SIZE)
    grown = forecast.outlook(chats[:5], PAGE_SIZE)
    for _ in range(3):
        grown.add(chats[5])
        whole.extend([chats[5]])
    pages = [n for n in range(100, 2000) if whole.fits(chats[0], n)]
    assert pages == [n for n in range(100, 2000) if grown.fits(chats[0], n)]
    assert pages[0] > least_pages(forecast, chats[:5], chats[0])


def test_pages_from_the_prefix_cache_are_not_counted_twice() -> None:
    hit = make_request_state(prompt=400, limit=10, stops=False)
    plain = least_pages(OutputForecast(1000), [], hit)
    hit.num_hit_pages = 50
    assert least_pages(OutputForecast(1000), [], hit) == plain - 50


@pytest.mark.parametrize("num_running", [0, 1, 300])
def test_any_number_of_requests_may_run(num_running: int) -> None:
    chats = [make_request_state(prompt=10, limit=20) for _ in range(num_running)]
    assert (
        OutputForecast(30)
        .outlook(chats, PAGE_SIZE)
        .fits(make_request_state(prompt=10, limit=20), 8 * (num_running + 1))
    )
