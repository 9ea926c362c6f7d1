"""Readiness and draining: /health?generate=true and /drain."""

from __future__ import annotations

import asyncio
import math

from batcher.stats import EngineStats
from server.engine import wire
from tests.server.support.api_processes import http_processes, through_each
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, LONG, SLOW, wait_until
from tests.server.support.running import ECHO, running_server
from tests.server.support.stub_app import StubClient, call, client_of, state_of

READY = "/health?generate=true"
ADMIN = {"Authorization": "Bearer boss"}


def test_an_engine_generates_a_token_to_be_ready(tmp_path):
    config = EchoConfig(reply=(97, 98, 99), weights=True)
    keys = {"admin_api_keys": ("boss",)}
    with (
        running_server(tmp_path, ECHO, config, more_engines=(config,), **keys) as server,
        server.http(headers=ADMIN) as http,
    ):

        def generated() -> list[float]:
            lines = http.get("/metrics").text.splitlines()
            return [float(line.split()[-1]) for line in lines if "generation_tokens_total{" in line]

        assert http.get(READY).status_code == 200
        wait_until(lambda: generated()[:2] == [1, 1])  # one by each engine
        assert http.get("/health?generate=maybe").status_code == 400
        assert http.post("/sleep").status_code == 200
        asleep = http.get(READY)
        assert (asleep.status_code, "sleeps" in asleep.text) == (503, True)
        assert http.get("/health").status_code == 200


class Stuck(StubClient):
    """Says nothing, or that it has no room. Its statistics count steps from the given look on."""

    def __init__(self, *outputs: wire.Output, moves_at: int | None) -> None:
        super().__init__(*outputs)
        self.looks, self._moves_at = 0, moves_at

    @property
    def stats(self) -> EngineStats:
        self.looks += 1
        return EngineStats(num_steps=int(self._moves_at is not None and self.looks >= self._moves_at))

    @stats.setter
    def stats(self, stats: EngineStats) -> None:
        pass


def test_an_engine_that_is_stuck_is_not_ready_and_one_that_is_full_is():
    full = wire.Output("", [], "error", error="no room", status=429)
    broken = wire.Output("", [], "error", error="NaN", status=500)
    found = []
    for outputs, moves_at in (((), None), ((), 3), ((full,), None), ((full,), 3), ((broken,), None)):
        client = Stuck(*outputs, moves_at=moves_at)
        client.last_heartbeat = math.inf
        response = call(state_of(client, heartbeat_timeout_s=0.3), "GET", READY)
        found.append(response.status_code)
        if not outputs:
            assert client.aborted  # nothing is left behind
        assert response.status_code == 200 or "no step" in response.text or "NaN" in response.text
    assert found == [503, 200, 503, 200, 503]


def test_probes_share_a_step():
    client = Stuck(moves_at=3)

    async def probe() -> list[int]:
        async with client_of(state_of(client)) as http:
            answers = await asyncio.gather(*(http.get(READY) for _ in range(20)))
            return [answer.status_code for answer in answers]

    assert asyncio.run(probe()) == [200] * 20
    assert len(client.submitted) == 1


def test_a_drained_server_ends_its_requests_and_takes_no_more(tmp_path):
    settings = {"api_server_count": 2, "admin_api_keys": ("boss",)}
    with running_server(tmp_path, ECHO, SLOW, **settings) as server:
        with through_each(server) as (first, second), server.http(headers=ADMIN) as admin:
            with first.stream("POST", CHAT, json=LONG | {"max_tokens": 100}) as running:
                pieces = running.iter_text()
                text = next(pieces)
                with server.http() as stranger:
                    assert stranger.post("/drain").status_code == 401
                assert admin.post("/drain").json() == {"draining": True, "server_load": 1}
                refused = second.post(CHAT, json=HELLO)
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
                assert "administrator" in refused.json()["error"]["message"]
                text += "".join(pieces)
            assert text.endswith("data: [DONE]\n\n") and '"finish_reason":"length"' in text
            assert {client.get("/live").status_code for client in (first, second)} == {200}
            assert [client.get("/health").status_code for client in (first, second)] == [503, 503]
        old = http_processes(server)
        old[0].kill()  # its successor is drained, too
        wait_until(
            lambda: len(http_processes(server)) == 2 and old[0].pid not in {p.pid for p in http_processes(server)}
        )
        with through_each(server) as clients, server.http(headers=ADMIN) as admin:
            assert [client.get("/health").status_code for client in clients] == [503, 503]
            assert admin.delete("/drain").json()["draining"] is False
            assert [client.post(CHAT, json=HELLO | {"max_tokens": 1}).status_code for client in clients] == [200, 200]


def test_a_batch_waits_while_the_server_drains(tmp_path):
    settings = {"batch_folder": tmp_path / "batches", "admin_api_keys": ("boss",)}
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "max_tokens": 1}}\n'
    with running_server(tmp_path, ECHO, EchoConfig(), **settings) as server, server.http() as http:
        http.post("/drain", headers=ADMIN)
        file = http.post("/v1/files", files={"file": ("a.jsonl", line)}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        path = f"/v1/batches/{http.post('/v1/batches', json=asked).json()['id']}"

        def batch() -> dict:
            return http.get(path).json()

        wait_until(lambda: batch()["status"] == "in_progress")
        assert batch()["request_counts"]["completed"] == 0
        http.delete("/drain", headers=ADMIN)
        wait_until(lambda: batch()["status"] == "completed")
