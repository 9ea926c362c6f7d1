"""A step that does not return: when it counts as stuck, and what becomes of the engine."""

from __future__ import annotations

import pytest

from batcher.errors import StepTimeoutError
from batcher.step_watch import GRACE_S, TIMES_LONGEST, StepWatch


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_step_has_its_limit_and_then_a_grace(clock):
    watch = StepWatch(30.0, clock)
    assert watch.next_check() is None
    watch.dispatched()
    assert watch.next_check() == clock.now + 30
    clock.now += 29
    watch.check()
    clock.now += 1
    watch.check()  # from here on it is overdue
    assert watch.next_check() == clock.now + GRACE_S
    clock.now += GRACE_S
    with pytest.raises(StepTimeoutError, match=r"has not returned for 35\.0 s; .* took 0\.00 s \(--step-timeout"):
        watch.check()


def test_a_long_step_gives_the_next_ones_more_time(clock):
    watch = StepWatch(1.0, clock)
    watch.dispatched()
    clock.now += 2.0
    watch.returned(0)
    assert watch.next_check() is None, "nothing is in flight"
    clock.now += 100.0  # idle
    watch.dispatched()
    assert watch.next_check() == clock.now + TIMES_LONGEST * 2.0


def test_a_step_runs_from_the_return_of_the_one_before(clock):
    watch = StepWatch(10.0, clock)
    watch.dispatched()
    watch.dispatched()
    clock.now += 9
    watch.returned(1)
    assert watch.next_check() == clock.now + TIMES_LONGEST * 9
    watch = StepWatch(None, clock)
    watch.dispatched()
    assert watch.next_check() is None


def test_a_process_that_was_stopped_is_given_the_grace(clock):
    watch = StepWatch(30.0, clock)
    watch.dispatched()
    clock.now += 3600  # and the result comes right after
    watch.check()
    clock.now += 0.1
    watch.returned(0)
    watch.dispatched()
    clock.now += GRACE_S
    watch.check()
    assert watch.next_check() > clock.now + 30
