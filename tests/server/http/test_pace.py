"""Which client is too slow, by a clock of the test's own."""

from __future__ import annotations

import pytest

from server.http.connections import MIN_BODY_RATE, BodyPace, UnreadWatch


def test_a_body_may_pause_for_its_time_once_enough_has_come():
    pace = BodyPace(10.0, now=100.0)
    assert pace.left_s(now=100.0) == 10
    pace.on_bytes(10 * MIN_BODY_RATE, now=105.0)
    assert pace.left_s(now=105.0) == 10
    assert pace.left_s(now=116.0) == -1


@pytest.mark.parametrize("burst", [1, 5 * 2**20])
@pytest.mark.parametrize("rate", [1, 1000])
def test_a_body_that_is_too_slow_now_ends_however_fast_it_began(burst, rate):
    pace = BodyPace(10.0, now=0.0)
    pace.on_bytes(burst, now=0.0)
    for second in range(1, 10):
        assert pace.left_s(now=second) > 0
        pace.on_bytes(rate, now=second)
    assert pace.left_s(now=10.1) < 0


def test_a_body_at_the_least_rate_may_take_for_ever():
    pace = BodyPace(10.0, now=0.0)
    for tenth in range(1, 10_000):
        pace.on_bytes(103, now=tenth / 10)
        assert pace.left_s(now=tenth / 10) > 0


def test_time_in_which_the_application_took_nothing_does_not_count():
    pace = BodyPace(10.0, now=0.0)
    pace.restart(now=9.0)
    assert pace.left_s(now=18.0) == 1


def test_what_becomes_less_is_read():
    watch = UnreadWatch(10.0)
    assert not watch.is_stuck(500, now=0.0)
    assert not watch.is_stuck(500, now=9.0)
    assert not watch.is_stuck(400, now=11.0)
    assert not watch.is_stuck(400, now=20.0)
    assert watch.is_stuck(400, now=21.0)


def test_whoever_has_read_everything_is_not_stuck():
    watch = UnreadWatch(10.0)
    for now in range(100):
        assert not watch.is_stuck(0, now=now)
