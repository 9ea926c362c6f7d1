"""What clients may do to the real server. The death of an engine is in tests/server/test_lifecycle.py."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.server.support.canary import canary

pytestmark = pytest.mark.e2e

NUM_LEAVING = 200
STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}


@pytest.fixture(autouse=True)
def _nobody_waits(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test here does to the server that they share."""
    if "server" not in request.fixturenames:
        yield
        return
    with canary(request.getfixturevalue("server")):
        yield


def test_what_cannot_be_served_is_refused_in_words(server):
    bodies = [
        json.dumps({"model": "demo", "prompt": [5] * 10_000}),
        json.dumps({"model": "demo", "prompt": "word " * 10_000}),
        '{"model": "demo", "prompt": ',
        "[]",
        json.dumps({"model": "demo", "prompt": "a", "max_tokens": "many"}),
        json.dumps({"model": "demo", "prompt": {"a": 1}}),
        json.dumps({"model": "demo", "prompt": "a", "temperature": -1}),
        json.dumps({"model": "demo", "prompt": [1, 2, 99999999]}),
    ]
    with server.http() as http:
        for body in bodies:
            answer = http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400, body[:60]
            assert answer.json()["error"]["message"], body[:60]
        too_long = http.post("/v1/completions", json={"model": "demo", "prompt": [5] * 10_000}).json()["error"]
        assert "maximum context length is 512 tokens" in too_long["message"]
        assert http.get("/health").status_code == 200


async def leave_mid_stream(url: str) -> bytes:
    """Asks for a long story over a raw socket, reads its beginning and hangs up."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps(STORY).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    seen = await reader.readuntil(b"data: ")
    writer.transport.abort()
    return seen


def test_two_hundred_clients_that_leave_cost_nobody_anything(server):
    async def all_leave() -> list[bytes]:
        return await asyncio.gather(*(leave_mid_stream(server.url) for _ in range(NUM_LEAVING)))

    before = server.metrics()
    seen = asyncio.run(all_leave())
    assert all(b" 200 " in head.split(b"\r\n")[0] for head in seen)
    with server.client() as client:
        answer = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=5, temperature=0)
    assert answer.usage.completion_tokens > 0
    metrics = server.wait_for_metrics(lambda now: now["kv_cache_usage_perc"] == 0 == now["num_requests_running"])
    drawn = metrics["generation_tokens_total"] - before["generation_tokens_total"]
    assert drawn < NUM_LEAVING * STORY["max_tokens"] / 2  # nobody went on telling stories to the wall
    assert metrics["num_compiles_after_warm_up_total"] == 0
