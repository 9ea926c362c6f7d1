"""Requests with LoRA adapters in the engine: staging, failures and changes. Among several models: `test_models`."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.change import Change
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.errors import InvalidRequestError
from batcher.request import ErrorCode, FinishReason, Request
from batcher.step import WeightsKind
from tests.batcher.fake_runner import FakeRunner, expected_tokens
from tests.batcher.harness import EOS, Drive, make_capacity, make_request
from tests.batcher.test_engine_threads import PATIENCE_S, Gate, Listener

CAPACITY = make_capacity(max_loras=2)


def make_drive(max_loras: int = 2, on_stage: Callable[[int], None] | None = None, **config: object) -> Drive:
    capacity = make_capacity(max_loras=max_loras)
    return Drive(capacity, runner=FakeRunner(capacity, on_stage=on_stage), **config)


def request(name: str, adapter: int, num_tokens: int = 6, first: int = 10, **options: object) -> Request:
    return make_request(
        name, range(first, first + 9), max_tokens=num_tokens, ignore_eos=True, adapter=adapter, **options
    )


def finish(drive: Drive) -> None:
    drive.finish()
    drive.check_outputs()


def test_steps_run_with_adapters_only_if_a_row_has_one() -> None:
    drive = make_drive()
    drive.add(request("base", 0, num_tokens=12))
    for _ in range(4):
        drive.step()
    drive.add(request("a", 1, num_tokens=4))
    finish(drive)
    kinds = [bucket.has_adapters for bucket in drive.runner.executed]
    assert kinds == [False] * 4 + [True] * 4 + [False] * (len(kinds) - 8)
    assert len(kinds) > 8


def test_without_adapters_nothing_has_changed() -> None:
    drive, other = Drive(), make_drive()
    for each in (drive, other):
        for i in range(6):
            each.add(request(str(i), 0, first=10 + i % 3))
        finish(each)
    assert drive.runner.executed == other.runner.executed
    for a, b in zip(drive.runner.steps, other.runner.steps, strict=True):
        assert (a.packed == b.packed).all()
        assert a.adapters == b.adapters == ()
    with pytest.raises(InvalidRequestError, match="--enable-lora") as caught:
        drive.engine.add_request(request("a", 1), print)
    assert caught.value.param == "adapter"


# --- the prefix cache ---


def test_prefixes_are_found_by_requests_of_their_own_adapter_only() -> None:
    drive = make_drive(max_loras=1)
    cached = []
    for i, adapter in enumerate((1, 2, 0, 1, 2, 0)):  # each adapter loses its slot to the next one
        heard = drive.add(request(str(i), adapter))
        finish(drive)
        cached.append(heard.last.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 8]


# --- staging ---


class Files:
    """Of adapters: those in `errors` cannot be read."""

    def __init__(self, **errors: Exception) -> None:
        self.errors = {int(name[1:]): error for name, error in errors.items()}
        self.asked: list[int] = []

    def __call__(self, adapter: int) -> None:
        self.asked.append(adapter)
        if adapter in self.errors:
            raise self.errors[adapter]


@pytest.mark.parametrize("error", [ValueError("it has changed since"), FileNotFoundError("no such folder")])
def test_requests_of_an_adapter_that_cannot_be_read_end_with_an_error(error: Exception) -> None:
    files = Files(a2=error)
    drive = make_drive(on_stage=files)
    for i in range(3):
        drive.add(request(f"bad {i}", 2))
        drive.add(request(f"good {i}", i))
    finish_reasons = {}
    drive.finish()
    for name, heard in drive.heard.items():
        finish_reasons[name] = heard.finish_reason
        if name.startswith("bad") or name == "good 2":
            assert heard.last.error_code is ErrorCode.ADAPTER
            assert str(error) in heard.last.error
    drive.check_outputs()
    assert finish_reasons["good 1"] is FinishReason.LENGTH
    assert files.asked.count(2) == 1
    files.errors.clear()
    drive.add(request("again", 2))
    finish(drive)
    assert drive.heard["again"].finish_reason is FinishReason.LENGTH


def test_a_preempted_request_whose_adapter_cannot_be_read_any_more_ends_with_its_tokens() -> None:
    files = Files()
    drive = make_drive(max_loras=1, on_stage=files)
    heard = drive.add(request("a", 1, num_tokens=20, priority=1))
    for _ in range(5):
        drive.step()
    files.errors[1] = OSError("gone")
    drive.scheduler.preempt(drive.scheduler.running[0])
    drive.add(request("b", 2))
    finish(drive)
    assert heard.last.error_code is ErrorCode.ADAPTER
    assert 0 < len(heard.tokens) < 20


def test_adapters_are_staged_in_the_order_of_their_oldest_requests_and_two_at_once() -> None:
    files = Files()
    drive = make_drive(max_loras=1, on_stage=files)
    for i, adapter in enumerate((5, 4, 4, 3, 5, 2)):
        drive.add(request(str(i), adapter))
    drive.step()
    assert files.asked == [5, 4]
    finish(drive)
    assert files.asked == [5, 4, 3, 2]


def test_an_adapter_that_nobody_waits_for_any_more_is_unstaged() -> None:
    drive = make_drive(max_loras=1)
    drive.add(request("a", 1, num_tokens=20))
    drive.step()
    drive.add(request("b", 2))
    drive.step()
    assert drive.runner.staged == {2}
    drive.engine.abort("b")
    drive.step()
    assert drive.runner.staged == set()
    finish(drive)


def test_nothing_is_staged_while_the_device_cannot_serve() -> None:
    files, done = Files(), []
    drive = make_drive(on_stage=files)
    drive.engine.change(Change(work=lambda: None, on_done=done.append, serves_after=lambda: False))
    drive.add(request("a", 1))
    for _ in range(3):
        drive.step()
    assert (done, files.asked) == ([None], [])
    drive.engine.change(Change(work=lambda: None, on_done=done.append))
    finish(drive)
    assert files.asked == [1]


def test_the_statistics_tell_of_adapters() -> None:
    drive = make_drive(max_loras=1)
    for name, adapter in (("a", 1), ("b", 1), ("c", 2), ("d", 3), ("e", 2), ("f", 0)):
        drive.add(request(name, adapter))
    drive.step()
    drive.step()
    stats = drive.engine.stats()
    assert (stats.running_of_adapters, stats.waiting_of_adapters) == ({1: 2}, {2: 2, 3: 1})
    assert (stats.num_adapters_resident, stats.num_adapters_staged, stats.num_adapter_loads) == (1, 2, 1)
    assert drive.engine.in_use(WeightsKind.ADAPTER) == {1, 2, 3}
    finish(drive)
    stats = drive.engine.stats()
    assert (stats.num_adapters_resident, stats.num_adapters_staged, stats.num_adapter_loads) == (1, 0, 3)


# --- threads ---


def start(runner: FakeRunner, **options: object) -> Engine:
    limits = BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8, adapters=True)
    engine = Engine(runner, EngineConfig(eos_token_ids=EOS), BucketLadder(limits), **options)
    engine.warm_up(print)
    engine.start()
    return engine


def check(requests: list[Request], listener: Listener) -> None:
    for one in requests:
        listener.end(one.request_id)
        assert listener.tokens(one.request_id) == expected_tokens(one, CAPACITY, EOS)


def close(engine: Engine, runner: FakeRunner) -> None:
    engine.shutdown()
    assert runner.violations == []
    assert engine.death is None
    assert not any(thread.name == "engine-adapters" for thread in threading.enumerate())


def test_others_are_served_while_an_adapter_is_staged() -> None:
    gate, listener = Gate(first=0), Listener()
    runner = FakeRunner(CAPACITY, on_stage=gate)
    engine = start(runner)
    slow, base = request("slow", 7), request("base", 0)
    engine.add_request(slow, listener)
    assert gate.reached.wait(PATIENCE_S)
    engine.add_request(base, listener)
    check([base], listener)
    assert "slow" not in listener.outputs
    assert engine.stats().waiting_of_adapters == {7: 1}
    gate.open.set()
    check([slow], listener)
    close(engine, runner)


def test_many_adapters_on_threads_while_steps_fail_and_weights_change() -> None:
    failing = {7, 20, 21, 40}

    def fail(number: int) -> None:
        if number in failing:
            raise OSError("a hiccup")

    listener, runner = Listener(), FakeRunner(CAPACITY, on_result=fail)
    engine = start(runner)
    requests = [request(str(i), i % 7, num_tokens=3 + i % 9, first=10 + i % 5) for i in range(120)]
    for i, one in enumerate(requests):
        engine.add_request(one, listener)
        if i % 30 == 0:
            engine.change(Change(work=lambda: None, on_done=lambda _error: None))
        if i % 3 == 0:
            listener.end(one.request_id)
    codes = {one.request_id: listener.end(one.request_id).error_code for one in requests}
    check([one for one in requests if codes[one.request_id] is None], listener)
    assert set(codes.values()) == {None, ErrorCode.STEP_FAILED}
    assert engine.drain(PATIENCE_S)
    close(engine, runner)
    assert runner.staged == set()


def test_an_adapter_whose_requests_left_while_it_was_staged_is_unstaged() -> None:
    gate, listener, unstaged = Gate(first=0), Listener(), threading.Event()
    runner = FakeRunner(CAPACITY, on_stage=gate)
    unstage = runner.drop

    def unstage_and_tell(kind: WeightsKind, adapter: int) -> None:
        unstage(kind, adapter)
        unstaged.set()

    runner.drop = unstage_and_tell
    engine = start(runner)
    engine.add_request(request("a", 1), listener)
    assert gate.reached.wait(PATIENCE_S)
    engine.abort("a")
    assert listener.end("a").finish_reason is FinishReason.ABORT
    gate.open.set()
    assert unstaged.wait(PATIENCE_S)
    assert runner.staged == set()
    close(engine, runner)


def test_what_was_staged_while_the_device_recovered_is_staged_again() -> None:
    gate, listener = Gate(first=7), Listener()

    def fail(_number: int) -> None:
        if not runner.num_recoveries:
            raise OSError("a hiccup")

    runner = FakeRunner(CAPACITY, on_stage=gate, on_result=fail)
    engine = start(runner)
    waits, other = request("waits", 7), request("other", 0)
    engine.add_request(waits, listener)
    assert gate.reached.wait(PATIENCE_S)
    engine.add_request(request("fails", 0), listener)
    assert listener.end("fails").error_code is ErrorCode.STEP_FAILED
    gate.open.set()
    engine.add_request(other, listener)
    check([waits, other], listener)
    assert (runner.num_recoveries, runner.num_staged) == (1, 2)
    close(engine, runner)


def test_files_that_cannot_be_read_and_a_lost_device_are_told_apart_on_threads() -> None:
    files, listener, deaths = Files(a1=ValueError("rank 99")), Listener(), []
    files.errors[2] = RuntimeError("the device is lost")
    runner = FakeRunner(CAPACITY, on_stage=files)
    engine = start(runner, on_death=deaths.append)
    engine.add_request(request("a", 1), listener)
    assert listener.end("a").error_code is ErrorCode.ADAPTER
    engine.add_request(request("b", 2), listener)
    assert listener.end("b").error_code is ErrorCode.ENGINE_DEAD
    engine.shutdown()
    assert [str(death) for death in deaths] == ["the device is lost"]


def test_a_shutdown_waits_for_the_adapter_that_is_staged() -> None:
    gate, listener = Gate(first=0), Listener()
    runner = FakeRunner(CAPACITY, on_stage=gate)
    engine = start(runner)
    for adapter in (1, 2):
        engine.add_request(request(str(adapter), adapter), listener)
    assert gate.reached.wait(PATIENCE_S)
    ending = threading.Thread(target=engine.shutdown)
    ending.start()
    assert {listener.end(name).finish_reason for name in "12"} == {FinishReason.ABORT}
    gate.open.set()
    ending.join(PATIENCE_S)
    assert not ending.is_alive()
    assert runner.num_staged == 1
    close(engine, runner)
