"""Changes of what the device holds, between two steps: requests are computed again, and go on."""

from __future__ import annotations

from functools import partial

import pytest

from batcher.change import Change
from batcher.errors import EngineDeadError
from tests.batcher.harness import Drive, make_request


def changed(drive: Drive, error: Exception | None = None, *, serves_after: bool = True) -> list[Exception | None]:
    """A change that waits to be made, and the list in which its result will be."""
    done: list[Exception | None] = []

    def work() -> None:
        assert not drive.engine.core.in_flight, "a step is in flight"
        if error is not None:
            raise error

    drive.engine.change(Change(work=work, on_done=done.append, serves_after=partial(bool, serves_after)))
    return done


def step_until(drive: Drive, done: list[Exception | None]) -> None:
    for _ in range(10):
        if done:
            return
        drive.step()
    raise AssertionError("the change was not made")


@pytest.mark.parametrize("error", [None, ValueError("not these weights")])
def test_running_requests_are_computed_again_and_go_on(error):
    drive = Drive()
    for name in "ab":
        drive.add(make_request(name, range(3, 15), max_tokens=20))
    for _ in range(4):
        drive.step()
    assert 0 < len(drive.heard["a"].tokens) < 20
    done = changed(drive, error)
    step_until(drive, done)
    assert done == [error]
    drive.finish()
    drive.check_outputs()
    assert drive.heard["a"].tokens == drive.expected("a")


def test_no_later_prompt_finds_pages_from_before_a_change():
    drive = Drive()
    for name in "ab":
        heard = drive.add(make_request(name, range(3, 15)))
        drive.finish()
    assert max(output.num_cached_tokens for output in heard.outputs) > 0
    step_until(drive, changed(drive))
    heard = drive.add(make_request("c", range(3, 15)))
    drive.finish()
    assert max(output.num_cached_tokens for output in heard.outputs) == 0


def test_requests_wait_while_the_device_cannot_serve():
    drive = Drive()
    drive.add(make_request("running", range(3, 15), max_tokens=20))
    for _ in range(4):
        drive.step()
    step_until(drive, changed(drive, serves_after=False))
    num_tokens = len(drive.heard["running"].tokens)
    arrived = drive.add(make_request("arrived", range(3, 9)))
    expired = drive.add(make_request("expired", range(3, 9), deadline_s=5.0))
    aborted = drive.add(make_request("aborted", range(3, 9)))
    drive.engine.abort("aborted")
    drive.clock.now = 6.0
    for _ in range(5):
        drive.step()
    assert not arrived.outputs and len(drive.heard["running"].tokens) == num_tokens
    assert "waited longer" in expired.last.error and aborted.finish_reason == "abort"
    step_until(drive, changed(drive))
    drive.finish()
    for name in ("running", "arrived"):
        assert drive.heard[name].tokens == drive.expected(name)


def test_steps_go_on_after_a_second_half_that_has_failed():
    drive = Drive()
    drive.add(make_request("a", range(3, 15), max_tokens=20))
    step_until(drive, changed(drive, serves_after=False))
    drive.step()
    assert not drive.heard["a"].tokens
    step_until(drive, changed(drive, ValueError("no room: the old weights are back")))
    drive.finish()
    assert drive.heard["a"].tokens == drive.expected("a")


def test_an_error_that_is_not_of_the_caller_ends_the_engine():
    drive = Drive()
    done = changed(drive, RuntimeError("the device is lost"))
    with pytest.raises(EngineDeadError, match="the device is lost"):
        step_until(drive, done)
    assert len(done) == 1


def test_a_shutdown_answers_the_changes_that_wait():
    drive = Drive()
    done = changed(drive)
    drive.engine.shutdown()
    assert "shutting down" in str(done[0])
