"""Nothing that the two processes say to each other is lost on the way."""

from __future__ import annotations

import dataclasses
from array import array

import msgspec
import pytest

from batcher.request import (
    ErrorCode,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Targets,
    TokenLogprobs,
)
from batcher.stats import EngineStats, ModelState
from server.engine import wire
from server.engine.process import load_factory


def carried(message: object, kind: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=kind)


def test_a_request_arrives_whole():
    request = Request(
        request_id="a-0",
        prompt=array("i", [1, 2, 3]),
        sampling=SamplingParams(max_tokens=5, seed=2**63 - 1, logit_bias=((1, 2.5),), stop_token_ids=(7,), logprobs=2),
        priority=-3,
        cache_salt=2**63 - 1,
        deadline_s=1.5,
        targets=Targets(itl_ms=50.0, percentile=0.95),
    )
    names = [field.name for field in dataclasses.fields(Request)]
    assert list(wire.WireRequest.__struct_fields__) == names  # a field more there must be one more here
    fields = {name: getattr(request, name) for name in names} | {"prompt": wire.packed(request.prompt)}
    sent = wire.Submit([wire.WireRequest(**fields)])
    assert wire.requests_from_wire(carried(sent, wire.Command).requests) == [request]


def test_choices_of_one_prompt_carry_it_once_and_share_it():
    params = SamplingParams(max_tokens=5)
    sent = [
        wire.WireRequest(f"a-{i}", wire.packed(prompt), params) for i, prompt in enumerate([[1, 2], [], [3], [], []])
    ]
    received = wire.requests_from_wire(carried(wire.Submit(sent), wire.Command).requests)
    assert [list(request.prompt) for request in received] == [[1, 2], [1, 2], [3], [3], [3]]
    assert received[3].prompt is received[4].prompt


def test_choices_of_one_grammar_carry_it_once():
    params = [SamplingParams(max_tokens=5, seed=i, grammar=wire.SAME_GRAMMAR if i else "G") for i in range(3)]
    sent = [wire.WireRequest(f"a-{i}", wire.packed([1]), sampling) for i, sampling in enumerate(params)]
    received = wire.requests_from_wire(carried(wire.Submit(sent), wire.Command).requests)
    assert [(request.sampling.grammar, request.sampling.seed) for request in received] == [("G", 0), ("G", 1), ("G", 2)]


@pytest.mark.parametrize(("code", "status"), [(ErrorCode.GRAMMAR, 400), (ErrorCode.ADAPTER, 404)])
def test_a_grammar_or_an_adapter_that_the_engine_refuses_is_the_clients_fault(code, status):
    output = RequestOutput(request_id="a", finish_reason=FinishReason.ERROR, error="x", error_code=code)
    assert wire.output_to_wire(output).status == status


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (RequestOutput(request_id="a", token_ids=(1, 2)), wire.Output("a", [1, 2])),
        (RequestOutput(request_id="a", token_ids=(1,), num_cached_tokens=16), wire.Output("a", [1], None, None, 16)),
        (
            RequestOutput(request_id="a", token_ids=(5,), finish_reason=FinishReason.STOP, stop_reason=5),
            wire.Output("a", [5], "stop", 5),
        ),
        (
            RequestOutput(
                request_id="a",
                token_ids=(5,),
                logprobs=(TokenLogprobs(logprob=-1.0, top_ids=(5, 6), top_logprobs=(-1.0, float("-inf"))),),
                prompt_logprobs=(TokenLogprobs(logprob=-2.0),),
                sampled_logprobs=(-0.25,),
            ),
            wire.Output(
                "a",
                [5],
                logprobs=[wire.Logprobs.packed(-1.0, [5, 6], [-1.0, float("-inf")])],
                prompt_logprobs=[wire.Logprobs.packed(-2.0, [], [])],
                sampled_logprobs=(-0.25,),
            ),
        ),
        (
            RequestOutput(
                request_id="a", finish_reason=FinishReason.ERROR, error="late", error_code=ErrorCode.QUEUE_DEADLINE
            ),
            wire.Output("a", [], "error", error="late", status=503, expired=True),
        ),
        (
            RequestOutput(
                request_id="a",
                finish_reason=FinishReason.ERROR,
                error="late",
                error_code=ErrorCode.LATE,
                retry_after_s=3,
            ),
            wire.Output("a", [], "error", error="late", status=429, retry_after_s=3),
        ),
        (
            RequestOutput(request_id="a", finish_reason=FinishReason.ERROR, error="x", error_code=ErrorCode.NOT_FINITE),
            wire.Output("a", [], "error", error="x", status=500),
        ),
        (RequestOutput(request_id="a", finish_reason=FinishReason.ABORT), wire.Output("a", [], "abort")),
    ],
)
def test_an_output_arrives_whole(output, expected):
    sent = wire.Outputs([wire.output_to_wire(output)])
    assert carried(sent, wire.Event) == wire.Outputs([expected])


def test_statistics_arrive_whole():
    stats = EngineStats(
        num_steps=3, finished={"stop": 2}, running_of_adapters={2**63 - 1: 4}, models={7: ModelState.HOST}
    )
    stats.queue_time.observe(1.0)
    stats.by_targets = {(2**62, "50/-", "within"): 2}
    stats.speculation.observe(3, 2)
    assert carried(wire.Stats(stats), wire.Event) == wire.Stats(stats)


@pytest.mark.parametrize(
    "message",
    [
        wire.Report("a"),
        wire.Adapters([wire.Adapter("a", 1, "/a")], 3, 2, [wire.LoadedModel("m", 2**63 - 1, "/m", 64, 99)]),
        wire.Reply(loaded=wire.LoadedModel("m", 7, "/m", 64, 99)),
        wire.Reply(loaded=wire.Adapter("a", 7, "/a")),
        wire.Ready(wire.EngineInfo(max_model_len=5, vocab_size=6)),
        wire.Failed("why"),
    ],
)
def test_the_news_of_the_start_arrive(message):
    assert carried(message, wire.Event) == message


@pytest.mark.parametrize("message", [wire.Abort(["a", "b"]), wire.Stop()])
def test_commands_arrive(message):
    assert carried(message, wire.Command) == message


def test_a_factory_is_named_with_a_colon():
    assert load_factory("tests.server.engine.test_wire:carried") is carried
    with pytest.raises(ValueError, match=r"package\.module:function"):
        load_factory("tests.server.engine.test_wire")
