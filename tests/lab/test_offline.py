"""The bench "offline"'s counting over the fake runner, whose steps cost nothing and hide nothing."""

import argparse

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig
from batcher.engine import Engine
from batcher.step import Capacity
from scripts.lab import offline
from scripts.lab.load.lengths import Lengths
from tests.batcher.fake_runner import FakeRunner

CAPACITY = Capacity(
    num_slots=8, num_pages=200, page_size=16, max_model_len=256, max_num_batched_tokens=32, vocab_size=100
)


def engine(**runner: object) -> Engine:
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=8))
    made = Engine(FakeRunner(CAPACITY, **runner), EngineConfig(eos_token_ids=(1,)), ladder)
    made.warm_up(lambda line: None)
    return made


def arguments(**changes: object) -> argparse.Namespace:
    fields = {"num_prompts": 40, "temperature": 0.0}
    fields |= {"input_len": Lengths.parse("uniform:4:20"), "output_len": Lengths.parse("lognormal:20:1:4:120")}
    return argparse.Namespace(**fields | changes)


def test_tokens_and_waste_are_counted():
    requests = offline.make_requests(arguments(), vocab_size=100, max_model_len=256, seed=0)
    run, tokens = offline.measure(engine(), requests, offline.PLAIN)
    assert [len(tokens[r.request_id]) for r in requests] == [r.sampling.max_tokens for r in requests]
    assert run.output_tokens == sum(r.sampling.max_tokens for r in requests)
    assert run.prompt_tokens == sum(len(r.prompt) for r in requests)
    assert 0 < run.row_waste < 0.3
    assert 0 < run.token_waste < 0.3
    assert run.compiles_after_warm_up == 0


def test_a_failed_request_fails_the_bench():
    requests = offline.make_requests(arguments(), vocab_size=100, max_model_len=256, seed=0)
    with pytest.raises(RuntimeError, match="requests failed"):
        offline.measure(engine(nan_token=requests[3].prompt[0]), requests, offline.PLAIN)
