"""Long prompts leave room in the steps for others, and change no token."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from batcher.config import EngineConfig
from batcher.long_prompts import LongPrompts
from scripts.lab.simulation.machine import Machine, SimulatedRequest, simulate
from tests.batcher.harness import EOS, Drive, make_capacity, make_request

CAPACITY = make_capacity(num_slots=8, num_pages=128, page_size=4, max_model_len=256, max_num_batched_tokens=32)
FOUR = LongPrompts(threshold=4)


def test_fifty_short_prompts_do_not_wait_behind_one_of_100_000_tokens() -> None:
    machine = Machine(max_model_len=131072, num_pages=4096, page_size=64)
    short = SimulatedRequest(arrival_s=0.05, num_prompt=20, num_output=3)
    requests = [SimulatedRequest(arrival_s=0.0, num_prompt=100_000, num_output=3), *[short] * 50]
    today, shared = (simulate(requests, machine, long_prompts=LongPrompts(threshold=t)) for t in (0, 1024))
    assert max(s.ttft for s in shared.served if s.num_prompt == 20) < 0.2
    assert min(s.ttft for s in today.served if s.num_prompt == 20) > 2
    assert shared.output_tokens == today.output_tokens


@pytest.mark.parametrize("most", [1, 2, 3, None])
def test_so_many_long_prompts_run_at_once_and_short_ones_pass_the_others(most: int) -> None:
    drive = Drive(CAPACITY, long_prompts=LongPrompts(threshold=4, most=most), prefix_caching=False)
    for number, length in enumerate([40, 40, 40, 3]):
        drive.add(make_request(str(number), [3 + number] * length, max_tokens=3))
    drive.step()
    states = {seq.request_id: seq.num_computed for seq in drive.scheduler.running}
    assert states == {str(number): 4 for number in range(most or 3)} | {"3": 3 + (states["3"] > 3)}
    drive.finish()
    drive.check_outputs()


def test_a_prompt_that_is_mostly_in_the_cache_is_not_long() -> None:
    drive = Drive(CAPACITY, long_prompts=LongPrompts(threshold=8, most=1))
    prompt = list(range(3, 43))
    drive.add(make_request("first", prompt, max_tokens=1))
    drive.finish()
    drive.add(make_request("long", [60] * 80, max_tokens=1))
    drive.add(make_request("known", [*prompt, 70], max_tokens=1))
    drive.add(make_request("unknown", [71, *prompt], max_tokens=1))
    drive.step()
    assert [seq.request_id for seq in drive.scheduler.running] == ["long", "known"]
    drive.finish()
    drive.check_outputs()


def steps_until(drive: Drive, is_done: Callable[[], bool]) -> int:
    """Steps until it is, with the last one."""
    for number in range(1, 1000):
        drive.step()
        if is_done():
            return number
    raise AssertionError("it never was")


@pytest.mark.parametrize("num_long", [3, 30, 100])
def test_a_short_prompt_waits_for_no_long_one_however_many_wait(num_long: int) -> None:
    drive = Drive(CAPACITY, long_prompts=LongPrompts(threshold=4, most=1), prefix_caching=False)
    for number in range(num_long):
        drive.add(make_request(f"long {number}", [3 + number % 50] * 200, max_tokens=1))
    drive.add(make_request("short", [60] * 3, max_tokens=1))
    num_looked_at = 8  # in each step
    most = -(-num_long // num_looked_at) + 1  # and the step in flight
    assert steps_until(drive, lambda: drive.heard["short"].finish_reason is not None) <= most
    drive.finish()
    drive.check_outputs()


def test_long_prompts_take_turns_in_the_order_of_the_queue_while_short_ones_keep_coming() -> None:
    """The bound: a long prompt takes as many steps as its tokens divided by the threshold. Short ones add none."""
    drive = Drive(CAPACITY, long_prompts=LongPrompts(threshold=4, most=1), prefix_caching=False)
    lengths = [40, 80, 60, 20]
    for number, length in enumerate(lengths):
        drive.add(make_request(f"long {number}", [3 + number] * length, max_tokens=1))
    ended: dict[str, int] = {}
    for step in range(1, sum(lengths)):
        drive.add(make_request(f"short {step}", [60] * 3, max_tokens=2))
        drive.step()
        for number in range(len(lengths)):
            name = f"long {number}"
            if drive.heard[name].finish_reason is not None:
                ended.setdefault(name, step)
    assert list(ended) == [f"long {number}" for number in range(len(lengths))]
    due = 0
    for number, length in enumerate(lengths):
        due += -(-length // 4) + 1  # and the step in flight
        assert ended[f"long {number}"] <= due + 1
    drive.finish()
    drive.check_outputs()


@pytest.mark.parametrize("long_prompts", [LongPrompts(threshold=-1), LongPrompts(most=0)])
def test_numbers_without_a_meaning_are_refused(long_prompts: LongPrompts) -> None:
    with pytest.raises(ValueError, match="a long prompt has some tokens"):
        EngineConfig(eos_token_ids=EOS, long_prompts=long_prompts)
