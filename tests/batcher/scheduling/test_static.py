"""The baseline: a fixed batch to its end."""

from __future__ import annotations

from batcher.config import Scheduling
from batcher.request import FinishReason
from batcher.step import StepInput
from tests.batcher.harness import EOS, Drive, make_capacity, make_request


def num_rows(step: StepInput) -> int:
    """Rows that are computed, not padding."""
    return int(step.packed[1])


def test_nobody_joins_or_leaves_a_batch_until_the_longest_has_ended() -> None:
    drive = Drive(make_capacity(num_slots=4), scheduling=Scheduling.STATIC, prefix_caching=False)
    for i, length in enumerate((2, 9, 3, 2, 4)):
        drive.add(make_request(str(i), [10 + i, 11], max_tokens=length, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    shapes = [(bucket.num_tokens, bucket.num_rows) for bucket in drive.runner.executed]
    # Four prompts; eight decodes of four rows, though only one is of use in the end; then the fifth alone.
    assert shapes == [(8, 4)] + [(4, 4)] * 8 + [(8, 4)] + [(1, 1)] * 3
    assert [num_rows(step) for step in drive.runner.steps] == [4] * 9 + [1] * 4
    stats = drive.engine.stats()
    assert stats.num_preemptions == 0
    assert stats.step_rows == 4 + (1 + 8 + 2 + 1) + 1 + 3  # rows that had ended are waste
    assert stats.step_tokens == 8 + (1 + 8 + 2 + 1) + 2 + 3
    assert stats.step_rows_padded == 4 + 8 * 4 + 4 + 3


def test_a_row_that_has_ended_goes_on_to_attend_to_all_it_drew() -> None:
    drive = Drive(make_capacity(num_slots=2), scheduling=Scheduling.STATIC)
    short = drive.add(make_request("short", [10, 11], max_tokens=2, ignore_eos=True))
    drive.add(make_request("long", [12, 13], max_tokens=30, ignore_eos=True))
    most_used = 0
    while drive.step():
        most_used = max(most_used, drive.scheduler.pool.num_used)
    drive.check_outputs()
    drive.check_idle()
    assert len(short.tokens) == 2
    assert most_used == 2 * 8  # pages of 4: each row stored 2 + 29 tokens


def test_a_row_that_meets_its_end_by_itself_goes_on_too() -> None:
    drive = Drive(make_capacity(num_slots=2), scheduling=Scheduling.STATIC)
    for first in range(3, 61):  # 29 batches; some of their requests meet an end before their limits
        drive.add(make_request(str(first), [first, 11], max_tokens=40))
    drive.finish()
    drive.check_outputs()
    ends = [heard.tokens[-1] for heard in drive.heard.values() if heard.finish_reason is FinishReason.STOP]
    assert set(ends) == set(EOS)
    assert {num_rows(step) for step in drive.runner.steps} == {2}


def test_where_the_context_is_full_a_row_that_has_ended_stands_still() -> None:
    drive = Drive(make_capacity(num_slots=2), scheduling=Scheduling.STATIC)  # a context of 64
    drive.add(make_request("full", range(60), max_tokens=2, ignore_eos=True))
    drive.add(make_request("long", [12, 13], max_tokens=20, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    decodes = [step for step in drive.runner.steps if step.bucket.decode_only]
    assert [num_rows(step) for step in decodes] == [2] * 3 + [1] * 16
    assert {step.bucket.num_rows for step in decodes} == {2}


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


def test_a_row_held_back_by_its_grammar_does_not_make_ended_rows_outgrow_their_pages() -> None:
    # A row under a grammar is held back while its mask is computed, so the batch takes more steps than its longest
    # output has tokens. Rows that have ended stay within the pages that were reserved for them.
    drive = Drive(make_capacity(num_slots=3, num_pages=9, page_size=1, max_model_len=8), scheduling=Scheduling.STATIC)
    drive.add(make_request("grammar", [0], max_tokens=3, grammar="1 0 5"))
    drive.add(make_request("short", [0], max_tokens=1))
    drive.add(make_request("as short", [0], max_tokens=1))
    drive.finish()
    drive.check_outputs()
