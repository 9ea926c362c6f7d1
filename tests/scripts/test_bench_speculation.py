"""bench_speculation's counting over the fake runner, and what offline generation makes of outputs of several tokens."""

from __future__ import annotations

from batcher.request import FinishReason, RequestOutput, TokenLogprobs
from scripts import bench_speculation
from scripts.offline.in_process import _token_by_token
from server.engine.wire import output_to_wire
from tests.batcher.scheduling.test_speculation import mixed, speculative


def test_every_stream_is_counted_to_its_end():
    engine = speculative(mixed).engine
    seconds, outputs = bench_speculation.measure(engine, (5, 6, 7, 8), 3, 20)
    assert [len(tokens) for tokens in outputs] == [20] * 3
    assert len({tuple(tokens) for tokens in outputs}) == 3
    assert seconds > 0


def test_its_texts_and_flags():
    args = bench_speculation.parser().parse_args(["--streams", "1,4"])
    assert args.streams == [1, 4]
    assert bench_speculation.settings_with_drafts(args).speculation.num_speculative_tokens == 3


def test_offline_outputs_of_several_tokens_are_taken_in_one_by_one():
    """The sink that finds a stop string in one of them leaves the others out."""
    scores = tuple(TokenLogprobs(logprob=-float(i)) for i in range(3))
    whole = output_to_wire(
        RequestOutput(
            request_id="a", token_ids=(5, 6, 7), logprobs=scores, finish_reason=FinishReason.LENGTH, num_cached_tokens=2
        )
    )
    parts = _token_by_token(whole)
    assert [part.token_ids for part in parts] == [[5], [6], [7]]
    assert [part.logprobs for part in parts] == [[entry] for entry in whole.logprobs]
    assert [part.finish_reason for part in parts] == [None, None, "length"]
    assert {(part.request_id, part.num_cached_tokens) for part in parts} == {("a", 2)}
    one = output_to_wire(RequestOutput(request_id="a", token_ids=(5,)))
    assert _token_by_token(one) == [one]
