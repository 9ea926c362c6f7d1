"""Lengths as real users send them, at 64 concurrent streams: every invariant at every step, every text its own."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest

from batcher.request import Request
from tests.batcher.harness import Drive, make_capacity, make_request

NUM_STREAMS = 64
CAPACITY = make_capacity(
    num_slots=NUM_STREAMS,
    num_pages=1200,
    page_size=16,
    max_model_len=512,
    max_num_batched_tokens=256,
    vocab_size=500,
)

Lengths = list[tuple[int, int]]


def synthetic_lengths(count: int) -> Lengths:
    """Log-normal, with the trace's medians and spread after scaling."""
    rng = np.random.default_rng(0)
    prompts = np.clip(rng.lognormal(np.log(125), 0.9, count), 1, 400).astype(int)
    outputs = np.clip(rng.lognormal(np.log(16), 0.9, count), 1, 100).astype(int)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def make_requests(lengths: Lengths) -> list[Request]:
    rng = np.random.default_rng(1)
    system = rng.integers(3, 500, 200).tolist()
    requests = []
    for i, (num_prompt, num_output) in enumerate(lengths):
        shared = num_prompt // 2 if i % 3 == 0 else 0  # a third begins alike
        prompt = system[:shared] + rng.integers(3, 500, num_prompt - shared).tolist()
        requests.append(
            make_request(
                str(i),
                prompt,
                max_tokens=num_output,
                ignore_eos=i % 2 == 0,
                temperature=0.0 if i % 4 == 0 else 0.8,
                seed=i,
            )
        )
    return requests


def replay(requests: list[Request], **config: object) -> Drive:
    """64 clients, each sending its next request when the one before has ended."""
    drive = Drive(CAPACITY, buckets={"min_mixed_tokens": 16}, **config)
    todo = deque(requests)
    live: set[str] = set()
    while todo or live:
        while todo and len(live) < NUM_STREAMS:
            live.add(todo[0].request_id)
            drive.add(todo.popleft())
        drive.step()
        live = {name for name in live if drive.heard[name].finish_reason is None}
        assert drive.num_steps < 20_000
    drive.check_outputs()
    drive.check_idle()
    return drive


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_its_synthetic_twin_at_64_streams(pipeline_depth: int) -> None:
    drive = replay(make_requests(synthetic_lengths(200)), pipeline_depth=pipeline_depth)
    stats = drive.engine.stats()
    assert stats.step_tokens / stats.step_tokens_padded > 0.8  # padding stays in bounds
