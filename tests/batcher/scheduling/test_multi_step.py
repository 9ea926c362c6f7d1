"""Several decode steps in one program: the same texts, books that add up, and no step too many for an arrival."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batcher.buckets import BucketConfig
from batcher.request import FinishReason
from batcher.scheduling.multi_step import MOST_DELAY_S
from batcher.step import Variant
from tests.batcher.fake_runner import FakeRunner
from tests.batcher.harness import CAPACITY, Drive, make_request

FOUR = {"num_steps": 4, "max_multi_step_rows": 4}


def steps_of(drive: Drive) -> list[int]:
    """The tokens of the first row in each step, by the runner's record."""
    return [int(step.packed[8 + step.bucket.num_rows]) for step in drive.runner.steps]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_programs_have_several_steps_while_nobody_waits(temperature) -> None:
    drive, plain = Drive(buckets=FOUR), Drive()
    for each in (drive, plain):
        heard = each.add(make_request("a", [5, 6, 7], temperature=temperature, max_tokens=22, ignore_eos=True))
        each.finish()
        each.check_outputs()
        assert len(heard.tokens) == 22
        assert each.engine.stats().generation_tokens == 22
    # The prompt; single steps until it is known how long they take, while one is in flight; the rest in fours.
    assert steps_of(drive) == [3, 1, 1, 4, 4, 4, 4, 3]
    assert len(drive.runner.steps) < len(plain.runner.steps) / 2
    assert {step.bucket.variant for step in drive.runner.steps[1:]} == {
        Variant.SAMPLE if temperature else Variant.GREEDY
    }
    assert drive.engine.stats().step_tokens == plain.engine.stats().step_tokens


def test_log_probabilities_and_penalties_are_those_of_single_steps() -> None:
    found = []
    for buckets in (FOUR, {}):
        drive = Drive(buckets=buckets)
        asked = {"temperature": 0.7, "logprobs": 2, "presence_penalty": 0.5, "frequency_penalty": 0.1, "seed": 3}
        heard = drive.add(make_request("a", [5, 6, 7], **asked, max_tokens=14, ignore_eos=True))
        drive.finish()
        drive.check_outputs()
        found.append([entry for output in heard.outputs for entry in output.logprobs])
    assert found[0] == found[1]


def test_a_request_that_ends_inside_leaves_nothing_of_its_later_tokens() -> None:
    """Another request finds its prefix, up to its last token, and nothing that was drawn after it."""
    drive = Drive(buckets=FOUR)
    request = make_request("a", range(10, 14), max_tokens=40, ignore_eos=True)
    drive.add(request)
    drive.finish()
    stop = drive.heard["a"].tokens[9]
    drive = Drive(buckets=FOUR)
    sampling = replace(request.sampling, stop_token_ids=(stop,))
    heard = drive.add(replace(request, sampling=sampling))
    drive.finish()
    assert heard.finish_reason is FinishReason.STOP
    assert heard.tokens == drive.expected("a")
    known = [*request.prompt, *heard.tokens]
    follower = drive.add(make_request("b", [*known, 30, 31, 32], max_tokens=5))
    drive.finish()
    drive.check_outputs()
    assert follower.last.num_cached_tokens == len(known) // drive.capacity.page_size * drive.capacity.page_size


def test_a_number_that_is_not_finite_after_the_end_ends_nothing() -> None:
    request = make_request("a", [5, 6, 7], max_tokens=30, ignore_eos=True)
    drive = Drive()
    drive.add(request)
    drive.finish()
    tokens = drive.heard["a"].tokens
    bad = next(token for i, token in enumerate(tokens) if i >= 6 and tokens.index(token) == i)
    place = tokens.index(bad)
    for max_tokens in (place + 1, place + 2):
        drive = Drive(buckets=FOUR, runner=FakeRunner(CAPACITY, nan_token=bad))
        heard = drive.add(replace(request, sampling=replace(request.sampling, max_tokens=max_tokens)))
        drive.finish()
        ends_before = max_tokens == place + 1
        assert heard.finish_reason is (FinishReason.LENGTH if ends_before else FinishReason.ERROR)


def test_one_step_a_program_while_a_request_waits_or_has_a_grammar() -> None:
    drive = Drive(buckets=FOUR)
    drive.add(make_request("a", [5, 6, 7], max_tokens=30, ignore_eos=True))
    drive.add(make_request("b", [8, 9], max_tokens=10, grammar="9 50 50"))
    drive.finish()
    drive.check_outputs()
    both = drive.heard["b"].outputs
    assert both[-1].finish_reason is not None
    several = [step.bucket.num_steps for step in drive.runner.steps]
    assert set(several[: 2 + len(drive.heard["b"].tokens)]) == {1}
    assert max(several) == 4  # once "b" has ended


@pytest.mark.parametrize(("step_s", "most"), [(MOST_DELAY_S / 100, 4), (MOST_DELAY_S / 4, 3), (MOST_DELAY_S, 1)])
def test_the_longer_a_step_the_fewer_are_in_a_program(step_s, most) -> None:
    """Two programs are in flight, so an arrival waits twice for the steps after the first one."""
    drive = Drive(buckets=FOUR)

    def tick(_number: int) -> None:
        drive.clock.now += step_s * max(drive.engine.core.in_flight[0].plan.q_lens)

    drive.runner._on_result = tick
    drive.add(make_request("a", [5, 6, 7], max_tokens=25, ignore_eos=True))
    drive.finish()
    assert max(steps_of(drive)[1:]) == most


def test_steps_and_drafts_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="a step with drafts is the only one"):
        BucketConfig(max_num_batched_tokens=64, max_num_seqs=4, num_drafts=1, max_draft_rows=4, **FOUR)
    with pytest.raises(ValueError, match="have steps and rows"):
        BucketConfig(max_num_batched_tokens=64, max_num_seqs=4, num_steps=2)
