"""A runner's parts that leave the device and come back."""

from __future__ import annotations

import numpy as np
import pytest

from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from scripts.offline.training import KV_CACHE, TAGS, WEIGHTS, RunnerSleep
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
        sleep.sleep(level)
        assert sleep.missing == set(TAGS)
    assert all(array.is_deleted() for array in runner.weights)
    keeps = 2 not in levels
    assert sleep.missing_after(TAGS) == (set() if keeps else {WEIGHTS})
    sleep.wake_up([KV_CACHE])
    assert sleep.missing == {WEIGHTS} and not runner.state.slots.is_deleted()

    others = ModelRunner(tiny_model(2), paged_attention(), LIMITS).weights
    runner.replace({path: others[place] for path, place in runner.described.numbers.items()})
    sleep.took_others()
    assert not sleep.missing
    given = set(runner.described.numbers.values())
    for place, (now, old) in enumerate(zip(values(runner), before, strict=True)):
        np.testing.assert_array_equal(now, np.asarray(others[place]) if place in given else old)
    sleep.wake_up(TAGS)
    assert values(runner)


def test_parts_that_do_not_go_back_stay_away(runner, monkeypatch):
    sleep, before = RunnerSleep(runner), values(runner)
    sleep.sleep(1)

    def full() -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_make_state", full)
        for tags, words in ((TAGS, "kv_cache and weights cannot"), ([KV_CACHE], "kv_cache cannot")):
            with pytest.raises(ValueError, match=f"{words} go back to the device: RESOURCE_EXHAUSTED"):
                sleep.wake_up(tags)
            assert sleep.missing == set(TAGS)
    assert all(array.is_deleted() for array in runner.weights)
    sleep.wake_up([WEIGHTS])
    assert sleep.missing == {KV_CACHE} and runner.state.slots.is_deleted()
    for now, old in zip(values(runner), before, strict=True):
        np.testing.assert_array_equal(now, old)
