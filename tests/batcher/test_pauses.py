"""Pauses: no request runs, and what becomes of those that did depends on the mode."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue

import pytest

from batcher.change import Change, PauseMode
from batcher.errors import EngineClosedError, EngineDeadError
from batcher.request import FinishReason, Request
from tests.batcher.fake_runner import FakeRunner
from tests.batcher.harness import CAPACITY, Drive, make_request
from tests.batcher.test_engine_threads import PATIENCE_S, Listener, check, running

PROMPT = range(3, 15)
ABORT, WAIT, KEEP = PauseMode.ABORT, PauseMode.WAIT, PauseMode.KEEP


def paused(drive: Drive, mode: PauseMode, *, clear_cache: bool = True) -> list[Exception | None]:
    """A pause that is asked for, and the list in which its result will be."""
    done: list[Exception | None] = []

    def on_done(error: Exception | None) -> None:
        assert error is not None or not drive.engine.core.in_flight, "a step is in flight"
        done.append(error)

    drive.engine.pause(mode, clear_cache, on_done)
    return done


def resume(drive: Drive) -> None:
    done: list[Exception | None] = []
    drive.engine.resume(done.append)
    drive.step()
    assert done == [None]


def steps(drive: Drive, count: int) -> None:
    for _ in range(count):
        drive.step()


def step_until(drive: Drive, done: list[Exception | None]) -> None:
    for _ in range(200):
        if done:
            return
        drive.step()
    raise AssertionError("the pause was not made")


def started(count: int = 2, **config: object) -> Drive:
    drive = Drive(**config)
    for i, name in enumerate("abcdef"[:count]):
        drive.add(make_request(name, range(3 + i, 15 + i), max_tokens=20, ignore_eos=True))
    steps(drive, 6)
    assert all(0 < len(drive.heard[name].tokens) < 20 for name in "abcd"[:count])
    return drive


def test_what_is_kept_stops_where_it_is_and_goes_on():
    drive = started()
    pages = drive.engine.stats().num_pages_used
    step_until(drive, done := paused(drive, KEEP))
    assert done == [None]
    counts = {name: len(heard.tokens) for name, heard in drive.heard.items()}
    late = drive.add(make_request("late", PROMPT))
    steps(drive, 5)
    stats = drive.engine.stats()
    assert {name: len(drive.heard[name].tokens) for name in counts} == counts and not late.outputs
    assert (stats.num_requests_running, stats.num_requests_waiting) == (2, 1) and stats.num_pages_used >= pages
    resume(drive)
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().num_preemptions == 0


def test_what_is_aborted_ends_with_what_it_has():
    drive = started(6)  # of which four run
    step_until(drive, done := paused(drive, ABORT))
    assert done == [None]
    for name, heard in drive.heard.items():
        assert heard.finish_reason is FinishReason.ABORT and heard.last.by_pause and heard.last.error is None
        assert len(heard.tokens) == 0 if name in "ef" else 0 < len(heard.tokens) < 20
    drive.check_outputs()
    late = drive.add(make_request("late", PROMPT))
    steps(drive, 5)
    assert not late.outputs
    resume(drive)
    drive.finish()
    assert late.tokens == drive.expected("late")


def test_what_runs_ends_before_a_pause_that_waits_for_it():
    drive = started(6)
    done = paused(drive, WAIT)
    drive.step()
    late = drive.add(make_request("late", PROMPT))
    step_until(drive, done)
    assert done == [None]
    ended = {name for name, heard in drive.heard.items() if heard.finish_reason is FinishReason.LENGTH}
    assert ended == set("abcd") and not drive.heard["e"].outputs and not late.outputs
    assert drive.engine.stats().num_requests_waiting == 3
    steps(drive, 3)
    assert not late.outputs
    resume(drive)
    drive.finish()
    drive.check_outputs()


def test_requests_that_are_computed_again_end_before_the_pause_too():
    """A change preempts all four that run. They come back although others, which must not start, came before."""
    drive = started(6)
    done = paused(drive, WAIT)
    drive.step()
    drive.engine.change(Change(work=lambda: None, on_done=lambda _error: None))
    step_until(drive, done)
    assert done == [None] and drive.engine.stats().num_preemptions == 4
    assert {name for name, heard in drive.heard.items() if heard.finish_reason} == set("abcd")
    resume(drive)
    drive.finish()
    drive.check_outputs()


def test_requests_that_are_held_back_may_be_aborted_and_expire():
    drive = started()
    done = paused(drive, WAIT)
    drive.step()
    aborted = drive.add(make_request("aborted", PROMPT))
    expired = drive.add(make_request("expired", PROMPT, deadline_s=5.0))
    drive.step()
    drive.engine.abort("aborted")
    drive.clock.now = 6.0
    step_until(drive, done)
    assert aborted.finish_reason is FinishReason.ABORT and not aborted.last.by_pause
    assert "waited longer" in expired.last.error
    resume(drive)
    drive.finish()


def test_a_resume_ends_a_pause_that_waits():
    drive = started()
    done = paused(drive, WAIT)
    drive.step()
    drive.add(make_request("late", PROMPT))
    drive.step()
    resume(drive)
    assert "resumed" in str(done[0]) and isinstance(done[0], ValueError)
    drive.finish()
    drive.check_outputs()


@pytest.mark.parametrize("first", [WAIT, KEEP])
def test_a_second_pause_may_be_stricter(first):
    drive = started()
    done = paused(drive, first)
    drive.step()
    step_until(drive, second := paused(drive, ABORT))
    assert done == second == [None]
    assert {heard.finish_reason for heard in drive.heard.values()} == {FinishReason.ABORT}
    resume(drive)
    assert drive.engine.num_live == 0


def test_what_was_kept_ends_if_a_second_pause_waits_for_it():
    drive = started()
    step_until(drive, paused(drive, KEEP))
    step_until(drive, done := paused(drive, WAIT))
    assert done == [None]
    assert drive.heard["a"].tokens == drive.expected("a")


@pytest.mark.parametrize("clear_cache", [True, False])
def test_the_prefix_cache_is_emptied_if_asked_for(clear_cache):
    drive = Drive()
    drive.add(make_request("a", PROMPT))
    drive.finish()
    step_until(drive, paused(drive, WAIT, clear_cache=clear_cache))
    resume(drive)
    heard = drive.add(make_request("b", PROMPT))
    drive.finish()
    assert (max(output.num_cached_tokens for output in heard.outputs) == 0) == clear_cache


def test_changes_are_made_during_a_pause_and_do_not_end_it():
    drive = started()
    step_until(drive, paused(drive, KEEP))
    done: list[Exception | None] = []
    for serves_after in (True, False, True):
        drive.engine.change(Change(work=lambda: None, on_done=done.append, serves_after=partial(bool, serves_after)))
    counts = [len(heard.tokens) for heard in drive.heard.values()]
    steps(drive, 5)
    assert done == [None] * 3 and [len(heard.tokens) for heard in drive.heard.values()] == counts
    resume(drive)
    drive.finish()
    drive.check_outputs()


def test_a_pause_that_is_not_made_is_answered_at_the_end():
    drive = started()
    done = paused(drive, WAIT)
    drive.step()
    late = paused(drive, WAIT)
    drive.engine.shutdown()
    assert isinstance(done[0], EngineClosedError) and isinstance(late[0], EngineClosedError)
    with pytest.raises(EngineClosedError):
        drive.engine.resume(print)


def test_a_pause_is_answered_if_the_engine_dies():
    def lose_device() -> None:
        raise RuntimeError("the device is lost")

    drive = started()
    done = paused(drive, WAIT)
    drive.step()
    drive.engine.change(Change(work=lose_device, on_done=lambda _error: None))
    with pytest.raises(EngineDeadError):
        steps(drive, 5)
    assert [type(error) for error in done] == [EngineDeadError]


@pytest.mark.parametrize("mode", PauseMode)
def test_no_step_runs_in_a_pause_while_many_threads_ask(mode):
    listener, answers = Listener(), SimpleQueue()
    requests = [make_request(f"{i}", range(10 + i % 7, 18 + i % 23), max_tokens=15) for i in range(48)]
    with running(FakeRunner(CAPACITY)) as engine:

        def client(mine: list[Request]) -> None:
            for request in mine:
                engine.add_request(request, listener)
                listener.end(request.request_id)

        clients = [threading.Thread(target=client, args=(requests[i::6],)) for i in range(6)]
        for thread in clients:
            thread.start()
        for _ in range(20):
            engine.pause(mode, True, answers.put)
            assert answers.get(timeout=PATIENCE_S) is None
            num_steps = engine.stats().num_steps
            engine.reset_prefix_cache()
            engine.pause(KEEP, False, answers.put)
            assert answers.get(timeout=PATIENCE_S) is None
            assert engine.stats().num_steps == num_steps
            engine.resume(answers.put)
            assert answers.get(timeout=PATIENCE_S) is None
        for thread in clients:
            thread.join(PATIENCE_S)
        ends = {request.request_id: listener.end(request.request_id) for request in requests}
        whole = [request for request in requests if not ends[request.request_id].by_pause]
        assert mode is ABORT or len(whole) == len(requests)
        check(whole, listener)
