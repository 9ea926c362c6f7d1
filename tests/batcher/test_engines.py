"""Several engines behind one: each request goes to the engine of its model, and all share a device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.change import Change, PauseMode
from batcher.config import EngineConfig
from batcher.delivery import Tokens
from batcher.engine import Engine
from batcher.engines import Engines
from batcher.request import FinishReason
from batcher.stats import ModelState
from batcher.step import WeightsKind
from tests.batcher.fake_runner import FakeRunner, expected_tokens
from tests.batcher.harness import EOS, make_capacity, make_request
from tests.batcher.test_engine_threads import PATIENCE_S, Gate, Listener

CAPACITY = make_capacity(max_models=2)
OWN, OTHER = 70, 71  # the models of the second engine: its model 0, and another


def make_engine(runner: FakeRunner) -> Engine:
    limits = BucketConfig(max_num_batched_tokens=32, max_num_seqs=4, min_mixed_tokens=8)
    engine = Engine(runner, EngineConfig(eos_token_ids=EOS), BucketLadder(limits))
    engine.warm_up(lambda _line: None)
    return engine


@contextmanager
def running(first: FakeRunner, *, is_started: bool = True) -> Iterator[Engines]:
    engines = Engines(make_engine(first))
    if is_started:
        engines.start()
    try:
        yield engines
    finally:
        engines.shutdown()


def add_second(engines: Engines, runner: FakeRunner) -> Engine:
    second = make_engine(runner)
    engines.add(second, OWN)
    for model in (OWN, OTHER):
        engines.place(model, second)
        engines.add_model(model, EOS, None)
    return second


@pytest.mark.parametrize("is_started", [True, False], ids=["added while running", "added before the start"])
def test_a_request_goes_to_the_engine_of_its_model(is_started: bool) -> None:
    runners, listener = [FakeRunner(CAPACITY), FakeRunner(CAPACITY)], Listener()
    with running(runners[0], is_started=is_started) as engines:
        second = add_second(engines, runners[1])
        engines.add_model(5, EOS, None)
        if not is_started:
            engines.start()
        there = {"a": 0, "b": OWN, "c": OTHER, "d": 5}
        for name, model in there.items():
            engines.add_request(make_request(name, range(10, 19), model=model, ignore_eos=True), listener)
        assert {listener.end(name).finish_reason for name in there} == {FinishReason.LENGTH}
        here = {"a": 0, "b": 0, "c": OTHER, "d": 5}  # model 0 of its engine is `OWN`
        for name, model in here.items():
            alone = make_request(name, range(10, 19), model=model, ignore_eos=True)
            assert listener.tokens(name) == expected_tokens(alone, CAPACITY, EOS)
        numbers = [listener.outputs[name][0].number for name in there]
        assert len(set(numbers)) == 4 and max(numbers) < 2**63
        stats = engines.stats()
        assert stats.models.keys() == {0, 5, OWN, OTHER} and stats.models[OWN] is ModelState.RESIDENT
        assert sum(stats.finished.values()) == 4 and stats.num_pages == 2 * CAPACITY.num_pages
        assert [{step.model for step in runner.steps} for runner in runners] == [{0, 5}, {0, OTHER}]
        for model in (OWN, OTHER):
            engines.remove_model(model)
        engines.remove(second)
        assert engines.stats().models.keys() == {0, 5}
    assert not any(runner.violations for runner in runners)


def test_a_pause_is_one_of_all_engines_and_also_of_those_that_come() -> None:
    runners, listener = [FakeRunner(CAPACITY), FakeRunner(CAPACITY)], Listener()
    with running(runners[0]) as engines:
        heard: SimpleQueue[Exception | None] = SimpleQueue()
        engines.pause(PauseMode.ABORT, True, heard.put)
        assert heard.get(timeout=PATIENCE_S) is None
        add_second(engines, runners[1])
        for name, model in (("a", 0), ("b", OWN)):
            engines.add_request(make_request(name, range(10, 19), model=model), listener)
        engines.pause(PauseMode.KEEP, False, heard.put)
        assert heard.get(timeout=PATIENCE_S) is None
        assert not any(runner.steps for runner in runners)
        assert engines.in_use(WeightsKind.MODEL) == {0, OWN}
        engines.resume(heard.put)
        assert heard.get(timeout=PATIENCE_S) is None
        assert all(listener.end(name).error is None for name in "ab")
        assert heard.empty()  # one answer for all engines


def test_a_change_is_of_the_first_engine_and_does_not_stop_the_others() -> None:
    gate, listener = Gate(first=1), Listener()
    runners = [FakeRunner(CAPACITY), FakeRunner(CAPACITY, on_result=gate)]
    with running(runners[0]) as engines:
        add_second(engines, runners[1])
        engines.add_request(make_request("b", range(10, 19), model=OWN, ignore_eos=True), listener)
        assert gate.reached.wait(PATIENCE_S)  # its step is in flight
        heard: SimpleQueue[Exception | None] = SimpleQueue()
        engines.change(Change(work=lambda: None, on_done=heard.put))
        assert heard.get(timeout=PATIENCE_S) is None
        with pytest.raises(ValueError, match="another shape are on the device"):
            engines.change(Change(work=lambda: None, on_done=heard.put, frees_device=True))
        engines.abort("b")
        gate.open.set()
        assert listener.end("b").finish_reason is FinishReason.ABORT


class Device:
    """Executes the steps of all runners in the order in which they are dispatched, as a chip does."""

    def __init__(self) -> None:
        self.waits_for: list[int] = []  # for each step: the steps of the other runner that come before it
        self._dispatched: list[tuple[str, int]] = []
        self._num_done = 0
        self._changed = threading.Condition()

    def runner(self, name: str) -> FakeRunner:
        def on_execute(number: int) -> None:
            with self._changed:
                self.waits_for.append(sum(other != name for other, _ in self._dispatched[self._num_done :]))
                self._dispatched.append((name, number))
                self._changed.notify_all()

        def on_result(number: int) -> None:
            with self._changed:
                place, all = self._dispatched.index((name, number)), self._dispatched
                # Both runners have a step before the first result: else one may end before the other begins.
                assert self._changed.wait_for(lambda: self._num_done == place and len(dict(all)) == 2, PATIENCE_S)
                self._num_done += 1
                self._changed.notify_all()

        return FakeRunner(CAPACITY, on_execute=on_execute, on_result=on_result)


def test_a_step_waits_for_as_many_steps_of_another_engine_as_its_pipeline_is_deep() -> None:
    device, listener = Device(), Listener()
    with running(device.runner("a")) as engines:
        add_second(engines, device.runner("b"))
        for name, model in (("a", 0), ("b", OWN)):
            engines.add_request(make_request(name, [10, 11], model=model, ignore_eos=True, max_tokens=50), listener)
        assert {listener.end(name).finish_reason for name in "ab"} == {FinishReason.LENGTH}
    assert 1 <= max(device.waits_for) <= 2


def test_tokens_of_all_engines_are_heard() -> None:
    heard: SimpleQueue[Tokens] = SimpleQueue()
    listener = Listener()
    with running(FakeRunner(CAPACITY), is_started=False) as engines:
        engines.listen(heard.put)
        engines.start()
        add_second(engines, FakeRunner(CAPACITY))
        for name, model in (("a", 0), ("b", OWN)):
            engines.add_request(make_request(name, [10, 11], model=model, ignore_eos=True), listener)
        numbers = {listener.end(name).number for name in "ab"}
        told = {number for _ in range(heard.qsize()) for number in heard.get().numbers.tolist()}
        assert told == numbers
