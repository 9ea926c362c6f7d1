"""Clients and groups share the rows: who is admitted, who gives a row, and how soon."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.request import FinishReason
from tests.batcher.harness import Drive, Heard, make_capacity, make_request
from tests.examples import examples


def busy(num_slots: int, *, num_samples: int, depth: int = 1, **request: object) -> Drive:
    """An engine in which one request's samples hold all rows, with pages for everybody."""
    capacity = make_capacity(num_slots=num_slots, num_pages=20 * num_slots, max_num_batched_tokens=8 * num_slots)
    drive = Drive(capacity, pipeline_depth=depth)
    for i in range(num_samples):
        sample = make_request(f"samples-{i}", [5, 6, 7, i], max_tokens=50, ignore_eos=True, group="samples", **request)
        drive.add(sample)
    while len(drive.scheduler.running) < num_slots:
        drive.step()
    return drive


def steps_to_first_token(drive: Drive, heard: list[Heard], most: int) -> list[int]:
    """The number of steps until each has its first token."""
    found: dict[int, int] = {}
    for step in range(1, most + 1):
        drive.step()
        for i, one in enumerate(heard):
            if one.tokens:
                found.setdefault(i, step)
    return [found[i] for i in range(len(heard))]


@pytest.mark.slow
@settings(max_examples=examples(60))
@given(st.integers(2, 24), st.integers(0, 20), st.integers(1, 3), st.data())
def test_requests_do_not_wait_for_others_samples(num_slots: int, more: int, depth: int, data: st.DataObject) -> None:
    """One row changes hands a step, until the samples hold no more than an eighth of the rows."""
    drive = busy(num_slots, num_samples=num_slots + more, depth=depth)
    kept = max(1, num_slots // 8)
    count = data.draw(st.integers(1, num_slots - kept))
    singles = [drive.add(make_request(f"single-{i}", [9, i], max_tokens=4)) for i in range(count)]
    waited = steps_to_first_token(drive, singles, count + 4 * depth)
    assert all(step <= i + 1 + 3 * depth for i, step in enumerate(waited))
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().num_preemptions <= count


@pytest.mark.parametrize("depth", [1, 2])
def test_clients_hold_equally_many_rows(depth: int) -> None:
    drive = busy(8, num_samples=8, depth=depth, client=1)
    for i in range(12):
        drive.add(make_request(f"other-{i}", [9, i], max_tokens=50, ignore_eos=True, client=2))
    for _ in range(12):
        drive.step()
    held = [seq.request.client for seq in drive.scheduler.running]
    assert (held.count(1), held.count(2)) == (4, 4)
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().num_preemptions == 4


def test_a_client_with_fewer_rows_is_admitted_first() -> None:
    drive = Drive(make_capacity(num_slots=2))
    for i in range(3):
        drive.add(make_request(f"a{i}", [5, i], max_tokens=4 + i, ignore_eos=True, client=1))
    drive.add(make_request("b", [6], max_tokens=4, ignore_eos=True, client=2))
    drive.step()
    assert [seq.request_id for seq in drive.scheduler.running] == ["a0", "b"]


def test_samples_of_one_prompt_stay_together_within_an_eighth_of_the_rows() -> None:
    drive = Drive(make_capacity(num_slots=16, num_pages=320, max_num_batched_tokens=64))
    for group in "abc":
        for i in range(3):
            drive.add(make_request(f"{group}{i}", [ord(group) - 90, i], max_tokens=9, ignore_eos=True, group=group))
    drive.step()
    order = sorted(drive.scheduler.running, key=lambda seq: seq.key)
    assert [seq.request_id for seq in order] == ["a0", "a1", "b0", "b1", "c0", "c1", "a2", "b2", "c2"]


def test_a_better_priority_is_never_asked_for_a_row_and_a_worse_one_gives_only_what_a_group_has_in_excess() -> None:
    better = busy(4, num_samples=4, priority=-1)
    waits = better.add(make_request("single", [9], max_tokens=4))
    for _ in range(10):
        better.step()
    assert not waits.tokens
    worse = busy(4, num_samples=4, priority=1)
    urgent = worse.add(make_request("single", [9], max_tokens=4, ignore_eos=True))
    assert steps_to_first_token(worse, [urgent], 4) <= [4]


def test_an_aborted_taker_costs_at_most_one_row() -> None:
    drive = busy(4, num_samples=4, depth=2)
    single = drive.add(make_request("single", [9], max_tokens=4))
    drive.step()
    drive.engine.abort("single")
    drive.finish()
    drive.check_outputs()
    assert single.finish_reason is FinishReason.ABORT
    assert drive.engine.stats().num_preemptions <= 1
