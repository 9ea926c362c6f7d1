"""The times of a step inside the engine add up; how long they are is not tested."""

from __future__ import annotations

import pytest

from batcher.step import Capacity
from scripts.lab.in_engine import InEngine, _figures, _Record, time_in_engine
from scripts.lab.simulation.instant_runner import InstantRunner

CAPACITY = Capacity(
    num_slots=4, num_pages=64, page_size=16, max_model_len=200, max_num_batched_tokens=32, vocab_size=100
)
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}


@pytest.mark.parametrize(("num_rows", "depth"), [(1, 1), (1, 2), (4, 2)])
def test_all_steps_with_all_rows_are_timed(num_rows, depth):
    found = time_in_engine(
        InstantRunner(CAPACITY), num_rows, context=40, steps=10, sampling=GREEDY, pipeline_depth=depth
    )
    assert found.num_rows == num_rows
    assert found.step_ms > 0
    assert min(found.dispatch_ms, found.device_ms, found.delivery_ms, found.next_ms, found.idle_ms) >= 0


def test_the_parts_are_told_apart():
    """Two steps in flight; a step a second, of which the device is idle for 0.2 s before the last one."""
    records = [_Record(-1.5, -1.4, 0, 0.1), _Record(-0.5, -0.4, 1, 1.1), _Record(0.3, 0.4, 2, 2.1)]
    records += [_Record(2.1, 2.2, 3, 3.1)]
    settled = [_Record(-9, -9, -9, -9)] * 5 + records
    assert _figures(4, settled, 2) == InEngine(
        num_rows=4,
        step_ms=1000,
        dispatch_ms=pytest.approx(100),
        device_ms=1000,
        idle_ms=0,
        delivery_ms=pytest.approx(100),
        next_ms=pytest.approx(600),
    )
    alone = _figures(4, settled[:5] + records[2:] + [_Record(3.1, 3.2, 4, 4.1)], 1)
    assert alone.idle_ms == pytest.approx(200)
    assert alone.device_ms == pytest.approx(900)
