"""Weights that leave the device and come back, also where others could not be loaded."""

from __future__ import annotations

import numpy as np

from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from scripts.wiring.changeable import ChangeableEngine
from scripts.wiring.settings import EngineSettings
from scripts.wiring.weights import ChosenWeights, choose_weights
from server.engine.wire import ChangeWeights, WeightsChange
from tests.batcher.harness import Drive
from tests.model.driver import paged_attention, tiny_model

LIMITS = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, num_pages=40)


def test_weights_that_cannot_be_read_to_their_end_leave_the_old_ones():
    runner = ModelRunner(tiny_model(), paged_attention(), LIMITS)
    before, state = [np.array(array) for array in runner._weights], runner._state
    tried: list[ChosenWeights] = []

    def load(weights: ChosenWeights) -> None:
        assert all(array.is_deleted() for array in runner._weights), "there is room for one of the two only"
        tried.append(weights)
        raise OSError("the disk has failed")

    drive, settings = Drive(), EngineSettings(device="cpu")
    weights = choose_weights(settings, "cpu")
    engine = ChangeableEngine(drive.engine, runner, load, settings, weights, "cpu")
    done: list[Exception | None] = []
    engine.change_weights(ChangeWeights(WeightsChange.RELOAD), done.append)
    drive.step()
    assert [str(error) for error in done] == ["the disk has failed"] and len(tried) == 1
    assert engine.death is None
    for array, old, like in zip(runner._weights, before, runner._described.weights_like, strict=True):
        np.testing.assert_array_equal(array, old)
        assert array.sharding == like.sharding
    assert state.slots.is_deleted() and not runner._state.slots.is_deleted()
