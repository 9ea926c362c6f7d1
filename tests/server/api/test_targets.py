"""How a request, its headers and its API key name latency targets, and what becomes of late requests."""

from __future__ import annotations

import asyncio

import pytest

from batcher.request import Targets
from batcher.stats import EngineStats
from server.engine import wire
from server.http.auth import clients_of
from server.settings import Settings
from tests.server.api.test_metrics import metrics_of, samples
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, client_of, state_of

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: HELLO,
    RESPONSES: {"input": "a"},
    MESSAGES: HELLO,
    "/inference/v1/generate": {"token_ids": [97], "sampling_params": {"max_tokens": 1}},
}
ITL, TTFT = "X-SLO-ITL-Ms", "X-SLO-TTFT-Ms"
BOTH = Targets(itl_ms=50, ttft_ms=500)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({}, {}, (None, False)),
        ({"slo": {"itl_ms": 50, "ttft_ms": 500}}, {}, (BOTH, False)),
        ({}, {ITL: "50", TTFT: "500"}, (BOTH, False)),
        ({"slo": {"itl_ms": 50}}, {ITL: "70", TTFT: "500"}, (BOTH, False)),
        ({"slo": {"ttft_ms": 0.5}}, {}, (Targets(ttft_ms=0.5), False)),
        ({"slo": {"itl_ms": 50, "percentile": 95}}, {}, (Targets(itl_ms=50, percentile=0.95), False)),
        ({"slo": None, "service_tier": "auto"}, {}, (None, False)),
        ({"service_tier": "flex"}, {}, (None, True)),
    ],
)
def test_targets_reach_the_engine(path, fields, headers, expected):
    client = StubClient(DONE)
    answer = call(state_of(client), "POST", path, json=BODIES[path] | fields, headers=headers)
    assert answer.status_code == 200, answer.text
    (submitted,) = client.submitted
    assert (submitted.targets, submitted.is_flex) == expected


@pytest.mark.parametrize(
    ("fields", "headers", "param"),
    [
        ({"slo": {"itl_ms": 0}}, {}, "slo.itl_ms"),
        ({"slo": {"ttft_ms": 1e8}}, {}, "slo.ttft_ms"),
        ({"slo": {"itl_ms": "soon"}}, {}, "slo.itl_ms"),
        ({"slo": {"itl_ms": 50, "percentile": 100}}, {}, "slo.percentile"),
        ({"slo": {"percentile": 95}}, {}, "slo.percentile"),
        ({"slo": {"itl_ms": 50}, "service_tier": "flex"}, {}, "slo"),
        ({}, {ITL: "-1"}, ITL),
        ({}, {ITL: "nan"}, ITL),
        ({}, {TTFT: "soon"}, TTFT),
        ({}, {TTFT: "inf"}, TTFT),
    ],
)
def test_a_target_out_of_range_is_the_clients_fault(fields, headers, param):
    client = StubClient(DONE)
    answer = call(state_of(client), "POST", COMPLETIONS, json=BODIES[COMPLETIONS] | fields, headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert client.submitted == []


def test_an_api_key_has_targets_which_a_request_may_replace():
    async def ask() -> list[wire.WireRequest]:
        client = StubClient(DONE)
        keys = {"api_keys": ("one", "two", "three"), "api_key_names": ("chat", "jobs")}
        state = state_of(client, **keys, api_key_targets=("chat=50/500", "jobs=flex"))
        async with client_of(state) as http:
            for key, own in (("one", {}), ("one", {"slo": {"ttft_ms": 9}}), ("two", {}), ("three", {})):
                headers = {"Authorization": f"Bearer {key}"}
                await http.post(COMPLETIONS, json=BODIES[COMPLETIONS] | own, headers=headers)
        return client.submitted

    found = [(request.targets, request.is_flex) for request in asyncio.run(ask())]
    assert found == [(BOTH, False), (Targets(ttft_ms=9), False), (None, True), (None, False)]


@pytest.mark.parametrize("value", ["chat=50", "chat=50/x", "chat=0/5", "chat=5/1e9", "chat=-/nan", "other=5/5", "chat"])
def test_targets_of_keys_that_cannot_be_are_refused_by_their_flag(tmp_path, value):
    keys = {"api_keys": ("one",), "api_key_names": ("chat",)}
    with pytest.raises(ValueError, match="--api-key-targets"):
        Settings(tokenizer_folder=tmp_path, model_names=("m",), **keys, api_key_targets=(value,))


@pytest.mark.parametrize("stream", [False, True])
def test_a_late_request_is_told_when_to_come_again(stream):
    client = StubClient(wire.Output("", [], "error", error="too late", status=429, retry_after_s=7))
    answer = call(state_of(client), "POST", COMPLETIONS, json={"prompt": "a", "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json()["error"]["message"] == "too late"


def test_requests_are_counted_by_key_class_and_outcome():
    (one,) = clients_of(["one"])
    stats = EngineStats(slack_tokens=300, prediction_error={"p50": 0.02, "p95": 0.1})
    stats.by_targets = {(one, "50/500", "within"): 7, (5, "50/500", "missed"): 2, (6, "50/500", "missed"): 1}
    found = samples(metrics_of(stats, key_names=["chat"], clients=[one]))
    counted = {
        (labels["api_key"], labels["targets"], labels["outcome"]): value
        for labels, value in ((dict(each), v) for each, v in found["pallas_serve:requests_by_targets_total"].items())
    }
    assert counted == {("chat", "50/500", "within"): 7, ("others", "50/500", "missed"): 3}
    assert set(found["pallas_serve:step_prediction_error"].values()) == {0.02, 0.1}
    assert "pallas_serve:requests_by_targets_total" not in samples(metrics_of(EngineStats()))
