"""The baseline: a fixed batch to its end."""

from __future__ import annotations

from batcher.config import Scheduling
from tests.batcher.harness import Drive, make_capacity, make_request


def test_nobody_joins_a_batch_and_its_shape_stays_until_the_longest_has_ended() -> None:
    drive = Drive(make_capacity(num_slots=4), scheduling=Scheduling.STATIC, prefix_caching=False)
    for i, length in enumerate((2, 9, 3, 2, 4)):
        drive.add(make_request(str(i), [10 + i, 11], max_tokens=length, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    shapes = [(bucket.num_tokens, bucket.num_rows) for bucket in drive.runner.executed]
    # Four prompts; eight decodes in the shape of four rows, though one row is left in the end; then the fifth alone.
    assert shapes == [(8, 4)] + [(4, 4)] * 8 + [(8, 4)] + [(1, 1)] * 3
    stats = drive.engine.stats()
    assert stats.num_preemptions == 0
    assert stats.step_rows == 4 + (1 + 8 + 2 + 1) + 1 + 3
    assert stats.step_rows_padded == 4 + 8 * 4 + 4 + 3


def test_all_prompts_are_computed_before_anyone_decodes() -> None:
    drive = Drive(make_capacity(num_slots=2, max_num_batched_tokens=8), scheduling=Scheduling.STATIC)
    drive.add(make_request("a", range(10, 15), max_tokens=3, ignore_eos=True))
    drive.add(make_request("b", range(20, 35), max_tokens=3, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    tokens = [step.packed[2] for step in drive.runner.steps]
    assert tokens == [8, 8, 4, 2, 2]


def test_a_batch_takes_no_more_than_the_pages_for_whole_outputs() -> None:
    drive = Drive(make_capacity(num_slots=4, num_pages=16), scheduling=Scheduling.STATIC)
    for i in range(4):
        drive.add(make_request(str(i), range(10 * i, 10 * i + 4), max_tokens=28, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().num_preemptions == 0
    assert max(step.packed[1] for step in drive.runner.steps) == 2
