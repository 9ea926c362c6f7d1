"""What the scheduler decides, case by case, seen through the steps that reach the runner."""

from __future__ import annotations

import numpy as np
import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.scheduling.request_state import RequestState, State
from batcher.scheduling.scheduler import _MAX_STALLS, Scheduler
from batcher.scheduling.step_plan import StepPlan
from batcher.step import Capacity
from scripts.lab.simulation.policies import AdmitIfFree
from tests.batcher.harness import Drive, make_capacity, make_request


class Bench:
    """A scheduler alone, driven by hand: `done` says that a step has returned, with a token for every emitting row."""

    def __init__(self, capacity: Capacity, *, step_cost_tokens: int = 4, **options: bool) -> None:
        self.capacity = capacity
        limits = BucketConfig(
            max_num_batched_tokens=capacity.max_num_batched_tokens,
            max_num_seqs=capacity.num_slots,
            min_mixed_tokens=8,
        )
        config = EngineConfig(eos_token_ids=(), step_cost_tokens=step_cost_tokens, **options)
        self.scheduler = Scheduler(capacity, BucketLadder(limits), config)

    def add(
        self, name: str, num_prompt: int, *, first: int = 3, max_tokens: int = 10, priority: int = 0
    ) -> RequestState:
        prompt = range(first, first + num_prompt)
        request = make_request(name, prompt, max_tokens=max_tokens, priority=priority)
        seq = RequestState(
            request,
            np.array(prompt, np.int32),
            limit=min(max_tokens, self.capacity.max_model_len - num_prompt),
            stop_ids=frozenset(),
            seed=0,
            arrived_s=0.0,
            on_output=lambda _output: None,
        )
        self.scheduler.add(seq)
        return seq

    def done(self, plan: StepPlan) -> None:
        self.scheduler.step_returned(plan.number)
        for seq, emits in zip(plan.rows, plan.emits, strict=True):
            if emits and seq.state is not State.FINISHED:
                seq.output.append(5)
                if len(seq.output) == seq.limit:
                    self.scheduler.finish(seq)
        self.scheduler.check_integrity()

    def run(self) -> StepPlan:
        """One step from plan to result."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.done(plan)
        return plan


def waiting(bench: Bench) -> list[RequestState]:
    return sorted(bench.scheduler.waiting, key=bench.scheduler.waiting.key)


def rows(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [
        (seq.request_id, q_len, emits) for seq, q_len, emits in zip(plan.rows, plan.q_lens, plan.emits, strict=True)
    ]


def test_a_prompt_is_cut_to_the_budget_and_emits_with_its_last_chunk() -> None:
    bench = Bench(make_capacity(max_num_batched_tokens=8))
    bench.add("a", 18, max_tokens=2)
    assert rows(bench.run()) == [("a", 8, 0)]
    assert rows(bench.run()) == [("a", 8, 0)]
    assert rows(bench.run()) == [("a", 2, 1)]
    assert rows(bench.run()) == [("a", 1, 1)]
    assert bench.scheduler.schedule() is None


def test_decodes_come_first_and_prompts_share_what_is_left_of_the_budget() -> None:
    bench = Bench(make_capacity(max_num_batched_tokens=8))
    bench.add("a", 3)
    bench.add("b", 4, first=30)
    assert rows(bench.run()) == [("a", 3, 1), ("b", 4, 1)]
    bench.add("c", 9, first=40)
    assert rows(bench.run()) == [("a", 1, 1), ("b", 1, 1), ("c", 6, 0)]
    bench.add("d", 9, first=60)
    assert rows(bench.run()) == [("a", 1, 1), ("b", 1, 1), ("c", 3, 1), ("d", 3, 0)]


def test_a_chunk_of_one_token_stands_with_the_decodes() -> None:
    bench = Bench(make_capacity())
    bench.add("a", 3)
    bench.run()
    bench.add("b", 5, first=30)
    bench.add("c", 1, first=40)
    plan = bench.run()
    assert rows(plan) == [("a", 1, 1), ("c", 1, 1), ("b", 5, 1)]
    assert plan.num_singles == 2
    bench.add("d", 1, first=50)
    assert bench.run().bucket.decode_only


def test_the_step_after_a_dispatched_one_feeds_its_token_back_unread() -> None:
    bench = Bench(make_capacity())
    seq = bench.add("a", 3, max_tokens=3)
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule()  # nothing has been read yet
    third = bench.scheduler.schedule()
    assert [rows(plan) for plan in (first, second, third)] == [[("a", 3, 1)], [("a", 1, 1)], [("a", 1, 1)]]
    assert seq.num_emitted - len(seq.output) == 3
    assert not second.chunks  # the slot's last token
    assert bench.scheduler.schedule() is None  # its three tokens are on the way: no surplus by length, ever


def test_lower_priority_numbers_run_sooner_and_equals_in_order_of_arrival() -> None:
    bench = Bench(make_capacity(num_slots=2))
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -1)):
        bench.add(name, 3, first=10 * ord(name), max_tokens=1, priority=priority)
    assert [name for name, _, _ in rows(bench.run())] == ["d", "b"]
    assert [name for name, _, _ in rows(bench.run())] == ["c", "a"]


def test_the_latest_of_the_lowest_priority_is_preempted_and_keeps_its_rank() -> None:
    capacity = make_capacity(num_slots=3, page_size=4, max_model_len=24, num_pages=6)
    bench = Bench(capacity, prefix_caching=False)
    bench.scheduler.forecast = AdmitIfFree()
    humble = bench.add("humble", 7, max_tokens=12, priority=1)
    early, late = bench.add("early", 7, first=20, max_tokens=12), bench.add("late", 7, first=40, max_tokens=12)
    for seq in (early, late, humble):
        seq.stop_ids = frozenset({99})
    bench.run()
    assert [seq.state for seq in (early, late, humble)] == [State.RUNNING] * 3
    bench.run()  # the eighth token of each is computed: their second pages are full
    newcomer = bench.add("newcomer", 1, first=90, priority=1)
    assert rows(bench.run()) == [("early", 1, 1), ("late", 1, 1)]
    assert (humble.state, humble.num_preemptions) == (State.WAITING, 1)
    assert waiting(bench) == [humble, newcomer]
    for _ in range(3):
        bench.run()
    assert late.state is State.RUNNING
    assert rows(bench.run()) == [("early", 1, 1)]  # both needed a fourth page
    assert waiting(bench) == [late, humble, newcomer]
    assert bench.scheduler.num_preemptions == 2


def test_pages_that_come_back_with_a_step_in_flight_are_waited_for() -> None:
    capacity = make_capacity(num_slots=3, page_size=4, max_model_len=24, num_pages=6)
    bench = Bench(capacity, prefix_caching=False)
    bench.scheduler.forecast = AdmitIfFree()
    sequences = [bench.add(str(i), 5, first=20 * i, max_tokens=12) for i in range(3)]
    for seq in sequences:
        seq.stop_ids = frozenset({99})
    for _ in range(3):
        bench.run()
    in_flight = bench.scheduler.schedule()  # fills the second page of each
    assert bench.scheduler.schedule() is None  # all of them stall while a step in flight may still end one of them
    assert [seq.state for seq in sequences] == [State.RUNNING] * 3
    bench.done(in_flight)
    assert rows(bench.run()) == [("0", 1, 1), ("1", 1, 1)]
    assert sequences[2].state is State.WAITING
    assert bench.scheduler.num_preemptions == 1


def stalling_bench(*, second_max_tokens: int, third_priority: int = 0) -> tuple[Bench, list[RequestState]]:
    """Three decoding requests and no free page; the first needs one now, the others later."""
    capacity = make_capacity(num_slots=3, page_size=32, max_model_len=96, num_pages=3)
    bench = Bench(capacity, prefix_caching=False)
    bench.scheduler.forecast = AdmitIfFree()
    first = bench.add("first", 31, max_tokens=40)
    second = bench.add("second", 2, first=40, max_tokens=second_max_tokens)
    third = bench.add("third", 2, first=50, max_tokens=60, priority=third_priority)
    bench.run()
    bench.run()
    assert all(seq.decoding for seq in (first, second, third))
    assert first.num_computed == 32
    return bench, [first, second, third]


def test_a_decode_without_a_page_stalls_until_another_request_ends() -> None:
    bench, (first, _, third) = stalling_bench(second_max_tokens=10)
    num_emitted = first.num_emitted
    stalls = 0
    while (names := [name for name, _, _ in rows(bench.run())]) == ["second", "third"]:
        stalls += 1
        assert first.num_stalls == stalls
        assert first.num_emitted == num_emitted
    assert 1 <= stalls < _MAX_STALLS
    assert names == ["first", "third"]
    assert (first.num_stalls, third.state, bench.scheduler.num_preemptions) == (0, State.RUNNING, 0)


def test_a_stall_ends_with_a_preemption_after_its_longest_time() -> None:
    bench, (first, second, third) = stalling_bench(second_max_tokens=60)
    for _ in range(_MAX_STALLS):
        assert [name for name, _, _ in rows(bench.run())] == ["second", "third"]
    assert [name for name, _, _ in rows(bench.run())] == ["first", "second"]
    assert (third.state, bench.scheduler.num_preemptions) == (State.WAITING, 1)
    assert (first.num_stalls, second.num_stalls) == (0, 0)


def test_no_request_stalls_for_one_of_a_lower_priority() -> None:
    bench, (_, _, third) = stalling_bench(second_max_tokens=60, third_priority=1)
    assert [name for name, _, _ in rows(bench.run())] == ["first", "second"]
    assert third.state is State.WAITING


def test_a_preempted_request_is_computed_again_from_everything_that_is_known() -> None:
    bench = Bench(make_capacity(), prefix_caching=False)
    seq = bench.add("a", 5)
    for _ in range(4):
        bench.run()
    assert seq.output.tolist() == [5] * 4
    bench.scheduler.preempt(seq)
    assert bench.scheduler.pool.num_used == 0
    plan = bench.run()
    assert rows(plan) == [("a", 9, 1)]
    assert seq.to_compute.tolist() == [3, 4, 5, 6, 7, 5, 5, 5, 5]
    assert rows(bench.run()) == [("a", 1, 1)]


def test_a_preempted_request_finds_the_full_pages_of_its_output_again() -> None:
    bench = Bench(make_capacity(page_size=4))
    seq = bench.add("a", 5)
    for _ in range(4):
        bench.run()
    bench.scheduler.preempt(seq)  # eight of its nine tokens are computed
    assert rows(bench.run()) == [("a", 1, 1)]
    assert seq.num_hit_pages == 2


def test_pages_and_slot_of_a_row_in_flight_are_not_reused_before_its_step_has_returned() -> None:
    bench = Bench(make_capacity(num_slots=1, num_pages=16))
    seq = bench.add("a", 5)
    bench.add("b", 5, first=50)
    first = bench.scheduler.schedule()
    second = bench.scheduler.schedule()
    bench.done(first)
    bench.scheduler.finish(seq)  # as if its first token had ended it
    assert bench.scheduler.schedule() is None
    assert bench.scheduler.pool.num_used == 2
    bench.done(second)
    assert bench.scheduler.pool.num_used == 0
    assert rows(bench.run()) == [("b", 5, 1)]


def test_one_preempted_in_flight_waits_for_its_token_before_it_is_admitted_again() -> None:
    bench = Bench(make_capacity())
    seq = bench.add("a", 5)
    first = bench.scheduler.schedule()
    bench.scheduler.preempt(seq)
    assert bench.scheduler.schedule() is None
    bench.done(first)
    assert seq.output.tolist() == [5]
    assert rows(bench.run()) == [("a", 2, 1)]  # its first page came back from the prefix cache


def test_the_last_prompt_token_is_always_computed() -> None:
    bench = Bench(make_capacity(page_size=4))
    bench.add("a", 8, max_tokens=1)
    bench.run()
    again = bench.add("b", 8, max_tokens=1)
    assert rows(bench.run()) == [("b", 4, 1)]
    assert again.num_hit_tokens == 4
    assert (bench.scheduler.prefix_queries, bench.scheduler.prefix_hits) == (16, 4)


def test_the_same_rows_may_come_back_to_other_slots() -> None:
    bench = Bench(make_capacity(), prefix_caching=False)
    sequences = [bench.add("a", 2), bench.add("b", 2, first=30)]
    bench.run()
    bench.run()
    for seq in sequences:
        bench.scheduler.preempt(seq)
    plan = bench.run()
    assert plan.rows == sequences
    assert plan.slots.tolist() == [seq.slot for seq in sequences]


def test_output_is_found_by_the_next_turn() -> None:
    bench = Bench(make_capacity(page_size=4))
    first = bench.add("a", 6, max_tokens=7)
    for _ in range(7):
        bench.run()
    assert first.output.tolist() == [5] * 7
    prompt = np.array([*range(3, 9), *[5] * 7, 8], np.int32)
    second = bench.add("b", 14)
    second.prompt = second.to_compute = prompt
    bench.run()
    assert second.num_hit_tokens == 12  # the 13th token was never computed


def test_of_samples_of_one_prompt_only_the_first_computes_it() -> None:
    bench = Bench(make_capacity(page_size=4, max_num_batched_tokens=32))
    for name in ("a", "b", "c"):
        bench.add(name, 18)
    bench.add("z", 3, first=70)
    assert rows(bench.run()) == [("a", 18, 1), ("z", 3, 1)]
    assert rows(bench.run()) == [("a", 1, 1), ("z", 1, 1), ("b", 2, 1), ("c", 2, 1)]
    assert bench.scheduler.pool.num_used == 4 + 3 * 1 + 1


def test_admission_looks_ahead_to_the_output_still_to_come() -> None:
    # Each takes 2 pages now and 6 in the end: two fit the pool of 12, a third would cause preemptions later.
    bench = Bench(make_capacity(page_size=4, num_slots=3, max_model_len=24, num_pages=12))
    for i in range(3):
        bench.add(str(i), 6, first=10 * i, max_tokens=18)
    assert len(bench.run().rows) == 2
    while len(bench.scheduler.waiting):
        bench.run()
    while bench.scheduler.running:
        bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_a_short_one_may_join_where_the_long_one_peaks_after_it_has_gone() -> None:
    bench = Bench(make_capacity(page_size=4, num_slots=2, max_model_len=24, num_pages=7))
    bench.add("long", 4, max_tokens=20)  # 6 pages at its end
    bench.add("short", 4, first=40, max_tokens=4)  # 2 pages, but then the long one has only 2
    assert len(bench.run().rows) == 2


def test_the_first_in_line_is_admitted_whatever_the_forecast_says_when_nothing_else_runs() -> None:
    bench = Bench(make_capacity(page_size=4, max_model_len=64, num_pages=16))
    bench.add("a", 60, max_tokens=4)
    assert rows(bench.run()) == [("a", 32, 0)]


def test_nobody_passes_the_one_who_waits_for_room() -> None:
    bench = Bench(make_capacity(page_size=4, num_slots=4, max_model_len=24, num_pages=8))
    bench.add("a", 12, max_tokens=4)
    bench.add("big", 20, first=40, max_tokens=4)
    bench.add("small", 1, first=80, max_tokens=1)
    assert [name for name, _, _ in rows(bench.run())] == ["a"]
    assert [name for name, _, _ in rows(bench.run())] == ["a"]


@pytest.mark.parametrize(
    ("num_prompt", "alone", "expected"),
    [
        (9, True, 9),  # one token above the rung: cheaper to pad to 16 than a step of its own (cost 4, padded 8)
        (9, False, 8),  # a step comes anyway
        (15, False, 15),  # seven tokens to push away against one of padding
        (33, True, 32),
    ],
)
def test_the_last_chunk_is_trimmed_where_padding_costs_more(num_prompt: int, alone: bool, expected: int) -> None:
    bench = Bench(make_capacity(max_num_batched_tokens=64, num_slots=2))
    bench.add("a", num_prompt)
    if not alone:
        bench.add("b", 3, first=70)
        bench.add("c", 3, first=80)
        bench.scheduler.token_budget = num_prompt  # so that the others have to wait
    plan = bench.scheduler.schedule()
    assert rows(plan)[0][1] == expected


def test_a_pool_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capacity\.num_pages=15 capacity\.pages_per_seq=16"):
        Bench(make_capacity(num_pages=15))


def test_a_long_prompt_gets_on_under_a_stream_of_short_ones() -> None:
    drive = Drive(make_capacity(num_slots=3, page_size=4, max_model_len=64, num_pages=18))
    for i in range(6):
        drive.add(make_request(f"before {i}", [i], max_tokens=8, ignore_eos=True))
    drive.add(make_request("long", range(3, 53), max_tokens=10))
    for i in range(100):
        drive.add(make_request(f"after {i}", [i % 50], max_tokens=8, ignore_eos=True))
        drive.step()
        if drive.heard["long"].finish_reason:
            break
    assert drive.num_steps < 60
    drive.finish()
    drive.check_outputs()
