"""Drafts change the number of steps and nothing else: every request gets the tokens that it gets without them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batcher.buckets import BucketConfig, BucketLadder
from batcher.request import FinishReason
from batcher.step import Bucket, Variant
from tests.batcher.fake_runner import FakeRunner, Proposal
from tests.batcher.harness import CAPACITY, Drive, after_weights, make_capacity, make_request
from tests.batcher.test_properties import Scenario, play, scenarios
from tests.examples import examples

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
    runner = FakeRunner(capacity, propose=propose, tells_would_accept=not options.get("draft_cost"))
    return Drive(capacity, runner=runner, buckets=buckets, **options)


def num_speculative(drive: Drive) -> int:
    return sum(bucket.num_drafts > 0 for bucket in drive.runner.executed)


@settings(max_examples=examples(120))
@given(scenarios(), st.integers(1, 5), st.integers(1, 4), st.sampled_from(PROPOSALS), st.sampled_from([0.0, 0.2]))
def test_whatever_is_drafted_everybody_gets_its_own_text(
    scenario: Scenario, num_drafts: int, max_draft_rows: int, propose: Proposal, draft_cost: float
) -> None:
    fitting = min(max_draft_rows, scenario.capacity.max_num_batched_tokens // (1 + num_drafts))
    if fitting:
        drafts = {"num_drafts": num_drafts, "max_draft_rows": fitting, "propose": propose, "draft_cost": draft_cost}
        scenario = replace(scenario, **drafts)
    drive = play(scenario)
    drive.check_outputs()
    stats = drive.engine.stats()
    counts = stats.speculation
    assert counts.num_accepted_tokens == sum(counts.num_accepted_tokens_per_pos) <= counts.num_draft_tokens
    assert sum(stats.inter_token_latency.counts) == stats.generation_tokens - sum(stats.time_to_first_token.counts)
    assert stats.generation_tokens == sum(len(heard.tokens) for heard in drive.heard.values())


@settings(max_examples=examples(60))
@given(scenarios(), st.sampled_from(PROPOSALS))
def test_with_room_for_all_requests_drafts_delay_none(scenario: Scenario, propose: Proposal) -> None:
    c = scenario.capacity
    roomy = replace(c, num_pages=c.num_slots * c.pages_per_seq, max_num_batched_tokens=c.max_num_batched_tokens + 16)
    drive = play(replace(scenario.of_equals(), capacity=roomy, num_drafts=3, max_draft_rows=4, propose=propose))
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


def test_a_request_that_asks_hears_of_its_drafts() -> None:
    drive = speculative(mixed, step_times=after_weights(1000.0), capacity={"max_model_len": 200, "num_pages": 200})
    asking = [make_request(str(i), [5, 6, i], max_tokens=97, ignore_eos=True, counts_drafts=True) for i in range(2)]
    heard = [drive.add(request) for request in asking]
    drive.finish()
    counts = drive.engine.stats().speculation
    accepted, rejected = (sum(own.last.drafts[i] for own in heard) for i in (0, 1))
    assert 0 < accepted <= counts.num_accepted_tokens  # drafts after the request's end do not count
    assert rejected == counts.num_draft_tokens - counts.num_accepted_tokens > 0
    for own in heard:
        told = [(len(output.token_ids), output.drafts) for output in own.outputs if output.drafts is not None]
        steps = zip([(0, (0, 0)), *told], told, strict=False)
        assert all(0 <= now[0] - before[0] < max(count, 1) for (_, before), (count, now) in steps)
    silent = drive.add(make_request("silent", [5, 6, 7], max_tokens=20, ignore_eos=True))
    drive.finish()
    assert {output.drafts for output in silent.outputs} == {None}


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
            "a",
            [5, 6, 7],
            max_tokens=12,
            ignore_eos=True,
            stop_token_ids=(text[place],),
            logprobs=2,
            sampled_logprobs=True,
        )
        heard = drive.add(request)
        drive.finish()
        assert heard.tokens == text[: place + 1]
        assert (heard.finish_reason, heard.last.stop_reason) == (FinishReason.STOP, text[place])
        assert all(len(output.logprobs) == len(output.token_ids) for output in heard.outputs)
        drive.check_outputs()
        assert drive.engine.stats().generation_tokens == place + 1


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
    drive = speculative(perfect, step_times=after_weights(1000.0))
    drive.add(make_request("free", [5, 6, 7], max_tokens=30, ignore_eos=True))
    drive.add(make_request("bound", [5, 6, 8], max_tokens=8, grammar="4 50 50"))
    drive.finish()
    drive.check_outputs()
    assert drive.engine.stats().speculation.num_undrafted_rows > 0
    assert {len(output.token_ids) for output in drive.heard["bound"].outputs} <= {0, 1}


@pytest.mark.parametrize("draft_cost", [0.0, 0.2])
def test_rows_under_grammars_alone_run_plain_steps(draft_cost: float) -> None:
    """Without a lookup, and what they write changes no estimate for other requests."""
    drive = speculative(perfect, step_times=after_weights(1000.0), draft_cost=draft_cost)
    before = drive.scheduler.drafts.usual_rate
    for i in range(3):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=40, grammar="4 50 50"))
    drive.finish()
    drive.check_outputs()
    assert drive.runner.num_lookups == num_speculative(drive) == 0
    assert drive.scheduler.drafts.usual_rate == before


def test_what_a_grammar_forces_teaches_nothing_about_other_rows() -> None:
    """The drafts of the free row are wrong, and the tokens of the bound one would all have been would_accept."""

    def propose(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if known[2] == 8 else always_wrong(known, coming)

    rates = []
    for with_bound in (False, True):
        drive = speculative(
            propose, step_times=after_weights(1000.0), capacity={"max_model_len": 300, "num_pages": 300}
        )
        drive.add(make_request("free", [5, 6, 7], max_tokens=60, ignore_eos=True))
        if with_bound:
            drive.add(make_request("bound", [5, 6, 8], max_tokens=60, grammar="4 50 50"))
        drive.finish()
        drive.check_outputs()
        rates.append(drive.scheduler.drafts.usual_rate)
    assert rates[1] == rates[0]


def test_text_that_becomes_predictable_is_noticed() -> None:
    def late(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if len(known) > 200 else always_wrong(known, coming)

    drive = speculative(late, capacity={"max_model_len": 2000, "num_pages": 500}, step_times=after_weights(4.0))
    drive.add(make_request("a", [5, 6, 7], max_tokens=600, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert len(drive.runner.executed) < 200 + 400 / 4 + 20


@pytest.mark.parametrize(("draft_cost", "most_looks", "most_drafted"), [(0.0, 45, 4), (0.2, 0, 12)])
def test_what_never_pays_costs_less_and_less(draft_cost: float, most_looks: int, most_drafted: int) -> None:
    """Steps that look up or draft, of 600 of four requests: each of the others is a plain step."""
    options = {"step_times": after_weights(8.0), "draft_cost": draft_cost}
    drive = speculative(always_wrong, capacity={"max_model_len": 700, "num_pages": 700}, **options)
    for i in range(4):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=600, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert len(drive.runner.executed) == 600
    assert drive.runner.num_lookups <= most_looks
    assert (drive.runner.num_lookups > 0) == (most_looks > 0)
    assert num_speculative(drive) <= most_drafted
    assert drive.runner.num_lookups + num_speculative(drive) > 5


def test_a_retry_of_a_draft_model_is_one_draft_of_one_row() -> None:
    drive = speculative(
        always_wrong, capacity={"max_model_len": 700, "num_pages": 700}, step_times=after_weights(4.0), draft_cost=0.2
    )
    for i in range(3):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=600, ignore_eos=True))
    for _ in range(40):
        drive.step()
    before, steps = drive.engine.stats().speculation, num_speculative(drive)
    drive.finish()
    after = drive.engine.stats().speculation
    retries = num_speculative(drive) - steps
    assert retries >= 3
    assert after.num_drafts - before.num_drafts == after.num_draft_tokens - before.num_draft_tokens == retries


def test_a_row_without_drafts_next_to_rows_with_drafts_tries_again() -> None:
    """The second row's drafts are wrong at first. The first row's always pay."""

    def late(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if known[2] == 0 or len(known) > 100 else always_wrong(known, coming)

    options = {
        "capacity": {"max_model_len": 700, "num_pages": 700},
        "step_times": after_weights(30.0),
        "draft_cost": 0.1,
    }
    drive = speculative(late, **options)
    drive.add(make_request("0", [5, 6, 0], max_tokens=690, ignore_eos=True))
    second = drive.add(make_request("1", [5, 6, 1], max_tokens=600, ignore_eos=True, counts_drafts=True))
    drive.finish()
    drive.check_outputs()
    accepted, rejected = second.last.drafts
    assert accepted > 200
    assert rejected < 60


def test_a_draft_model_runs_as_often_as_its_drafts_are_likely_to_be_right() -> None:
    """Only the first draft is ever right: a row soon takes fewer than three."""

    def first_only(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming[:1] + always_wrong(known, coming[1:])

    options = {
        "capacity": {"max_model_len": 700, "num_pages": 300},
        "step_times": after_weights(20.0),
        "draft_cost": 0.2,
    }
    drive = speculative(first_only, **options)
    drive.add(make_request("a", [5, 6, 7], max_tokens=400, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    counts = drive.engine.stats().speculation
    assert counts.num_accepted_tokens > 100
    assert counts.num_draft_tokens < 2.6 * counts.num_accepted_tokens


def test_a_draft_model_that_keeps_failing_is_tried_again_now_and_then() -> None:
    def late(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if len(known) > 500 else always_wrong(known, coming)

    options = {"step_times": after_weights(4.0), "draft_cost": 0.2}
    drive = speculative(late, capacity={"max_model_len": 2000, "num_pages": 500}, **options)
    drive.add(make_request("a", [5, 6, 7], max_tokens=1500, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    wasted = [bucket.num_drafts > 0 for bucket in drive.runner.executed[:450]]
    assert 2 < sum(wasted) < 20
    assert len(drive.runner.executed) < 500 + 300 + 1000 / 4


def test_the_time_of_a_draft_model_counts() -> None:
    """Drafts of which half are right pay if they are free, and do not if a pass takes as long as the model's."""

    def every_other(known: np.ndarray, coming: list[int]) -> list[int]:
        return coming if len(known) % 2 else always_wrong(known, coming)

    shares = []
    for cost in (0.05, 1.0):
        options = {"step_times": after_weights(4.0), "draft_cost": cost}
        drive = speculative(every_other, num_drafts=1, capacity={"max_model_len": 400, "num_pages": 100}, **options)
        drive.add(make_request("a", [5, 6, 7], max_tokens=300, ignore_eos=True))
        drive.finish()
        drive.check_outputs()
        shares.append(num_speculative(drive) / len(drive.runner.executed))
    assert shares[0] > 0.6
    assert shares[1] < 0.1


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

    drive = speculative(one_of_four, step_times=after_weights(1.0), capacity={"max_model_len": 300, "num_pages": 300})
    for i in range(4):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=250, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert num_speculative(drive) < 0.15 * len(drive.runner.executed)


def test_drafts_take_no_page_from_others() -> None:
    """Two requests share a pool that is full: they run on the pages they have, and draft within these."""
    drive = speculative(perfect, capacity={"num_pages": 16, "num_slots": 2}, step_times=after_weights(1000.0))
    for i in range(2):
        drive.add(make_request(str(i), [5, 6, i], max_tokens=28, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert num_speculative(drive) > 0
    assert drive.engine.stats().num_preemptions == 0


def shapes(buckets: Iterable[Bucket]) -> list[tuple[int, int, int]]:
    return [(b.num_tokens, b.num_rows, b.num_drafts) for b in buckets if b.num_drafts]


def test_the_ladder_of_speculative_programs() -> None:
    limits = BucketConfig(max_num_batched_tokens=100, max_num_seqs=12, num_drafts=3, max_draft_rows=6)
    ladder = BucketLadder(limits)
    assert shapes(ladder.buckets()) == [(4, 1, 3), (4, 1, 3), (8, 2, 3), (8, 2, 3), (16, 4, 3), (16, 4, 3)]
    assert ladder.choose_drafts(3, Variant.SAMPLE) == Bucket(16, 4, Variant.SAMPLE, 3)
    assert ladder.choose_drafts(5, Variant.SAMPLE) is None
    assert BucketLadder(replace(limits, num_drafts=0, max_draft_rows=0)).choose_drafts(1, Variant.GREEDY) is None


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
