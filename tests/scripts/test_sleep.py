"""A runner's parts that leave the device and come back."""

from __future__ import annotations

import numpy as np
import pytest

from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from scripts.building.runner_weights import RunnerSleep
from server.engine.wire import KV_CACHE, PARTS, WEIGHTS
from tests.model.driver import paged_attention, tiny_model

LIMITS = RunnerConfig(
    max_num_seqs=4,
    max_num_batched_tokens=32,
    max_model_len=64,
    num_pages=40,
    max_draft_rows=4,
    draft_pass_tokens=16,
)


@pytest.fixture
def runner() -> ModelRunner:
    """With a draft model."""
    attention = paged_attention()
    return ModelRunner(tiny_model(), attention, LIMITS, draft=(tiny_model(1), attention))


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

    others = ModelRunner(tiny_model(2), paged_attention(), LIMITS).weights
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
