"""What a caller of the engine can rely on, one behaviour at a time, without threads."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.delivery import Tokens
from batcher.engine import Engine
from batcher.errors import EngineClosedError, EngineDeadError, InvalidRequestError, QueueFullError
from batcher.request import ErrorCode, FinishReason, RequestOutput, SamplingParams
from batcher.slots import SlotLayout
from batcher.step import Variant
from tests.batcher.fake_runner import FakeRunner, fake_logprob
from tests.batcher.harness import CAPACITY, EOS, Drive, make_capacity, make_request

# --- how requests end ---


def find_prompt(
    drive: Drive, *, ending_with: int, after: int, without: int | None = None, **sampling: object
) -> list[int]:
    """A prompt whose generation meets `ending_with` as its token number `after` at the earliest, `without` never."""
    for first in range(3, 100):
        for second in range(3, 100):
            request = make_request("probe", [first, second], ignore_eos=True, max_tokens=30, **sampling)
            drive.requests["probe"] = request
            tokens = drive.expected("probe")
            if ending_with in tokens[after:] and ending_with not in tokens[:after] and without not in tokens:
                return [first, second]
    raise AssertionError("no such prompt")


@pytest.mark.parametrize("eos", EOS)
def test_every_end_of_sequence_id_ends_it_and_is_its_last_token(eos: int) -> None:
    drive = Drive()
    other = next(x for x in EOS if x != eos)
    prompt = find_prompt(drive, ending_with=eos, after=2, without=other)
    heard = drive.add(make_request("a", prompt, max_tokens=30))
    drive.finish()
    assert heard.tokens[-1] == eos
    assert (heard.finish_reason, heard.last.stop_reason) == (FinishReason.STOP, None)
    drive.check_outputs()


def test_a_stop_id_ends_it_and_is_named_also_under_ignore_eos() -> None:
    drive = Drive()
    prompt = find_prompt(drive, ending_with=17, after=2)
    heard = drive.add(make_request("a", prompt, max_tokens=30, stop_token_ids=(17, 18), ignore_eos=True))
    drive.finish()
    assert heard.finish_reason is FinishReason.STOP
    assert heard.last.stop_reason in (17, 18)
    assert heard.tokens[-1] == heard.last.stop_reason
    drive.check_outputs()


# --- aborts ---


@pytest.mark.parametrize("after", range(8))
@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_at_any_moment_ends_it_once_and_gives_everything_back(after: int, depth: int) -> None:
    drive = Drive(make_capacity(max_num_batched_tokens=8), pipeline_depth=depth)
    gone = drive.add(make_request("a", range(10, 30), ignore_eos=True))
    drive.add(make_request("b", range(40, 60), ignore_eos=True))
    for _ in range(after):
        drive.step()
    drive.engine.abort("a")
    drive.engine.abort("a")
    drive.engine.abort("nobody")
    drive.step()
    assert gone.finish_reason is FinishReason.ABORT
    drive.finish()
    drive.check_outputs()
    assert drive.heard["b"].finish_reason is FinishReason.LENGTH


def test_an_abort_of_a_waiting_and_of_a_preempted_request() -> None:
    drive = Drive(make_capacity(num_slots=1))
    drive.add(make_request("a", range(10, 20), ignore_eos=True))
    waiting = drive.add(make_request("b", range(10, 20)))
    for _ in range(4):
        drive.step()
    drive.engine.abort("b")
    (running,) = drive.scheduler.running
    drive.scheduler.preempt(running)  # while its step is in flight
    drive.engine.abort("a")
    drive.finish()
    assert waiting.outputs == [RequestOutput(request_id="b", number=1, finish_reason=FinishReason.ABORT)]
    assert drive.heard["a"].finish_reason is FinishReason.ABORT
    drive.check_outputs()


def test_an_abort_is_for_the_request_that_had_the_id_then() -> None:
    drive = Drive()
    drive.engine.add_request(make_request("b", [11], max_tokens=1), lambda _output: drive.engine.abort("a"))
    first = drive.add(make_request("a", [10], max_tokens=1, ignore_eos=True))
    while not first.outputs:  # the abort comes between the last token of "a" and its being heard
        drive.step()
    assert first.finish_reason is FinishReason.LENGTH
    again = drive.add(make_request("a", [10], max_tokens=3, ignore_eos=True))
    drive.finish()
    assert again.finish_reason is FinishReason.LENGTH


def test_an_id_can_be_used_again_when_its_request_has_ended() -> None:
    drive = Drive()
    drive.add(make_request("a", [10], max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is running already") as caught:
        drive.engine.add_request(make_request("a", [10]), print)
    assert caught.value.param == "request_id"
    drive.finish()
    drive.add(make_request("a", [10], max_tokens=1))
    drive.finish()
    drive.check_outputs()


# --- refusals ---


@pytest.mark.parametrize(
    ("param", "prompt", "changes"),
    [
        ("prompt", [], {}),
        ("prompt", range(3, 67), {}),
        ("prompt", [5, 100], {}),
        ("prompt", [-1], {}),
        ("prompt", [5, 1.5], {}),
        ("prompt", [2**70], {}),
        ("prompt", [True, False], {}),
        ("max_tokens", [5], {"max_tokens": 0}),
        ("min_tokens", [5], {"min_tokens": 11}),
        ("min_tokens", [5], {"min_tokens": -1}),
        ("stop_token_ids", [5], {"stop_token_ids": (100,)}),
        ("allowed_token_ids", [5], {"allowed_token_ids": (100,)}),
        ("allowed_token_ids", [5], {"allowed_token_ids": ()}),
        ("allowed_token_ids", [5], {"allowed_token_ids": (1, 2), "min_tokens": 1}),
        ("stop_token_ids", [5], {"stop_token_ids": tuple(range(10, 25)), "min_tokens": 1}),
        ("logit_bias", [5], {"logit_bias": ((100, 1.0),)}),
        ("logit_bias", [5], {"logit_bias": ((7, 1.0), (7, 2.0))}),
        ("logit_bias", [5], {"logit_bias": ((7, float("nan")),)}),
        ("logprobs", [5], {"logprobs": 21}),
        ("prompt_logprobs", [5], {"prompt_logprobs": -1}),
        ("top_k", [5], {"top_k": -1}),
        ("temperature", [5], {"temperature": float("inf")}),
        ("temperature", [5], {"temperature": -0.5}),
        ("repetition_penalty", [5], {"repetition_penalty": 0.0}),
        # Finite and positive in float64 only: what divides by them, or is added to logits, would be NaN on the device.
        ("repetition_penalty", [5], {"repetition_penalty": 1e-50}),
        ("repetition_penalty", [5], {"repetition_penalty": 1e50}),
        ("presence_penalty", [5], {"presence_penalty": float("nan")}),
        ("logit_bias", [5], {"logit_bias": ((7, 1e39),)}),
        ("min_p", [5], {"min_p": 1.5}),
        ("cache_salt", [5], {"cache_salt": 1 << 127}),
    ],
)
def test_what_can_never_run_is_refused_by_name(param: str, prompt: list[int], changes: dict[str, object]) -> None:
    drive = Drive()
    with pytest.raises(InvalidRequestError) as caught:
        drive.engine.add_request(make_request("a", prompt, **changes), print)
    assert caught.value.param == param
    assert drive.engine.num_live == 0
    drive.add(make_request("a", [5]))
    drive.finish()


def test_counts_beyond_what_the_slot_holds_mean_what_they_say() -> None:
    """They are cut to what can matter, not to their low 32 bits, and no step fails because of them."""
    drive = Drive()
    drive.add(make_request("k", [10], temperature=0.8, top_k=(1 << 32) + 1))
    many = {"max_tokens": 1 << 70, "min_tokens": 1 << 64, "stop_token_ids": tuple(range(3, 13))}
    heard = drive.add(make_request("min", [10], **many))
    drive.finish()
    row = drive.runner.state[:, SlotLayout.at("top_k")]
    assert row.max() == np.iinfo(np.int32).max
    assert len(heard.tokens) == CAPACITY.max_model_len - 1
    assert not set(heard.tokens) & {*EOS, *range(3, 13)}


def test_the_queue_has_a_limit_beyond_what_runs() -> None:
    drive = Drive(max_waiting=2)
    for i in range(CAPACITY.num_slots + 2):
        drive.add(make_request(str(i), [5], max_tokens=3))
    with pytest.raises(QueueFullError, match="2 requests wait already"):
        drive.engine.add_request(make_request("one more", [5]), print)
    drive.finish()
    drive.add(make_request("later", [5]))
    drive.finish()


def test_a_request_that_waits_too_long_is_told_so_and_one_that_runs_is_not_hurried() -> None:
    drive = Drive(make_capacity(num_slots=1))
    runs = drive.add(make_request("runs", [5], deadline_s=1.0, ignore_eos=True))
    waits = drive.add(make_request("waits", [6], deadline_s=1.0))
    patient = drive.add(make_request("patient", [7]))
    drive.step()
    drive.clock.now = 0.9
    drive.step()
    assert waits.outputs == []
    drive.clock.now = 1.1
    drive.step()
    assert (waits.finish_reason, waits.last.error_code) == (FinishReason.ERROR, ErrorCode.QUEUE_DEADLINE)
    assert "1.0 s" in waits.last.error
    drive.finish()
    assert runs.finish_reason is FinishReason.LENGTH
    assert patient.finish_reason is not None


def test_a_request_that_left_before_its_deadline_is_not_told_again() -> None:
    drive = Drive(make_capacity(num_slots=1))
    drive.add(make_request("runs", [5], ignore_eos=True))
    gone = drive.add(make_request("gone", [6], deadline_s=1.0))
    drive.step()
    drive.engine.abort("gone")
    drive.step()
    drive.clock.now = 2.0
    drive.finish()
    assert [output.finish_reason for output in gone.outputs] == [FinishReason.ABORT]


def test_limits_that_the_runner_does_not_have_are_refused() -> None:
    config = EngineConfig(eos_token_ids=EOS)
    with pytest.raises(ValueError, match="more rows than slots"):
        Engine(FakeRunner(CAPACITY), config, BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=5)))
    with pytest.raises(ValueError, match="steps longer than the runner takes"):
        Engine(FakeRunner(CAPACITY), config, BucketLadder(BucketConfig(max_num_batched_tokens=33, max_num_seqs=4)))


# --- log-probabilities ---


def test_logprobs_come_with_their_tokens() -> None:
    drive = Drive()
    heard = drive.add(make_request("a", [10, 11], logprobs=2, max_tokens=4))
    labels = drive.add(make_request("c", [10, 11], logprob_token_ids=(5, 9, 5), max_tokens=4))
    plain = drive.add(make_request("b", [20, 21], max_tokens=4))
    drive.finish()
    sequence = [10, 11]
    for output in heard.outputs:
        (entry,) = output.logprobs

        seen = np.array(sequence)
        assert (entry.logprob, entry.rank) == (fake_logprob(seen, output.token_ids[0]), 1 + output.token_ids[0])
        assert entry.top_ids == (0, 1)
        assert entry.top_logprobs == (fake_logprob(seen, 0), fake_logprob(seen, 1))
        sequence += output.token_ids
    assert all(output.logprobs == () for output in plain.outputs)
    for number, (output,) in enumerate(output.logprobs for output in labels.outputs):
        seen = np.array([10, 11, *labels.tokens[:number]])
        assert output.top_ids == (5, 9, 5)
        assert output.top_logprobs == (fake_logprob(seen, 5), fake_logprob(seen, 9), fake_logprob(seen, 5))
    drive.check_outputs()


@pytest.mark.parametrize("logprobs", [None, 0])
def test_sampled_logprobs_come_with_their_tokens(logprobs: int | None) -> None:
    drive = Drive()
    drive.add(make_request("a", [10, 11], logprobs=logprobs, sampled_logprobs=True, max_tokens=9, ignore_eos=True))
    drive.add(make_request("b", [20, 21], max_tokens=9, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    assert len(drive.heard["a"].tokens) == len(drive.heard["b"].tokens) == 9
    assert all(bool(output.logprobs) == (logprobs is not None) for output in drive.heard["a"].outputs)


@pytest.mark.parametrize("preempt_after", [None, 1, 2])
def test_prompt_logprobs_are_whole_whatever_the_cache_holds_and_however_the_prompt_is_cut(
    preempt_after: int | None,
) -> None:
    drive = Drive(make_capacity(max_num_batched_tokens=8))
    prompt = list(range(10, 30))
    drive.add(make_request("before", prompt))
    drive.finish()
    heard = drive.add(make_request("a", prompt, prompt_logprobs=1, ignore_eos=True))
    for number in range(6):
        drive.step()
        if number == preempt_after:
            drive.scheduler.preempt(drive.scheduler.running[-1])
    drive.finish()
    entries = heard.outputs[0].prompt_logprobs
    assert len(entries) == 19
    for i, entry in enumerate(entries):
        seen = np.array(prompt[: i + 1])
        assert entry.logprob == fake_logprob(seen, prompt[i + 1])
        assert entry.top_logprobs == (fake_logprob(seen, 0),)
    assert heard.last.num_cached_tokens == 0
    assert all(output.prompt_logprobs is None for output in heard.outputs[1:])
    drive.check_outputs()


def test_decodes_run_no_heavier_program_than_what_they_emit_asks_for() -> None:
    drive = Drive(make_capacity(max_num_batched_tokens=8))
    for name, temperature, decode in (("greedy", 0.0, Variant.GREEDY), ("sampled", 1.0, Variant.SAMPLE)):
        drive.add(make_request(name, [10, 11], temperature=temperature, max_tokens=3, ignore_eos=True))
        drive.finish()
        prompt, *decodes = [bucket.variant for bucket in drive.runner.executed]
        assert prompt is Variant.SAMPLE
        assert decodes == [decode] * len(decodes) != []
        drive.runner.executed.clear()


# --- failures ---


def test_a_row_that_is_not_finite_ends_alone_and_leaves_nothing_in_the_cache() -> None:
    drive = Drive(runner=FakeRunner(CAPACITY, nan_token=66))
    prompt = [66, 11, 12, 13, 14, 15]
    bad = drive.add(make_request("bad", prompt, max_tokens=5))
    good = drive.add(make_request("good", [10, 11, 12, 13, 14, 15], max_tokens=5, ignore_eos=True))
    drive.finish()
    assert (bad.finish_reason, bad.last.error_code) == (FinishReason.ERROR, ErrorCode.NOT_FINITE)
    assert "not a finite number, at token 6" in bad.last.error
    assert good.finish_reason is FinishReason.LENGTH
    drive.add(make_request("bad again", prompt))
    drive.finish()
    assert drive.heard["bad again"].last.num_cached_tokens == 0
    drive.check_outputs()
    assert drive.engine.stats().corrupted_requests == 2


class BrokenError(Exception):
    pass


def failing_at(*numbers: int):
    def hook(number: int) -> None:
        if number in numbers:
            raise BrokenError(f"step {number}")

    return hook


@pytest.mark.parametrize("where", ["on_execute", "on_result"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("number", [0, 3])
def test_a_failed_step_ends_its_requests_and_the_others_go_on(where: str, depth: int, number: int) -> None:
    capacity = make_capacity(num_slots=2)
    drive = Drive(capacity, runner=FakeRunner(capacity, **{where: failing_at(number)}), pipeline_depth=depth)
    for i in range(5):
        drive.add(make_request(str(i), [10 + i, 11, 12, 13, 14], max_tokens=6, ignore_eos=True))
    drive.finish()
    drive.check_outputs()
    failed = [name for name, heard in drive.heard.items() if heard.finish_reason is FinishReason.ERROR]
    assert failed == ["0", "1"]
    for name in failed:
        assert drive.heard[name].last.error_code is ErrorCode.STEP_FAILED
        assert f"BrokenError: step {number}" in drive.heard[name].last.error
    assert [drive.heard[name].finish_reason for name in "234"] == [FinishReason.LENGTH] * 3
    assert drive.runner.num_recoveries == 1
    assert drive.engine.stats().failed_steps == (1 if where == "on_execute" else depth)


def test_who_had_no_row_in_the_failed_step_is_computed_again() -> None:
    capacity = make_capacity(max_num_batched_tokens=8, num_slots=2)
    drive = Drive(capacity, runner=FakeRunner(capacity, on_result=failing_at(4)), pipeline_depth=1)
    drive.add(make_request("long", range(10, 50), max_tokens=3, ignore_eos=True))
    drive.step()
    drive.step()
    assert drive.heard["long"].outputs == []
    urgent = drive.add(make_request("urgent", range(50, 74), max_tokens=3, priority=-1))
    drive.finish()  # the fifth step is all the urgent one's
    assert urgent.last.error_code is ErrorCode.STEP_FAILED
    assert drive.heard["long"].finish_reason is FinishReason.LENGTH
    assert drive.engine.stats().num_preemptions == 1
    drive.check_outputs()


def test_a_listener_that_raises_loses_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    drive = Drive()
    calls = []

    def listener(output: RequestOutput) -> None:
        calls.append(output)
        raise BrokenError("no ears")

    drive.engine.add_request(make_request("deaf", [10], ignore_eos=True), listener)
    drive.add(make_request("a", [20], ignore_eos=True))
    with caplog.at_level(logging.ERROR):
        drive.finish()
    assert len(calls) == 1
    assert "'deaf'" in caplog.text
    drive.check_outputs()


def test_a_listener_for_all_requests_that_raises_is_the_end() -> None:
    drive = Drive()

    def listener(tokens: Tokens) -> None:
        raise BrokenError("no ears")

    drive.engine.listen(listener)
    heard = drive.add(make_request("a", [10], ignore_eos=True))
    with pytest.raises(EngineDeadError, match="no ears"):
        drive.finish()
    assert heard.last.error_code is ErrorCode.ENGINE_DEAD


# --- shutdown ---


def test_drain_lets_requests_finish_and_takes_no_more() -> None:
    drive = Drive()
    drive.add(make_request("a", [10], ignore_eos=True))
    assert drive.engine.drain(10.0)
    assert drive.heard["a"].finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineClosedError):
        drive.engine.add_request(make_request("late", [5]), print)


# --- seeds ---


def test_requests_without_a_seed_get_different_ones_and_the_same_ones_again_from_the_same_engine_seed() -> None:
    def texts(seed: int | None) -> list[list[int]]:
        drive = Drive(seed=seed)
        for i in range(3):
            request = make_request(str(i), [10, 11], temperature=1.0, ignore_eos=True)
            drive.add(dataclasses.replace(request, sampling=dataclasses.replace(request.sampling, seed=None)))
        drive.finish()
        return [heard.tokens for heard in drive.heard.values()]

    first = texts(7)
    assert len({tuple(tokens) for tokens in first}) == 3
    assert texts(7) == first
    assert texts(8) != first
    assert texts(None) != texts(None)


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"pipeline_depth": 0}, {"max_waiting": -1}, {"step_cost_tokens": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            EngineConfig(eos_token_ids=EOS, **wrong)


def test_every_sampling_parameter_reaches_the_draw() -> None:
    """Change one field of a request: its text changes, so nothing is dropped on the way to the slot."""
    base = {"temperature": 0.8, "ignore_eos": True, "max_tokens": 20}
    changes: list[dict[str, object]] = [
        {"temperature": 0.9},
        {"top_k": 5},
        {"top_p": 0.5},
        {"min_p": 0.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((7, 1.0),)},
        {"seed": 1},
        {"grammar": "3 30 30"},
        {"allowed_token_ids": tuple(range(20, 50))},
        {"bad_words": tuple((token,) for token in range(3, 50))},
    ]
    fields = {name for change in changes for name in change}
    assert fields | {
        "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs", "sampled_logprobs", "prompt_logprobs",
        "logprob_token_ids",
    } == set(SamplingParams.__dataclass_fields__)  # fmt: skip
    drive = Drive()
    drive.add(make_request("base", [10, 11], **base))
    for i, change in enumerate(changes):
        drive.add(make_request(str(i), [10, 11], **base | change))
    drive.finish()
    drive.check_outputs()
    texts = {tuple(heard.tokens) for heard in drive.heard.values()}
    assert len(texts) == 1 + len(changes)
