"""Drafts change the number of steps and nothing else: every request gets the tokens that it gets without them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import Scheduling
from batcher.request import ErrorCode, FinishReason
from batcher.speculation import SpeculativeScheduler
from batcher.step import Bucket, Variant
from tests.batcher.fake_runner import FakeRunner, Proposal
from tests.batcher.harness import CAPACITY, Drive, make_capacity, make_request
from tests.batcher.test_properties import Scenario, play, scenarios

VOCAB = CAPACITY.vocab_size


def perfect(known: np.ndarray, coming: list[int]) -> list[int]:
    return coming


def nothing(known: np.ndarray, coming: list[int]) -> list[int]:
    return []


def always_wrong(known: np.ndarray, coming: list[int]) -> list[int]:
    return [token + 1 if token == 0 else token - 1 for token in coming]


def mixed(known: np.ndarray, coming: list[int]) -> list[int]:
    """Each place right, wrong or the last one, by a hash of the text."""
    kinds = blake2b(known.astype(np.int32).tobytes(), digest_size=len(coming)).digest()
    drafts = []
    for token, kind in zip(coming, kinds, strict=True):
        if kind % 8 == 0:
            break
        drafts.append(token if kind % 8 > 2 else int(known[-1]))
    return drafts


PROPOSALS: tuple[Proposal, ...] = (perfect, nothing, always_wrong, mixed)


def speculative(propose: Proposal, *, num_drafts: int = 3, max_draft_rows: int = 4, **options: object) -> Drive:
    capacity = make_capacity(keeps_text=True, **options.pop("capacity", {}))
    buckets = {"num_drafts": num_drafts, "max_draft_rows": max_draft_rows}
    return Drive(capacity, runner=FakeRunner(capacity, propose=propose), buckets=buckets, **options)


def num_speculative(drive: Drive) -> int:
    return sum(bucket.num_drafts > 0 for bucket in drive.runner.executed)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.integers(1, 5), st.integers(1, 4), st.sampled_from(PROPOSALS))
def test_whatever_is_drafted_everybody_gets_its_own_text(
    scenario: Scenario, num_drafts: int, max_draft_rows: int, propose: Proposal
) -> None:
    fitting = min(max_draft_rows, scenario.capacity.max_num_batched_tokens // (1 + num_drafts))
    if fitting:
        scenario = replace(scenario, num_drafts=num_drafts, max_draft_rows=fitting, propose=propose)
    drive = play(scenario)
    drive.check_outputs()
    stats = drive.engine.stats()
    counts = stats.speculation
    assert counts.num_accepted_tokens == sum(counts.num_accepted_tokens_per_pos) <= counts.num_draft_tokens
    assert sum(stats.inter_token_latency.counts) == stats.generation_tokens - sum(stats.time_to_first_token.counts)
    assert stats.generation_tokens == sum(len(heard.tokens) for heard in drive.heard.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.sampled_from(PROPOSALS))
def test_with_room_for_all_requests_drafts_delay_none(scenario: Scenario, propose: Proposal) -> None:
    c = scenario.capacity
    roomy = replace(c, num_pages=c.num_slots * c.pages_per_seq, max_num_batched_tokens=c.max_num_batched_tokens + 16)
    drive = play(replace(scenario, capacity=roomy, num_drafts=3, max_draft_rows=4, propose=propose))
    drive.check_outputs()
    assert drive.engine.stats().num_preemptions == 0


@pytest.mark.parametrize("depth", [1, 2])
def test_accepted_drafts_save_steps(depth: int) -> None:
    drive = speculative(perfect, pipeline_depth=depth)
    heard = drive.add(make_request("a", [5, 6, 7], max_tokens=33, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert [len(output.token_ids) for output in heard.outputs] == [1, *[4] * 8]
    assert len(drive.runner.executed) == 9
    counts = drive.engine.stats().speculation
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (8, 24, 24)
    assert counts.num_accepted_tokens_per_pos == [8, 8, 8]


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_exact(max_tokens: int) -> None:
    drive = speculative(perfect)
    heard = drive.add(make_request("a", [5, 6, 7], max_tokens=max_tokens, ignore_eos=True))
    drive.finish()
    assert len(heard.tokens) == max_tokens
    assert heard.finish_reason is FinishReason.LENGTH


def test_tokens_after_a_stop_id_within_an_accepted_run_are_dropped() -> None:
    plain = Drive()
    plain.add(make_request("a", [5, 6, 7], max_tokens=12, ignore_eos=True))
    plain.finish()
    text = plain.heard["a"].tokens
    for place in range(1, 12):
        if text[place] in text[:place]:
            continue
        drive = speculative(perfect)
        request = make_request(
            "a", [5, 6, 7], max_tokens=12, ignore_eos=True, stop_token_ids=(text[place],), logprobs=2
        )
        heard = drive.add(request)
        drive.finish()
        assert heard.tokens == text[: place + 1]
        assert (heard.finish_reason, heard.last.stop_reason) == (FinishReason.STOP, text[place])
        assert all(len(output.logprobs) == len(output.token_ids) for output in heard.outputs)
        assert drive.engine.stats().generation_tokens == place + 1


@pytest.mark.parametrize("number", [2, 3])
def test_a_failed_step_ends_its_requests_and_the_next_ones_are_right(number: int) -> None:
    def fails(step: int) -> None:
        if step == number:
            raise RuntimeError("the device failed")

    capacity = make_capacity(keeps_text=True)
    runner = FakeRunner(capacity, propose=mixed, on_result=fails)
    drive = Drive(capacity, runner=runner, buckets={"num_drafts": 3, "max_draft_rows": 4})
    heard = drive.add(make_request("a", [5, 6, 7], max_tokens=30, ignore_eos=True))
    drive.finish()
    assert heard.last.error_code is ErrorCode.STEP_FAILED
    drive.add(make_request("b", [5, 6, 7], max_tokens=30, ignore_eos=True))
    drive.finish()
    drive.check_outputs()


def test_accepted_tokens_are_found_in_the_prefix_cache() -> None:
    drive = speculative(perfect)
    drive.add(make_request("a", range(5, 13), max_tokens=13, ignore_eos=True))
    drive.finish()
    text = [*range(5, 13), *drive.heard["a"].tokens]
    again = drive.add(make_request("b", text, max_tokens=4, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert again.last.num_cached_tokens == 20  # of 21, whose last one is always computed


def test_a_row_under_a_grammar_goes_on_without_drafts_next_to_others() -> None:
    drive = speculative(perfect, weights_cost_tokens=1000.0)
    drive.add(make_request("free", [5, 6, 7], max_tokens=30, ignore_eos=True))
    drive.add(make_request("bound", [5, 6, 8], max_tokens=8, grammar="4 50 50"))
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().speculation.num_undrafted_rows > 0
    assert {len(output.token_ids) for output in drive.heard["bound"].outputs} <= {0, 1}


def test_drafts_that_keep_failing_are_given_up() -> None:
    drive = speculative(always_wrong, capacity={"max_model_len": 2000, "num_pages": 500}, weights_cost_tokens=4.0)
    drive.add(make_request("a", [5, 6, 7], max_tokens=1000, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert 0 < num_speculative(drive) < 5


def test_text_that_becomes_predictable_is_noticed() -> None:
    def late(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if len(known) > 200 else always_wrong(known, coming)

    drive = speculative(late, capacity={"max_model_len": 2000, "num_pages": 500}, weights_cost_tokens=4.0)
    drive.add(make_request("a", [5, 6, 7], max_tokens=600, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert len(drive.runner.executed) < 200 + 400 / 4 + 20


@pytest.mark.parametrize(("rows", "speculates"), [(1, True), (2, True), (3, False), (4, False)])
def test_more_rows_than_the_largest_program_has_run_without_drafts(rows: int, speculates: bool) -> None:
    drive = speculative(perfect, max_draft_rows=2)
    for i in range(rows):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=20, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert (num_speculative(drive) > 0) == speculates


def test_drafts_that_cost_more_than_they_bring_are_not_computed() -> None:
    """The one row with drafts does not pay for the padded tokens of the other three, whose drafts all fail."""

    def one_of_four(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if known[2] == 0 else always_wrong(known, coming)

    drive = speculative(one_of_four, weights_cost_tokens=1.0, capacity={"max_model_len": 300, "num_pages": 300})
    for i in range(4):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=250, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert num_speculative(drive) < 0.15 * len(drive.runner.executed)


def test_drafts_take_no_page_from_others() -> None:
    """Two requests share a pool that is full: they run on the pages they have, and draft within these."""
    drive = speculative(perfect, capacity={"num_pages": 16, "num_slots": 2}, weights_cost_tokens=1000.0)
    for i in range(2):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=28, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert num_speculative(drive) > 0
    assert drive.engine.stats().num_preemptions == 0


def test_static_batches_have_no_drafts() -> None:
    drive = speculative(perfect, scheduling=Scheduling.STATIC)
    drive.add(make_request("a", [5, 6, 7], max_tokens=20))
    drive.finish()
    drive.check_outputs()
    assert not isinstance(drive.scheduler, SpeculativeScheduler)
    assert num_speculative(drive) == 0


def shapes(buckets: Iterable[Bucket]) -> list[tuple[int, int, int]]:
    return [(b.num_tokens, b.num_rows, b.num_drafts) for b in buckets if b.num_drafts]


def test_the_ladder_of_speculative_programs() -> None:
    limits = BucketConfig(max_num_batched_tokens=100, max_num_seqs=12, num_drafts=3, max_draft_rows=6)
    ladder = BucketLadder(limits)
    assert shapes(ladder.buckets()) == [(4, 1, 3), (4, 1, 3), (8, 2, 3), (8, 2, 3), (16, 4, 3), (16, 4, 3)]
    assert ladder.choose_speculative(3, Variant.SAMPLE) == Bucket(16, 4, Variant.SAMPLE, 3)
    assert ladder.choose_speculative(5, Variant.SAMPLE) is None
    assert BucketLadder(replace(limits, num_drafts=0, max_draft_rows=0)).choose_speculative(1, Variant.GREEDY) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_drafts": 3}, "rows"),
        ({"max_draft_rows": 3}, "drafts"),
        ({"num_drafts": 10, "max_draft_rows": 10}, "limit of all steps"),
    ],
)
def test_limits_of_speculation_that_do_not_fit_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BucketConfig(max_num_batched_tokens=100, max_num_seqs=12, **changes)


def test_a_runner_that_keeps_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="keeps no text"):
        Drive(runner=FakeRunner(CAPACITY), buckets={"num_drafts": 3, "max_draft_rows": 2})
