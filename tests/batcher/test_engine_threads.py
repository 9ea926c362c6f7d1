"""The engine on its own threads. Nothing here sleeps to wait for something: events and semaphores only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from batcher import engine as engine_module
from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.errors import EngineClosedError, EngineDeadError, StepTimeoutError
from batcher.request import ErrorCode, FinishReason, Request, RequestOutput
from tests.batcher.fake_runner import FakeRunner, expected_tokens
from tests.batcher.harness import CAPACITY, EOS, make_request

PATIENCE_S = 30.0  # how long a test waits for what must happen at once, before it fails


class Gate:
    """Blocks the results of steps until it is opened, and tells which step is being waited for."""

    def __init__(self, first: int) -> None:
        self.first = first  # steps before this one pass
        self.reached = threading.Event()
        self.open = threading.Event()

    def __call__(self, number: int) -> None:
        if number >= self.first:
            self.reached.set()
            assert self.open.wait(PATIENCE_S)


class Listener:
    """Collects outputs from any thread and can be waited on."""

    def __init__(self) -> None:
        self.outputs: dict[str, list[RequestOutput]] = {}
        self._changed = threading.Condition()

    def __call__(self, output: RequestOutput) -> None:
        with self._changed:
            self.outputs.setdefault(output.request_id, []).append(output)
            self._changed.notify_all()

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs[request_id] for token in output.token_ids]

    def end(self, request_id: str) -> RequestOutput:
        """Waits for the last output of a request."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._ended(request_id), PATIENCE_S), f"{request_id} never ended"
            return self.outputs[request_id][-1]

    def first(self, request_id: str) -> RequestOutput:
        with self._changed:
            assert self._changed.wait_for(lambda: request_id in self.outputs, PATIENCE_S)
            return self.outputs[request_id][0]

    def _ended(self, request_id: str) -> bool:
        outputs = self.outputs.get(request_id)
        return bool(outputs) and outputs[-1].finish_reason is not None


@contextmanager
def running(runner: FakeRunner, **config: object) -> Iterator[Engine]:
    limits = BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8)
    engine = Engine(runner, EngineConfig(**{"eos_token_ids": EOS} | config), BucketLadder(limits))
    engine.warm_up(lambda _line: None)
    engine.start()
    try:
        yield engine
    finally:
        engine.shutdown()
    assert runner.violations == []
    assert engine.core.scheduler.pool.num_used == 0


def check(requests: list[Request], listener: Listener) -> None:
    for request in requests:
        assert listener.tokens(request.request_id) == expected_tokens(request, CAPACITY, EOS)


def test_a_step_is_dispatched_before_the_one_before_it_is_read() -> None:
    gate = Gate(first=0)
    dispatched = [threading.Event() for _ in range(3)]

    def on_execute(number: int) -> None:
        if number < 3:
            dispatched[number].set()

    listener = Listener()
    runner = FakeRunner(CAPACITY, on_execute=on_execute, on_result=gate)
    with running(runner) as engine:
        engine.add_request(make_request("a", [10, 11, 12], ignore_eos=True), listener)
        assert dispatched[1].wait(PATIENCE_S)  # no result has been given yet
        assert not listener.outputs
        assert not dispatched[2].is_set()
        gate.open.set()
        assert listener.end("a").finish_reason is FinishReason.LENGTH


def test_an_idle_engine_wakes_for_a_request_and_rests_otherwise() -> None:
    waits = []
    listener = Listener()
    runner = FakeRunner(CAPACITY)
    with running(runner) as engine:
        original = engine._inbox._has_work

        def counted(is_idle: bool) -> bool:
            waits.append(threading.get_ident())
            return original(is_idle)

        engine._inbox._has_work = counted
        for i in range(5):
            engine.add_request(make_request(str(i), [10 + i], max_tokens=3, ignore_eos=True), listener)
            listener.end(str(i))
        assert engine.drain(PATIENCE_S)
        # Three steps a request: an arrival, three results, and two looks at each. A spinning loop looks without end.
        assert len(waits) < 5 * 20


@pytest.mark.parametrize("first", [0, 1, 2, 5])
def test_an_abort_while_a_step_is_in_flight(first: int) -> None:
    gate = Gate(first)
    listener = Listener()
    with running(FakeRunner(CAPACITY, on_result=gate)) as engine:
        engine.add_request(make_request("a", [10, 11], max_tokens=30, ignore_eos=True), listener)
        assert gate.reached.wait(PATIENCE_S)
        engine.abort("a")
        assert listener.end("a").finish_reason is FinishReason.ABORT  # at once, not when the device is done
        gate.open.set()
        request = make_request("b", [10, 11], ignore_eos=True)
        engine.add_request(request, listener)
        listener.end("b")
        check([request], listener)


def test_the_deadline_wakes_an_engine_that_waits_for_the_device() -> None:
    gate = Gate(first=0)
    listener = Listener()
    with running(FakeRunner(CAPACITY, on_result=gate)) as engine:
        for i in range(4):
            engine.add_request(make_request(str(i), [10 + i]), listener)
        assert gate.reached.wait(PATIENCE_S)
        engine.add_request(make_request("late", [20], deadline_s=0.01), listener)
        assert listener.end("late").error_code is ErrorCode.QUEUE_DEADLINE
        gate.open.set()
        assert listener.end("3").finish_reason is not None


def test_shutdown_in_the_middle_tells_everybody() -> None:
    listener = Listener()
    with running(FakeRunner(CAPACITY)) as engine:
        for i in range(9):
            engine.add_request(make_request(str(i), [10 + i], max_tokens=60, ignore_eos=True), listener)
        listener.first("0")
        engine.shutdown()
        for i in range(9):
            assert listener.end(str(i)).finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
        with pytest.raises(EngineClosedError):
            engine.add_request(make_request("x", [5]), listener)
        assert engine.num_live == 0


def test_shutdown_with_patience_lets_them_finish() -> None:
    listener = Listener()
    with running(FakeRunner(CAPACITY)) as engine:
        requests = [make_request(str(i), [10 + i], ignore_eos=True) for i in range(9)]
        for request in requests:
            engine.add_request(request, listener)
        engine.shutdown(drain_s=PATIENCE_S)
        check(requests, listener)


def test_drain_that_runs_out_of_time_says_so() -> None:
    gate = Gate(first=0)
    listener = Listener()
    with running(FakeRunner(CAPACITY, on_result=gate)) as engine:
        engine.add_request(make_request("a", [10]), listener)
        assert not engine.drain(0.01)
        gate.open.set()
        assert engine.drain(PATIENCE_S)


def test_a_dead_device_is_heard_by_all_and_ends_the_threads() -> None:
    def on_result(number: int) -> None:
        if number == 3:
            raise OSError("bus error")

    deaths: list[BaseException] = []
    died = threading.Event()

    def on_death(error: BaseException) -> None:
        deaths.append(error)
        died.set()

    runner = FakeRunner(CAPACITY, on_result=on_result, healthy=False)
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4))
    engine = Engine(runner, EngineConfig(eos_token_ids=EOS), ladder, on_death=on_death)
    engine.warm_up(lambda _line: None)
    listener = Listener()
    for i in range(6):
        engine.add_request(make_request(str(i), [10 + i], ignore_eos=True), listener)
    engine.start()
    for i in range(6):
        assert listener.end(str(i)).error_code is ErrorCode.ENGINE_DEAD
    assert died.wait(PATIENCE_S)
    assert [str(error) for error in deaths] == ["the device is gone"]
    with pytest.raises(EngineDeadError):
        engine.stats()
    assert engine.drain(PATIENCE_S)
    engine.shutdown()
    assert not any(thread.is_alive() for thread in engine._threads)


@pytest.mark.parametrize("damage", [False, True])
def test_an_idle_engine_checks_its_own_integrity_once_per_idle_period(
    damage: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_module, "IDLE_CHECK_S", 0.01)
    with running(FakeRunner(CAPACITY)) as engine:
        checked = threading.Semaphore(0)
        check = engine.core.check_integrity

        def check_and_tell() -> None:
            if damage:
                engine.core.scheduler.pool._free.append(1)  # page 1 is free twice
            check()
            if damage:
                engine.core.scheduler.pool._free.pop()
            checked.release()

        monkeypatch.setattr(engine.core, "check_integrity", check_and_tell)
        for name in ("a", "b"):
            listener = Listener()
            engine.add_request(make_request(name, [10, 11, 12]), listener)
            listener.end(name)
            assert checked.acquire(timeout=PATIENCE_S)
        assert not checked.acquire(blocking=False)
        assert engine.stats().integrity_failures == (2 if damage else 0)
    assert ("the idle engine is inconsistent" in caplog.text) == damage


def test_a_step_that_does_not_return_is_the_engines_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("batcher.step_watch.GRACE_S", 0.05)
    gate, listener, deaths = Gate(first=2), Listener(), []
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8))
    config = EngineConfig(eos_token_ids=EOS, step_timeout_s=0.5)
    engine = Engine(FakeRunner(CAPACITY, on_result=gate), config, ladder, on_death=deaths.append)
    engine.warm_up(lambda _line: None)
    engine.start()
    engine.add_request(make_request("a", [10, 11, 12], ignore_eos=True), listener)
    last = listener.end("a")
    assert (last.finish_reason, last.error_code) == (FinishReason.ERROR, ErrorCode.ENGINE_DEAD)
    assert "StepTimeoutError: the device is stuck" in last.error
    assert gate.reached.is_set()
    engine.shutdown()  # the reader still waits for the step
    assert isinstance(engine.death, StepTimeoutError)
    assert deaths == [engine.death]
    with pytest.raises(EngineDeadError, match="stuck"):
        engine.add_request(make_request("b", [10]), listener)
    gate.open.set()


def test_a_step_that_returns_within_the_grace_is_no_fault() -> None:
    listener, gate = Listener(), Gate(first=3)
    with running(FakeRunner(CAPACITY, on_result=gate), step_timeout_s=1e-9) as engine:  # always in the grace
        engine.add_request(make_request("a", [10, 11, 12], ignore_eos=True), listener)
        assert gate.reached.wait(PATIENCE_S)
        gate.open.set()
        assert listener.end("a").finish_reason is FinishReason.LENGTH
        assert engine.core.step_watch.next_check() is None
