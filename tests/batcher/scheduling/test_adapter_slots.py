"""Adapters share the slots: who is replaced, who is passed, and how often. Every step checks who holds what."""

from __future__ import annotations

from unittest.mock import patch

from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.scheduling import adapter_slots
from batcher.scheduling.request_state import State
from tests.batcher.harness import Drive, make_capacity, make_request
from tests.examples import examples


def make_drive(max_loras: int, num_slots: int = 4, depth: int = 1, **config: object) -> Drive:
    capacity = make_capacity(
        max_loras=max_loras, num_slots=num_slots, num_pages=20 * num_slots, max_num_batched_tokens=8 * num_slots
    )
    return Drive(capacity, pipeline_depth=depth, **config)


def add(drive: Drive, name: str, adapter: int, num_tokens: int = 4, **options: object) -> None:
    number = len(drive.heard)
    options |= {"max_tokens": num_tokens, "ignore_eos": True, "adapter": adapter}
    drive.add(make_request(name, [5 + number % 90, 6, 7], **options))


def running(drive: Drive) -> set[str]:
    return {seq.request_id for seq in drive.scheduler.running}


def writes(drive: Drive) -> list[tuple[int, int]]:
    """(slot, adapter) of all writes."""
    return [(write.slot, write.adapter) for step in drive.runner.steps for write in step.adapters]


def finish(drive: Drive) -> None:
    drive.finish()
    drive.check_outputs()


def test_an_adapter_is_written_once_while_it_keeps_its_slot() -> None:
    drive = make_drive(2)
    for i in range(6):
        add(drive, str(i), adapter=1 + i % 2)
    finish(drive)
    add(drive, "later", adapter=2)
    finish(drive)
    assert writes(drive) == [(1, 1), (2, 2)]


def test_the_least_recently_used_adapter_is_replaced() -> None:
    drive = make_drive(2)
    for adapter in (1, 2, 1, 3, 1, 2):
        add(drive, str(len(drive.heard)), adapter)
        finish(drive)
    assert writes(drive) == [(1, 1), (2, 2), (2, 3), (2, 2)]


def test_an_adapter_that_others_wait_for_is_replaced_last() -> None:
    drive = make_drive(2, num_slots=2)
    add(drive, "a", adapter=1, num_tokens=2)
    add(drive, "b", adapter=2, num_tokens=2)
    drive.step()
    add(drive, "c", adapter=3)  # it takes a row first, and adapter 1 was used before adapter 2
    add(drive, "d", adapter=1)
    finish(drive)
    assert writes(drive) == [(1, 1), (2, 2), (2, 3)]


def test_requests_of_other_adapters_and_of_the_base_model_pass_one_that_waits_for_a_slot() -> None:
    drive = make_drive(1)
    add(drive, "first", adapter=1, num_tokens=9)
    for i in range(20):
        add(drive, f"cold {i}", adapter=2)
    add(drive, "base", adapter=0)
    add(drive, "hot", adapter=1)
    drive.step()
    assert running(drive) == {"first", "base", "hot"}
    finish(drive)
    assert writes(drive) == [(1, 1), (1, 2)]


def stream(drive: Drive, hot: int, num_tokens: int, **options: object) -> None:
    """Keeps requests of the adapters 1 to `hot` waiting."""
    waiting = {seq.request.adapter for seq in drive.scheduler.waiting}
    for adapter in range(1, hot + 1):
        if adapter not in waiting:
            for _ in range(4):
                add(drive, f"{adapter}: {len(drive.heard)}", adapter, num_tokens, **options)


@settings(max_examples=examples(60))
@given(
    max_loras=st.integers(1, 3),
    more_rows=st.integers(0, 4),
    depth=st.integers(1, 2),
    max_passes=st.integers(0, 12),
    num_tokens=st.integers(1, 6),
    cold=st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_requests_of_cold_adapters_are_passed_a_bounded_number_of_times(
    max_loras: int, more_rows: int, depth: int, max_passes: int, num_tokens: int, cold: list[int]
) -> None:
    """Others would keep all slots for ever. Each cold adapter waits for those before it: until `max_passes` requests
    have passed it, and until the rows in its slot have ended, which takes so many steps of at most so many rows."""
    num_rows = max_loras + more_rows
    with patch.object(adapter_slots, "MAX_PASSES", max_passes):
        drive = make_drive(max_loras, num_rows, depth)
        for _ in range(4):
            stream(drive, max_loras, num_tokens)
            drive.step()
        for i, adapter in enumerate(cold):
            add(drive, f"cold {i}", 100 + adapter, num_tokens)
        arrived = len(drive.heard)
        bound = len(cold) * (max_passes + num_rows * (num_tokens + 4 * depth + 2))
        late: set[str] = set()
        while any(not drive.heard[f"cold {i}"].outputs for i in range(len(cold))):
            stream(drive, max_loras, num_tokens)
            drive.step()
            late |= {seq.request_id for seq in drive.scheduler.running if seq.arrival >= arrived}
            assert len(late) <= bound, "somebody starves"
        finish(drive)


def test_the_slot_with_the_fewest_rows_is_kept_for_the_one_that_waited_long() -> None:
    drive = make_drive(2, num_slots=8)
    for i in range(3):
        add(drive, f"many {i}", adapter=1, num_tokens=40)
    add(drive, "few", adapter=2, num_tokens=8)
    drive.step()
    with patch.object(adapter_slots, "MAX_PASSES", 1):
        add(drive, "cold", adapter=3, num_tokens=40)
        add(drive, "passes", adapter=2)
        drive.step()
        assert "passes" in running(drive)
        add(drive, "kept out", adapter=2)
        add(drive, "goes on", adapter=1)
        drive.step()
        assert running(drive) >= {"passes", "goes on"} and "kept out" not in running(drive)
        while "cold" not in running(drive):
            drive.step()
        assert drive.heard["few"].finish_reason and drive.heard["passes"].finish_reason
        assert writes(drive) == [(1, 1), (2, 2), (2, 3)]
        finish(drive)


def test_a_slot_that_is_kept_is_not_taken_by_another_cold_adapter() -> None:
    drive = make_drive(1, num_slots=4)
    add(drive, "base", adapter=0, num_tokens=50, client=1)
    add(drive, "runs", adapter=1, client=1)
    drive.step()
    with patch.object(adapter_slots, "MAX_PASSES", 1):
        add(drive, "waited long", adapter=2, client=1)
        add(drive, "passes", adapter=1, client=1)
        drive.step()
        add(drive, "later", adapter=3, client=2)  # a client without a row goes first in the queue
        finish(drive)
    assert [adapter for _, adapter in writes(drive)] == [1, 2, 3]


def test_passes_are_counted_anew_when_an_adapter_has_had_a_slot() -> None:
    drive = make_drive(1, num_slots=2)
    with patch.object(adapter_slots, "MAX_PASSES", 1):
        add(drive, "first", adapter=1)
        drive.step()
        for i in range(4):
            add(drive, f"x{i}", adapter=2, num_tokens=12 if i == 3 else 4)
        add(drive, "passes x0", adapter=1)
        while "x1" not in running(drive):
            drive.step()
        add(drive, "h", adapter=1)
        for i in range(4, 7):
            add(drive, f"x{i}", adapter=2)
        while "h" not in running(drive):
            drive.step()
        assert drive.heard["x4"].outputs and not drive.heard["x5"].outputs  # x4 has passed h, and x5 may not
        add(drive, "passes x5", adapter=1)
        drive.step()
        assert "passes x5" in running(drive)
        finish(drive)
    assert [adapter for _, adapter in writes(drive)] == [1, 2, 1, 2]


def test_requests_of_a_better_priority_are_not_kept_out_for_one_that_waits() -> None:
    drive = make_drive(1, num_slots=3)
    add(drive, "better", adapter=1, num_tokens=9, priority=-1)
    drive.step()
    with patch.object(adapter_slots, "MAX_PASSES", 0):
        add(drive, "cold", adapter=2)
        add(drive, "equal", adapter=1)
        add(drive, "also better", adapter=1, priority=-1)
        drive.step()
        assert running(drive) == {"better", "also better"}
        finish(drive)
    assert writes(drive) == [(1, 1), (1, 2), (1, 1)]


def test_an_abort_of_the_one_that_waited_lets_the_others_in_again() -> None:
    drive = make_drive(1, num_slots=3)
    add(drive, "runs", adapter=1, num_tokens=30)
    drive.step()
    with patch.object(adapter_slots, "MAX_PASSES", 0):
        add(drive, "cold", adapter=2)
        add(drive, "kept out", adapter=1)
        drive.step()
        assert running(drive) == {"runs"}
        drive.engine.abort("cold")
        drive.step()
        assert running(drive) == {"runs", "kept out"}
        finish(drive)


def test_a_preempted_request_may_lose_its_slot_and_is_admitted_anew() -> None:
    drive = make_drive(1, num_slots=1)
    add(drive, "a", adapter=1, num_tokens=12, priority=0)
    for _ in range(4):
        drive.step()
    add(drive, "b", adapter=2, priority=-1)
    drive.scheduler.preempt(drive.scheduler.running[0])
    finish(drive)
    assert writes(drive) == [(1, 1), (1, 2), (1, 1)]


def test_more_urgent_requests_have_their_adapters_staged_first() -> None:
    """What was staged for others is unstaged, so those with a worse priority cannot hold up the device's places."""
    drive = make_drive(1, num_slots=1)
    add(drive, "runs", adapter=1, num_tokens=20)
    drive.step()
    for adapter in (2, 3):
        add(drive, str(adapter), adapter, priority=1)
    drive.step()
    assert drive.runner.staged == {2, 3}
    add(drive, "urgent", adapter=4)
    drive.step()
    assert drive.runner.staged == {4, 2}
    finish(drive)
    assert [adapter for _, adapter in writes(drive)] == [1, 4, 2, 3]


def test_a_slot_is_not_replaced_while_a_step_in_flight_has_a_row_of_it() -> None:
    drive = make_drive(1, depth=3)
    add(drive, "a", adapter=1, num_tokens=30)
    for _ in range(3):
        drive.step()
    add(drive, "b", adapter=2)
    drive.engine.abort("a")
    (seq,) = drive.scheduler.running
    drive.step()
    assert seq.state is State.FINISHED and seq.last_step > drive.scheduler.last_done
    assert not running(drive)
    finish(drive)
