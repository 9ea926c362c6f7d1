"""Real lengths at 32 concurrent streams: without threads, where order is fixed, and over HTTP, where it is not."""

from __future__ import annotations

import asyncio

import pytest

from batcher.request import Request
from model.loading.source import DEMO_FOLDER
from scripts.lab.load.client import Target, run
from scripts.lab.load.workload import BenchRequest
from server.text.stream import TextStream
from server.text.tokenizer import ByteLevelTokenizer
from tests.e2e import replay
from tests.e2e.replay import make_requests

CONCURRENCY = 32


pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def replayed(built):
    return replay.replayed(built)


@pytest.fixture(scope="module")
def requests(replayed):
    return make_requests(**replayed["sizes"])


@pytest.fixture(scope="module")
def alone(replayed):
    return replayed["alone"]


def test_every_output_is_the_one_obtained_alone(replayed, requests, alone):
    together, stats = replayed["together"], replayed["stats"]
    assert together == alone
    assert [len(together[r.request_id]) for r in requests] == [r.sampling.max_tokens for r in requests]
    assert stats["num_compiles_after_warm_up"] == 0
    assert [stats[f"num_{name}"] for name in ("pages_used", "requests_running", "requests_waiting")] == [0, 0, 0]
    assert stats["finished"] == {"length": len(requests)}
    assert stats["prefix_cache_hits"] > 0


def test_the_server_gives_the_same_texts_to_32_streams(server, requests, alone):
    tokenizer = ByteLevelTokenizer.from_folder(DEMO_FOLDER)
    before = server.metrics()
    outcomes, _ = asyncio.run(
        run(
            Target(base_url=server.url, model="demo", ignore_eos=True, keep_text=True),
            [as_http(request) for request in requests],
            arrivals=None,
            max_concurrency=CONCURRENCY,
        )
    )
    assert [outcome.error for outcome in outcomes] == [None] * len(requests)
    assert [outcome.output_tokens for outcome in outcomes] == [r.sampling.max_tokens for r in requests]
    assert [outcome.prompt_tokens for outcome in outcomes] == [len(r.prompt) for r in requests]
    assert [o.text for o in outcomes] == [text_of(tokenizer, alone[r.request_id]) for r in requests]

    def at_rest(metrics: dict[str, float]) -> bool:
        done = metrics["generation_tokens_total"] - before["generation_tokens_total"]
        return done == sum(r.sampling.max_tokens for r in requests) and metrics["kv_cache_usage_perc"] == 0

    metrics = server.wait_for_metrics(at_rest)
    assert metrics["num_compiles_after_warm_up_total"] == 0
    assert (metrics["num_requests_running"], metrics["num_requests_waiting"]) == (0, 0)
    assert metrics["failed_steps_total"] == 0


def as_http(request: Request) -> BenchRequest:
    s = request.sampling
    names = ("seed", "temperature", "top_p", "top_k", "presence_penalty", "repetition_penalty")
    return BenchRequest(list(request.prompt), s.max_tokens, fields={name: getattr(s, name) for name in names})


def text_of(tokenizer: ByteLevelTokenizer, ids: list[int]) -> str:
    stream = TextStream(tokenizer)
    return "".join([*map(stream.push, ids), stream.finish()])
