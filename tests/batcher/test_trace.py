"""Lengths as real users send them, at 64 concurrent streams: every invariant at every step, every text its own."""

from __future__ import annotations

import csv
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from batcher.config import Scheduling
from batcher.request import Request
from tests.batcher.harness import Drive, make_capacity, make_request

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "azure_llm_2023_conv.csv"
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


def trace_lengths(count: int, scale: float) -> Lengths:
    """The first requests of the trace, their lengths scaled to a context of 512."""
    with TRACE.open() as file:
        rows = [row for _, row in zip(range(count), csv.DictReader(file), strict=False)]
    return [
        (
            min(400, max(1, int(int(row["ContextTokens"]) * scale))),
            min(100, max(1, int(int(row["GeneratedTokens"]) * scale))),
        )
        for row in rows
    ]


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


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_trace_at_64_streams(prefix_caching: bool) -> None:
    if not TRACE.exists():
        pytest.skip("the trace is not here: ../shared/data/traces")
    drive = replay(make_requests(trace_lengths(200, 1 / 8)), prefix_caching=prefix_caching)
    stats = drive.engine.stats()
    assert (stats.prefix_cache_hits > 0) == prefix_caching
    assert stats.finished.keys() <= {"stop", "length"}


@pytest.mark.parametrize("pipeline_depth", [1, 2])
def test_its_synthetic_twin_at_64_streams(pipeline_depth: int) -> None:
    drive = replay(make_requests(synthetic_lengths(200)), pipeline_depth=pipeline_depth)
    stats = drive.engine.stats()
    assert stats.step_tokens / stats.step_tokens_padded > 0.8  # padding stays in bounds


@pytest.mark.slow
def test_continuous_batching_needs_fewer_padded_tokens_than_static() -> None:
    requests = make_requests(synthetic_lengths(200))
    continuous = replay(requests).engine.stats()
    static = replay(requests, scheduling=Scheduling.STATIC).engine.stats()
    assert continuous.generation_tokens == static.generation_tokens
    assert continuous.num_steps < static.num_steps
    assert continuous.step_tokens_padded < static.step_tokens_padded
