"""Several models in one engine: turns, places on the device, failures. No row runs with another model's weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.change import Change
from batcher.engine import Engine
from batcher.errors import InvalidRequestError
from batcher.request import ErrorCode, FinishReason, Pooling, Request
from batcher.scheduling.model_turns import MOST_WEIGHT, SHARE_OF_COPIES, ModelTurns
from batcher.stats import ModelState
from batcher.step import WeightsKind
from tests.batcher.fake_runner import FakeRunner, expected_tokens
from tests.batcher.harness import EOS, Clock, Drive, make_capacity, make_request
from tests.batcher.test_adapters import Files
from tests.batcher.test_engine_threads import PATIENCE_S, Gate, Listener
from tests.examples import examples


def make_drive(max_models: int = 2, **config: object) -> Drive:
    capacity = make_capacity(max_models=max_models)
    return Drive(capacity, runner=FakeRunner(capacity, on_stage=config.pop("on_stage", None)), **config)


def request(name: str, model: int, num_tokens: int = 6, **options: object) -> Request:
    return make_request(name, range(10, 19), max_tokens=num_tokens, ignore_eos=True, model=model, **options)


def finish(drive: Drive) -> None:
    drive.finish()
    drive.check_outputs()


def models_of_steps(drive: Drive) -> list[int]:
    return [step.model for step in drive.runner.steps]


# --- in any company ---


OPTIONS = {
    "plain": {},
    "drafts": {"num_drafts": 2, "max_draft_rows": 4},
}


@settings(max_examples=examples(300))
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(OPTIONS)), st.sampled_from(Pooling))
def test_every_row_has_its_own_model_and_adapter_whatever_happens(seed: int, kind: str, pooling: Pooling) -> None:
    """Models and adapters come and go in few places, slots and pages. Bringing takes time; steps fail, weights change,
    and requests are preempted, aborted, scored, embedded and under grammars."""
    rng = np.random.default_rng(seed)
    failing = set(rng.integers(0, 60, int(rng.integers(0, 4))).tolist())
    step_s, bring_s = (float(rng.choice([0.0, 0.01, 1.0])) for _ in range(2))

    def fail(number: int) -> None:
        drive.clock.now += step_s
        if number in failing:
            raise RuntimeError("no luck")

    def bring(identity: int) -> None:
        drive.clock.now += bring_s
        if rng.random() < 0.05:
            raise ValueError("the file has changed")

    capacity = make_capacity(
        max_models=int(rng.integers(1, 5)),
        max_loras=int(rng.integers(0, 4)),
        num_pages=int(rng.integers(16, 40)),
        pooling=pooling,
        keeps_text=True,
    )
    runner = FakeRunner(capacity, on_result=fail, on_stage=bring, propose=lambda _known, coming: coming[:1] + [3])
    options = {"prefix_caching": bool(rng.random() < 0.8), "pipeline_depth": int(rng.integers(1, 4))}
    drive = Drive(capacity, runner=runner, buckets=OPTIONS[kind], leaves_programs=bool(rng.random() < 0.5), **options)
    prompt = list(map(int, rng.integers(3, 99, 24)))
    extra = (
        {"embeds": True}, {"prompt_logprobs": 1}, {"temperature": 0.7}, {}, {"grammar": "3 2 6"}, {"client": 1},
    )  # fmt: skip
    done: list[Exception | None] = []
    num_left, num_changes = 20, 0
    while num_left or drive.engine.num_live:
        draw = rng.random()
        if num_left and draw < 0.5:
            num_left -= 1
            drive.add(
                make_request(
                    str(num_left),
                    prompt[: int(rng.integers(1, 24))] + [int(rng.integers(3, 99))],
                    max_tokens=int(rng.integers(1, 16)),
                    model=int(rng.integers(0, 6)) if capacity.max_models > 1 else 0,
                    adapter=int(rng.integers(0, 6)) if capacity.max_loras else 0,
                    priority=int(rng.integers(0, 2)),
                    **extra[int(rng.integers(0, len(extra)))],
                )
            )
        elif draw < 0.53 and drive.requests:
            drive.engine.abort(str(rng.choice(list(drive.requests))))
        elif draw < 0.56 and drive.scheduler.running:
            drive.scheduler.preempt(drive.scheduler.running[int(rng.integers(len(drive.scheduler.running)))])
        elif draw < 0.59:
            num_changes += 1
            serves_after = not num_left or bool(rng.random() < 0.7)
            drive.engine.change(
                Change(work=runner._wipe, on_done=done.append, serves_after=partial(bool, serves_after))
            )
            while len(done) < num_changes:
                drive.step()
            if not serves_after:
                drive.step()
                num_changes += 1
                drive.engine.change(Change(work=lambda: None, on_done=done.append))
        elif draw < 0.6:
            drive.engine.reset_prefix_cache()
        elif draw < 0.7:
            drive.compile_one()
        drive.step()
        assert drive.num_steps < 3000, "somebody starves"
    drive.check_idle()
    drive.check_outputs()
    assert set(done) <= {None}


def test_with_models_that_nobody_names_nothing_has_changed() -> None:
    drive, other = Drive(), make_drive()
    for each in (drive, other):
        for i in range(6):
            each.add(make_request(str(i), range(10 + i % 3, 20), max_tokens=6))
        finish(each)
    assert drive.runner.executed == other.runner.executed
    for a, b in zip(drive.runner.steps, other.runner.steps, strict=True):
        assert (a.packed == b.packed).all() and a.model == b.model == 0
    with pytest.raises(InvalidRequestError, match="--models") as caught:
        drive.engine.add_request(request("a", 1), print)
    assert caught.value.param == "model"


def test_prefixes_are_found_by_requests_of_their_own_model_only() -> None:
    drive = make_drive()
    cached = []
    for i, model in enumerate((1, 2, 0, 1, 2, 0)):  # each model loses its place to the next one
        heard = drive.add(request(str(i), model))
        finish(drive)
        cached.append(heard.last.num_cached_tokens)
    assert cached == [0, 0, 0, 8, 8, 8]
    assert drive.runner.num_brought == 4


# --- turns ---


@settings(max_examples=examples(300))
@given(st.data())
def test_a_model_on_the_device_waits_for_at_most_so_many_turns(data: st.DataObject) -> None:
    """The bound of rule 1, with any targets, and any number of requests that change at any time."""
    count, clock = data.draw(st.integers(1, 8)), Clock()
    turns = ModelTurns(count, clock)
    itl_s = [data.draw(st.sampled_from([math.inf, 0.0, 2.5, 20.0])) for _ in range(count)]
    turns._staging.there = set(range(1, count))
    waits, live = dict.fromkeys(range(count), 0), dict.fromkeys(range(count), 0)
    for step in range(data.draw(st.integers(1, 150))):
        for _ in range(data.draw(st.integers(0, 3))):
            model = data.draw(st.integers(0, count - 1))
            if live[model] and data.draw(st.booleans()):
                turns.remove(model)
                live[model] -= 1
            else:
                num = data.draw(st.sampled_from([1, 1, 60]))
                for _ in range(num):
                    turns.add(model)
                waits[model] = waits[model] if live[model] else 0
                live[model] += num
        clock.now += 1.0
        order = turns.order(1.0, itl_s.__getitem__)
        assert set(order) == {model for model in live if live[model]}
        if order:
            turns.took(order[0], step)
            waits = {model: 0 if model == order[0] else wait + 1 for model, wait in waits.items()}
        assert all(waits[model] <= (MOST_WEIGHT + 1) * count for model in order)


def test_models_on_the_device_share_the_steps_in_proportion() -> None:
    drive = make_drive(max_models=3)
    for i, model in enumerate((0, 1, 2)):
        drive.add(request(str(i), model, num_tokens=30))
    for _ in range(12):
        drive.step()
    taken = models_of_steps(drive)[-9:]
    assert sorted(taken) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    finish(drive)


def test_a_model_stays_for_nine_times_as_long_as_it_took_to_come() -> None:
    clock_of: list[Drive] = []

    def bring(identity: int) -> None:
        clock_of[0].clock.now += 2.0

    drive = make_drive(on_stage=bring)
    clock_of.append(drive)
    drive.add(request("a", 1, num_tokens=50))
    drive.step()
    drive.add(request("b", 2, num_tokens=3))
    came, departures = drive.clock.now, []
    for _ in range(40):
        drive.step()
        departures.append(drive.engine.core.next_give_ups())
        drive.clock.now += 1.0
        if 2 in models_of_steps(drive):
            break
    assert drive.clock.now - came >= SHARE_OF_COPIES * 2.0
    assert models_of_steps(drive)[:15] == [1] * 15
    assert departures[1] == (came + SHARE_OF_COPIES * 2.0,)
    finish(drive)


def test_a_request_that_finds_no_room_is_not_passed_by_other_models() -> None:
    """The rows are taken; requests of another model that arrive later do not take them as they become free."""
    drive = make_drive()
    for i in range(4):
        drive.add(request(f"a{i}", 0, num_tokens=4 + 4 * i))
    drive.step()
    drive.add(request("b", 1, num_tokens=4))
    drive.step()
    order = []
    for i in range(40):
        if i < 20:
            drive.add(request(f"late {i}", 0, num_tokens=2))
        drive.step()
        order += [seq.request_id for seq in drive.scheduler.running if seq.request_id not in order]
    assert order.index("b") < min(order.index(name) for name in order if name.startswith("late"))
    finish(drive)


# --- places ---


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_changes_lose_no_byte_and_no_page(count: int) -> None:
    drive = make_drive(max_models=2)
    for number in range(count):
        drive.add(make_request(str(number), [3 + number % 90, 5], max_tokens=2, ignore_eos=True, model=1 + number % 3))
        drive.step()
        while drive.engine.num_live:
            drive.step()
        assert drive.heard[str(number)].tokens == drive.expected(str(number))
        if number % 1000 == 0:
            drive.check_idle()
        drive.heard.clear(), drive.requests.clear(), drive.runner.steps.clear(), drive.runner.executed.clear()
    drive.check_idle()
    assert drive.runner.num_brought == drive.engine.stats().num_models_brought == count
    assert len(drive.runner.models) == 2


def test_the_model_that_was_used_least_recently_leaves_first() -> None:
    drive = make_drive(max_models=3)
    for i, (model, there) in enumerate([(1, {1}), (2, {1, 2}), (1, {1, 2}), (3, {1, 3}), (2, {2, 3})]):
        drive.add(request(str(i), model))
        finish(drive)
        assert drive.runner.models == {0} | there


def test_a_model_that_is_unloaded_leaves_the_device() -> None:
    drive = make_drive(max_models=3)
    drive.add(request("a", 1))
    finish(drive)
    assert drive.runner.models == {0, 1}
    drive.engine.remove_model(1)
    drive.step()
    assert drive.runner.models == {0}
    with pytest.raises(InvalidRequestError, match="not loaded"):
        drive.engine.add_request(request("again", 1), print)


@pytest.mark.parametrize("error", [ValueError("it has changed since"), FileNotFoundError("no such folder")])
def test_requests_of_a_model_that_cannot_be_read_end_with_an_error(error: Exception) -> None:
    files = Files(a2=error)
    drive = make_drive(on_stage=files)
    for i in range(3):
        drive.add(request(f"bad {i}", 2))
        drive.add(request(f"good {i}", i % 2))
    drive.finish()
    for name, heard in drive.heard.items():
        if name.startswith("bad"):
            assert heard.last.error_code is ErrorCode.MODEL and str(error) in heard.last.error
    drive.check_outputs()
    assert files.asked.count(2) == 1
    files.errors.clear()
    drive.add(request("again", 2))
    finish(drive)


def test_running_requests_of_a_model_that_cannot_come_back_end_with_their_tokens() -> None:
    files = Files()
    drive = make_drive(on_stage=files)
    heard = drive.add(request("a", 1, num_tokens=40))
    while not heard.tokens:
        drive.step()
    files.errors[1] = ValueError("replaced")
    drive.add(request("b", 2, num_tokens=2))
    drive.finish()
    assert heard.last.error_code is ErrorCode.MODEL and heard.tokens == drive.expected("a")[: len(heard.tokens)]
    assert drive.heard["b"].finish_reason is FinishReason.LENGTH


# --- threads ---


@contextmanager
def running(on_stage: Callable[[int], None] | None = None, **changes: object) -> Iterator[tuple[Engine, Listener]]:
    capacity = make_capacity(max_models=2, **changes)
    drive, listener = Drive(capacity, runner=FakeRunner(capacity, on_stage=on_stage)), Listener()
    for model in (1, 2, 3):
        drive.engine.add_model(model, (), None)
    drive.engine.start()
    yield drive.engine, listener
    assert drive.engine.drain(PATIENCE_S)
    drive.engine.shutdown()
    assert drive.runner.violations == []


def test_others_are_served_while_a_model_is_brought() -> None:
    gate = Gate(first=0)
    with running(gate) as (engine, listener):
        engine.add_request(request("cold", 1), listener)
        assert gate.reached.wait(PATIENCE_S)
        engine.add_request(request("warm", 0), listener)
        assert listener.end("warm").finish_reason is FinishReason.LENGTH
        stats = engine.stats()
        assert (stats.models, stats.waiting_of_models) == ({0: ModelState.RESIDENT}, {1: 1})
        assert engine.in_use(WeightsKind.MODEL) == {1}
        gate.open.set()
        assert listener.end("cold").finish_reason is FinishReason.LENGTH


def test_models_that_take_each_others_only_place_run_on_threads() -> None:
    requests = [request(str(i), 1 + i % 3, num_tokens=30) for i in range(9)]
    with running(num_pages=20) as (engine, listener):
        for each in requests:
            engine.add_request(each, listener)
    for each in requests:
        assert listener.tokens(each.request_id) == expected_tokens(each, engine._capacity, EOS)
