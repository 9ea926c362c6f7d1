"""The bench "offline"'s counting over the fake runner, whose steps cost nothing and hide nothing."""

import argparse

import pytest

from batcher.buckets import BucketConfig, BucketLadder
from batcher.config import EngineConfig, Scheduling
from batcher.engine import Engine
from batcher.step import Capacity
from scripts.lab import offline
from scripts.lab.load.lengths import Lengths
from tests.batcher.fake_runner import FakeRunner

CAPACITY = Capacity(
    num_slots=8, num_pages=200, page_size=16, max_model_len=256, max_num_batched_tokens=32, vocab_size=100
)


def engine(scheduling: str) -> Engine:
    ladder = BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=8))
    config = EngineConfig(eos_token_ids=(1,), scheduling=Scheduling(scheduling))
    made = Engine(FakeRunner(CAPACITY), config, ladder)
    made.warm_up(lambda line: None)
    return made


def arguments(**changes: object) -> argparse.Namespace:
    fields = {"num_prompts": 40, "temperature": 0.0}
    fields |= {"input_len": Lengths.parse("uniform:4:20"), "output_len": Lengths.parse("lognormal:20:1:4:120")}
    return argparse.Namespace(**fields | changes)


def test_both_ways_give_the_same_tokens_and_static_batching_wastes_more():
    requests = offline.make_requests(arguments(), vocab_size=100, max_model_len=256, seed=0)
    continuous, tokens = offline.measure(engine("continuous"), requests, "continuous")
    static, same = offline.measure(engine("static"), requests, "static")
    assert tokens == same
    assert [len(tokens[r.request_id]) for r in requests] == [r.sampling.max_tokens for r in requests]
    wanted = sum(r.sampling.max_tokens for r in requests)
    assert continuous.output_tokens == static.output_tokens == wanted
    assert continuous.prompt_tokens == sum(len(r.prompt) for r in requests)
    # Whoever has ended idles in a static batch: every batch lasts as long as its longest member.
    batches = [requests[i : i + 8] for i in range(0, 40, 8)]
    assert static.num_steps >= sum(max(r.sampling.max_tokens for r in batch) for batch in batches)
    assert continuous.num_steps < static.num_steps
    assert static.row_waste > 0.3 > continuous.row_waste
    assert static.token_waste > 0.3 > continuous.token_waste
    assert continuous.compiles_after_warm_up == 0


def test_a_failed_request_fails_the_bench():
    requests = offline.make_requests(arguments(), vocab_size=100, max_model_len=256, seed=0)
    broken = Engine(
        FakeRunner(CAPACITY, nan_token=requests[3].prompt[0]),
        EngineConfig(eos_token_ids=(1,)),
        BucketLadder(BucketConfig(max_num_batched_tokens=32, max_num_seqs=8)),
    )
    broken.warm_up(lambda line: None)
    with pytest.raises(RuntimeError, match="requests failed"):
        offline.measure(broken, requests, "continuous")
