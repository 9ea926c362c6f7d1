"""Two servers of the demo: one computes the prompts of the other. The texts are those of one server, whatever happens
to either."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import DemoServer, serve_exported
from tests.e2e.kv_crowd import (
    ADMIN,
    BODIES,
    COMPLETIONS,
    GREEDY,
    NUM_PAGES,
    PAGE_SIZE,
    STORIES,
    flags_of,
    healthy,
    pages_gib,
    text_of,
    texts,
    wait_for,
)
from tests.server.support.sse_events import stream_events

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KEY = {"Authorization": "Bearer key"}
FETCHED, LOST, KEPT = "kv_fetched_pages_total", "kv_lost_prompts_total", "kv_kept_pages"


@pytest.fixture(scope="module")
def flags(engine_flags) -> list[str]:
    return [*flags_of(engine_flags), "--api-key", "key"]


@pytest.fixture(scope="module")
def told(engine_flags) -> list[str]:
    return texts(tuple(flags_of(engine_flags)))


@contextlib.contextmanager
def prefilling(flags: list[str], *own: str, **options: Any) -> Iterator[DemoServer]:
    host = f"--kv-offloading-size={pages_gib(1000)}"
    with serve_exported(*flags, host, "--kv-role=prefill", *own, **options) as server:
        yield server


@contextlib.contextmanager
def decoding(flags: list[str], url: str, *own: str) -> Iterator[DemoServer]:
    host = f"--kv-offloading-size={pages_gib(1000)}"
    role = ("--kv-role=decode", "--prefill-url", url, f"--prefill-threshold={4 * PAGE_SIZE}")
    with serve_exported(*flags, host, *role, *own) as server:
        yield server


@pytest.fixture(scope="module")
def prefill(flags) -> Iterator[DemoServer]:
    with prefilling(flags) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def decode(flags, prefill) -> Iterator[DemoServer]:
    with decoding(flags, prefill.url) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture
def forgotten(prefill, decode) -> None:
    """Neither server knows a prompt."""
    for server in (prefill, decode):
        with server.http(headers=ADMIN) as http:
            assert http.post("/reset_prefix_cache?reset_external=true").status_code == 200


def outcomes(server: DemoServer) -> dict[str, float]:
    """Of the prompts that the other server was to compute."""
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return {
        outcome: next(float(line.rpartition(" ")[2]) for line in lines if f'outcome="{outcome}"' in line)
        for outcome in ("done", "failed")
    }


def texts_of(server: DemoServer) -> list[str]:
    """Of all requests, sent at once."""
    limits = httpx.Limits(max_connections=None)
    with server.http(limits=limits, headers=KEY) as http, ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(lambda body: text_of(http, body), BODIES))


def idle(server: DemoServer) -> dict[str, float]:
    """As `healthy`, once nothing is kept any more."""
    wait_for(server, lambda found: found[KEPT] == 0)
    return healthy(server)


def test_a_crowd_gets_the_texts_of_one_server(prefill, decode, forgotten, told) -> None:
    before, of_before = outcomes(decode), healthy(decode)
    assert texts_of(decode) == told
    after, of_after = outcomes(decode), healthy(decode)
    assert after["done"] - before["done"] > 10
    assert after["failed"] == before["failed"]
    assert of_after[FETCHED] - of_before[FETCHED] > NUM_PAGES
    assert of_after[LOST] == of_before[LOST]
    assert of_after["kv_fetched_bytes_total"] % of_after[FETCHED] == 0
    healthy(prefill)


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "seeded"])
def test_a_long_prompt_is_fetched_but_for_its_last_page(prefill, decode, forgotten, sampling) -> None:
    """Two samples, streamed. The prefill server answers the same request by itself."""
    body = GREEDY | sampling | {"model": "pirate", "prompt": STORIES[0], "n": 2}
    before = healthy(decode)[FETCHED]
    streams = []
    for server in (decode, prefill):
        with server.http(headers=KEY) as http:
            events = stream_events(http, COMPLETIONS, body | {"stream_options": {"include_usage": True}})
        streams.append(["".join(c["text"] for e in events for c in e["choices"] if c["index"] == n) for n in range(2)])
    assert streams[0] == streams[1]
    num_pages = (events[-1]["usage"]["prompt_tokens"] - 1) // PAGE_SIZE
    assert num_pages > 5
    wait_for(decode, lambda found: found[FETCHED] == before + num_pages)
    idle(prefill)  # long before it would drop pages that nobody takes


def test_a_prompt_of_many_clients_is_fetched_once(prefill, decode, forgotten) -> None:
    before, body = healthy(decode), GREEDY | {"prompt": STORIES[2]}
    with decode.http(headers=KEY) as http, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: http.post(COMPLETIONS, json=body).json(), range(6)))
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    num_pages = (answers[0]["usage"]["prompt_tokens"] - 1) // PAGE_SIZE
    after = wait_for(decode, lambda found: found[FETCHED] == before[FETCHED] + num_pages)
    assert after[LOST] == before[LOST]


def test_the_route_needs_the_key(prefill) -> None:
    refused = prefill.post("/kv/prefill", {})
    assert refused.status_code == 401
    with prefill.http(headers=KEY) as http:
        wrong = {"tokens": "AAA=", "cache_salt": 0, "model": None, "adapter": 0, "priority": 0, "identity": {}}
        answer = http.post("/kv/prefill", json=wrong)
    assert answer.status_code == 409
    assert "weights" in answer.json()["error"]["message"]


def test_a_prefill_server_that_stands_still_is_not_waited_for(flags, prefill, told) -> None:
    with decoding(flags, prefill.url, "--kv-transfer-timeout=1") as decode:
        prefill.process.send_signal(signal.SIGSTOP)
        try:
            assert texts_of(decode) == told
        finally:
            prefill.process.send_signal(signal.SIGCONT)
        assert outcomes(decode)["failed"] > 0
        assert healthy(decode)[FETCHED] == 0
    with prefill.http(headers=KEY) as http:
        assert text_of(http, BODIES[0]) == told[0]


def test_a_prefill_server_that_is_killed_takes_no_request_with_it(flags, told) -> None:
    with prefilling(flags) as prefill, decoding(flags, prefill.url) as decode:
        with ThreadPoolExecutor(1) as thread:
            answers = thread.submit(texts_of, decode)
            wait_for(prefill, lambda found: found["kv_offload_saved_pages_total"] > 0)
            kill(prefill)
            assert answers.result() == told
        assert healthy(decode)[FETCHED] >= 0


def test_a_decode_server_that_is_killed_leaves_nothing_behind(flags) -> None:
    with prefilling(flags, "--kv-transfer-timeout=2") as prefill:
        with decoding(flags, prefill.url) as decode, ThreadPoolExecutor(1) as thread:
            answers = thread.submit(texts_of, decode)
            wait_for(prefill, lambda found: found["kv_offload_saved_pages_total"] > 0)
            kill(decode)
            with pytest.raises(httpx.HTTPError):
                answers.result()
        idle(prefill)
        with prefill.http(headers=KEY) as http:
            assert text_of(http, BODIES[0])
    assert prefill.process.returncode == 0


def kill(server: DemoServer) -> None:
    """The HTTP process and its engine."""
    engines = server.engine_processes()
    server.process.kill()
    for engine in engines:
        engine.kill()
