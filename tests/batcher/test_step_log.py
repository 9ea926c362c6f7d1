"""The sample of steps: who was in which, and no more of them than a reader needs."""

from __future__ import annotations

from batcher.step_log import NUM_KEPT, SAMPLE_S
from tests.batcher.harness import Drive, make_request


def step(drive: Drive, seconds: float = SAMPLE_S) -> None:
    drive.clock.now += seconds
    drive.step()


def test_each_record_says_which_slot_decoded_and_which_computed_a_prompt() -> None:
    drive = Drive()
    drive.add(make_request("first", [10, 11, 12], ignore_eos=True))
    step(drive)
    step(drive)
    drive.add(make_request("second", [20, 21, 22, 23], ignore_eos=True))
    step(drive)
    slots = [record.slots for record in drive.engine.stats().recent_steps]
    assert slots == ["p", "d", "dp"]
    last = drive.engine.stats().recent_steps[-1]
    assert (last.number, last.time_s, last.num_tokens) == (2, drive.clock.now, 5)
    assert last.num_tokens_padded >= last.num_tokens


def test_a_slot_that_is_idle_between_two_others_is_marked() -> None:
    drive = Drive()
    for name, tokens in (("a", 9), ("b", 1), ("c", 9)):
        drive.add(make_request(name, [10, 11], ignore_eos=True, max_tokens=tokens))
    for _ in range(5):
        step(drive)
    assert drive.engine.stats().recent_steps[-1].slots == "d.d"


def test_steps_that_follow_each_other_closely_are_sampled() -> None:
    drive = Drive()
    drive.add(make_request("one", [10, 11], ignore_eos=True, max_tokens=40))
    for _ in range(20):
        step(drive, SAMPLE_S / 10)
    assert 2 <= len(drive.engine.stats().recent_steps) <= 3


def test_only_the_last_records_are_kept() -> None:
    drive = Drive()
    for number in range(3):
        drive.add(make_request(f"r{number}", [10, 11], ignore_eos=True, max_tokens=50))
        while drive.engine.num_live:
            step(drive)
    numbers = [record.number for record in drive.engine.stats().recent_steps]
    assert len(numbers) == NUM_KEPT
    assert numbers == sorted(set(numbers))
