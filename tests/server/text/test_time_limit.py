from __future__ import annotations

import contextlib
import threading
import time

import pytest

from server.text.time_limit import Overtime, time_limit


def test_a_loop_without_an_end_is_ended():
    def spin() -> None:
        with time_limit(0.05):
            while True:
                with contextlib.suppress(Exception):  # what the work itself catches is not the limit
                    sum(range(100))

    with pytest.raises(Overtime):
        spin()


def test_it_ends_the_thread_that_works_and_no_other():
    ended = []

    def spin(seconds: float) -> None:
        try:
            with time_limit(seconds):
                while True:
                    pass
        except Overtime:
            ended.append(seconds)

    threads = [threading.Thread(target=spin, args=(seconds,)) for seconds in (1.0, 0.05)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ended == [0.05, 1.0]


def test_what_comes_after_the_work_hears_nothing_of_the_limit():
    """A limit so short that it passes while its block is entered or left."""
    for _ in range(200):
        with contextlib.suppress(Overtime), time_limit(0.0002):
            pass
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        pass


def test_the_works_own_error_comes_through():
    with pytest.raises(ZeroDivisionError), time_limit(10):
        1 / 0  # noqa: B018
