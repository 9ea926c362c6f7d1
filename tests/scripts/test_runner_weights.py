"""Weights that leave the device and come back, also where others could not be loaded."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from scripts.building.offloading import make_offloading
from scripts.building.runner_weights import RunnerSleep, RunnerWeights
from scripts.building.weights import ChosenWeights, choose_weights
from scripts.flags.settings import EngineSettings
from server.engine import wire
from server.engine.weight_changes import WeightChanges
from server.engine.wire import KV_CACHE, PARTS, WEIGHTS, ChangeWeights, WeightsChange
from tests.batcher.harness import Drive, make_request
from tests.model.driver import paged_attention, tiny_model

LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)
RELOAD, SLEEP, WAKE_UP = (
    ChangeWeights(change) for change in (WeightsChange.RELOAD, WeightsChange.SLEEP, WeightsChange.WAKE_UP)
)
DROP = ChangeWeights(WeightsChange.SLEEP, level=2)


def waking(*parts: str) -> ChangeWeights:
    return ChangeWeights(WeightsChange.WAKE_UP, parts=parts)


class OtherModel:
    """`scripts.building.load.Loader`, of a model of other values. It fails at `fault`."""

    def __init__(self, runner: ModelRunner, fault: str | None, settings: EngineSettings) -> None:
        self.runner = runner
        weights, device = choose_weights(settings, "cpu"), SimpleNamespace(platform="cpu")
        self.plan = SimpleNamespace(settings=settings, weights=weights, device=device, tokenizer=None)
        self.is_deleted = False
        self._fault = fault

    def kv_ranges(self, weights: ChosenWeights) -> None:
        return None

    def read(self, weights: ChosenWeights) -> OtherModel:
        assert all(array.is_deleted() for array in self.runner.weights), "there is room for one of the two only"
        self._fail("read")
        self.model = tiny_model(seed=1)
        return self

    def place(self, loaded: OtherModel, *, with_state: bool) -> None:
        self._fail("place")
        self.runner.place(self.model, with_state=with_state)

    def delete(self) -> None:
        self.is_deleted = True

    def _fail(self, where: str) -> None:
        if self._fault == where:
            raise OSError("the disk has failed")


class Changed:
    """The weights of a runner, and what they were at first."""

    def __init__(self, fault: str | None = None, **settings: object) -> None:
        self.runner = ModelRunner(tiny_model(), paged_attention(), LIMITS)
        self.first, self.state = self.values(), self.runner.state
        self.loader = OtherModel(self.runner, fault, EngineSettings(device="cpu", **settings))
        self.weights = RunnerWeights(self.loader)

    def change(self, command: ChangeWeights) -> None:
        self.weights.check(command)
        self.weights.prepare()
        self.weights.commit()

    def values(self) -> list[np.ndarray]:
        return [np.array(array) for array in self.runner.weights]

    def are_the_first(self) -> bool:
        """The weights of the start are in place, with an empty state."""
        for array, like in zip(self.runner.weights, self.runner.described.weights_like, strict=True):
            assert array.sharding == like.sharding
        assert not self.runner.state.slots.is_deleted()
        return all(map(np.array_equal, self.values(), self.first))

    def are_away(self) -> bool:
        away = {array.is_deleted() for array in (*self.runner.weights, self.runner.state.slots)}
        assert len(away) == 1
        return away == {True}


@pytest.mark.parametrize("fault", ["read", "place"])
def test_weights_that_cannot_be_loaded_to_their_end_leave_the_old_ones(fault):
    changed, drive = Changed(fault), Drive()
    replies: list[wire.Event] = []
    told = threading.Semaphore(0)

    def put(event: wire.Event) -> None:
        replies.append(event)
        told.release()

    changes = WeightChanges(drive.engine, changed.weights)
    changes.listen(put)

    def ask(phase: wire.Phase) -> str | None:
        changes.ask(wire.ChangePhase(phase, RELOAD))
        while not told.acquire(timeout=0.01):
            drive.step()
        return replies.pop().error

    if fault == "place":
        assert ask(wire.Phase.PREPARE) is None
    assert ask(wire.Phase.PREPARE if fault == "read" else wire.Phase.COMMIT) == "the disk has failed"
    assert drive.engine.death is None
    drive.add(make_request("a", range(3, 15)))
    drive.finish()
    assert drive.heard["a"].tokens == drive.expected("a")
    assert changed.are_the_first() and changed.state.slots.is_deleted()
    assert changed.loader.is_deleted == (fault == "place")


def test_more_memory_for_pages_than_the_host_has_is_refused():
    with pytest.raises(ValueError, match=r"^--kv-offloading-size 60000: the host has .* GiB free$"):
        make_offloading(EngineSettings(kv_offloading_size=60_000), None, None)


def test_what_is_prepared_is_undone_or_ended():
    changed = Changed()
    weights = changed.weights

    def prepare(command: ChangeWeights) -> None:
        weights.check(command)
        weights.prepare()

    prepare(SLEEP)
    weights.abandon()
    assert changed.are_the_first()
    prepare(SLEEP)
    weights.commit()
    assert changed.are_away()
    prepare(WAKE_UP)
    weights.abandon()
    assert changed.are_away()
    prepare(WAKE_UP)
    weights.commit()
    assert changed.are_the_first()
    prepare(RELOAD)
    weights.abandon()
    assert changed.are_the_first() and changed.loader.is_deleted
    prepare(RELOAD)
    weights.commit()
    assert not changed.are_the_first()
    prepare(SLEEP)
    weights.commit()
    others = changed.loader.model
    prepare(WAKE_UP)
    weights.commit()
    expected = changed.runner.described.weights_of([tiny_model(seed=1)])
    assert others is not None and all(map(np.array_equal, changed.values(), map(np.asarray, expected)))


@pytest.mark.parametrize("fault", [None, "read", "place"])
def test_weights_that_were_dropped_are_loaded_while_the_pages_stay_away(fault):
    changed = Changed(fault)
    weights, runner = changed.weights, changed.runner
    changed.change(DROP)
    with pytest.raises(ValueError, match=r"sleep\(level=2\) has dropped the weights: give others first"):
        weights.check(WAKE_UP)
    changed.change(waking(WEIGHTS))  # brings nothing
    assert weights.missing == set(PARTS)
    if fault is not None:
        with pytest.raises(OSError, match="the disk has failed"):
            changed.change(RELOAD)
        assert weights.missing == set(PARTS) and changed.are_away()
        return
    changed.change(RELOAD)
    assert weights.missing == {KV_CACHE} and runner.state.slots.is_deleted()
    changed.change(waking(KV_CACHE))
    assert not weights.missing and not runner.state.slots.is_deleted()
    expected = runner.described.weights_of([tiny_model(seed=1)])
    assert all(map(np.array_equal, changed.values(), map(np.asarray, expected)))


def test_weights_that_the_host_keeps_are_woken_up_before_others_are_loaded():
    changed = Changed()
    changed.change(SLEEP)
    with pytest.raises(ValueError, match="the engine sleeps: wake it up before other weights are loaded"):
        changed.weights.check(RELOAD)
    changed.change(waking(WEIGHTS))
    assert changed.weights.missing == {KV_CACHE}
    changed.change(RELOAD)
    assert changed.weights.missing == {KV_CACHE}
    changed.weights.check(waking(KV_CACHE))
    changed.weights.prepare()
    changed.weights.abandon()
    assert changed.weights.missing == {KV_CACHE} and not changed.runner.weights[0].is_deleted()


DRAFTING = replace(LIMITS, max_draft_rows=4, draft_pass_tokens=16)


@pytest.fixture
def runner() -> ModelRunner:
    """With a draft model."""
    attention = paged_attention()
    return ModelRunner(tiny_model(), attention, DRAFTING, draft=(tiny_model(1), attention))


def values(runner: ModelRunner) -> list[np.ndarray]:
    return [np.array(array) for array in runner.weights]


@pytest.mark.parametrize("levels", [(1,), (2,), (1, 2), (2, 1)])
def test_an_update_brings_the_models_weights_and_sleep_those_that_draft(runner, levels):
    sleep, before = RunnerSleep(runner), values(runner)
    for level in levels:
        sleep.sleep(sleep.copies(level))
        assert sleep.missing == set(PARTS)
    assert all(array.is_deleted() for array in runner.weights)
    assert sleep.has_dropped == (2 in levels)
    sleep.bring(PARTS if 2 in levels else [KV_CACHE])
    assert sleep.missing == {WEIGHTS} and not runner.state.slots.is_deleted()

    others = ModelRunner(tiny_model(2), paged_attention(), DRAFTING).weights
    runner.replace({path: others[place] for path, place in runner.described.numbers.items()})
    sleep.took_others()
    assert not sleep.missing and not sleep.has_dropped
    given = set(runner.described.numbers.values())
    for place, (now, old) in enumerate(zip(values(runner), before, strict=True)):
        np.testing.assert_array_equal(now, np.asarray(others[place]) if place in given else old)
    sleep.bring(PARTS)
    assert values(runner)


def test_parts_that_do_not_go_back_stay_away(runner, monkeypatch):
    sleep, before = RunnerSleep(runner), values(runner)
    sleep.sleep(sleep.copies(1))

    def full() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_make_state", full)
        for parts in (PARTS, [KV_CACHE]):
            with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
                sleep.bring(parts)
            assert sleep.missing == set(PARTS)
    assert all(array.is_deleted() for array in runner.weights)
    sleep.bring([WEIGHTS])
    assert sleep.missing == {KV_CACHE} and runner.state.slots.is_deleted()
    sleep.take_away({WEIGHTS})
    assert sleep.missing == set(PARTS) and not sleep.has_dropped
    sleep.bring([WEIGHTS])
    sleep.settle()
    for now, old in zip(values(runner), before, strict=True):
        np.testing.assert_array_equal(now, old)
