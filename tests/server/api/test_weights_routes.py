"""The routes of a trainer: what they refuse before the engine hears of it, and what answers tell of weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from server.api.routes.weights import UpdateInfo, source_of
from server.engine.protocol import Receiver
from server.engine.wire import Array, InFolder, InSharedMemory, Output, WireRequest
from server.http.request_error import RequestError
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.running import RunningServer, server_of
from tests.server.support.sse_events import parse_events
from tests.server.support.stub_app import COMPLETIONS, StubClient, call, state_of

ADMIN = {"Authorization": "Bearer boss"}
ARRAYS = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], []]}
NAMED = (Array("a", "bfloat16", (2, 3)), Array("b", "float32", ()))


guarded = server_of(EchoConfig(), admin_api_keys=("boss",))


def refused(server: RunningServer, path: str, body: dict | None = None) -> dict:
    with server.http(headers=ADMIN) as http:
        answer = http.post(path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize(
    ("fields", "source"),
    [
        ({"path": "gs://bucket/step-40"}, InFolder("gs://bucket/step-40")),
        (ARRAYS | {"shared_memory": "psm_1"}, InSharedMemory("psm_1", NAMED)),
    ],
)
def test_weights_come_in_one_of_two_ways(fields, source):
    assert source_of(msgspec.convert(fields, UpdateInfo)) == source


def test_all_that_is_wrong_is_said_at_once():
    info = UpdateInfo(names=["a", "a"], dtype_names=["float32"], shared_memory="x", path="y")
    with pytest.raises(RequestError) as error:
        source_of(info)
    message = error.value.message
    assert error.value.status == 400
    assert "must be given, not shared_memory and path" in message
    assert "2 names, 1 dtype_names, 0 shapes" in message
    assert "names are given twice: a" in message
    with pytest.raises(RequestError, match="leave out names"):
        source_of(UpdateInfo(path="y", names=["a"]))
    with pytest.raises(RequestError, match=r"not none; there must be as many .* at least one"):
        source_of(UpdateInfo())


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/pause?mode=later", None, "mode", "abort, wait, keep"),
        ("/pause?clear_cache=perhaps", None, "clear_cache", "Expected `bool`"),
        ("/pause?wait_for_inflight_requests=true", None, "wait_for_inflight_requests", "mode=wait"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}}, "init_info.master_address", "NCCL"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}, "init_info.backend", "nccl"),
        ("/init_weight_transfer_engine", {"init_info": {"backend": "transfer"}}, "init_info.backend", "transfer"),
        ("/update_weights", {"update_info": {"transfer": {"address": "a:1"}}}, "update_info.transfer", "`path`"),
        ("/update_weights", {"update_info": {"packed": True}}, "update_info.packed", "64 bytes"),
        ("/update_weights", {"update_info": {"shapes": [[-1]]}}, "update_info.shapes.0.0", ">= 0"),
        ("/update_weights", {"update_info": {"shapes": [[10**30]]}}, "update_info.shapes.0.0", ""),
        ("/update_weights", {}, "update_info", "missing"),
        ("/finish_weight_update", {"weight_version": ""}, "weight_version", "256"),
        ("/finish_weight_update", {"weight_version": "a\nb"}, "weight_version", "printable"),
    ],
)
def test_what_cannot_be_is_refused_by_name(guarded, path, body, param, words):
    error = refused(guarded, path, body)
    assert error["param"] == param and words in error["message"]


def test_a_trainer_of_vllm_asks_what_is_here(guarded):
    with guarded.http(headers=ADMIN) as http:
        assert http.post("/init_weight_transfer_engine", json={"init_info": {}}).json()["backends"]
        assert (
            http.get("/get_weight_version").json() == http.get("/weight_info").json() == {"weight_version": "default"}
        )
        assert http.get("/get_world_size").json() == {"world_size": 1}
        assert http.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize("path", ["/start_weight_update", "/finish_weight_update"])
def test_an_engine_that_cannot_update_its_weights_says_so(guarded, path):
    assert "The weights were not updated: " in refused(guarded, path)["message"]


class UpdatedClient(StubClient):
    """Its weights change twice within each answer."""

    def submit(self, requests: Sequence[tuple[WireRequest, Receiver]]) -> None:
        for _, receiver in requests:
            receiver.on_weight_version("a")
            receiver.on_output(Output("", [ord("w")]))
            receiver.on_tokens([ord("x")])
            receiver.on_weight_version("b")
            receiver.on_weight_version("c")
            receiver.on_tokens([ord("y"), ord("z")])
            receiver.on_output(Output("", [ord(".")], "length"))


CHAT, GENERATE = "/v1/chat/completions", "/inference/v1/generate"
BODIES = {
    COMPLETIONS: {"prompt": "p"},
    CHAT: {"messages": [{"role": "user", "content": "p"}]},
    GENERATE: {"token_ids": [5], "sampling_params": {"n": 2}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_tells_whose_tokens_it_has(path, asked, stream):
    body = BODIES[path] | {"return_weight_versions": asked, "stream": stream}
    answer = call(state_of(UpdatedClient()), "POST", path, json=body)
    parts = parse_events(answer.text) if stream else [answer.json()]
    told = [choice for part in parts for choice in part["choices"] if "weight_versions" in choice]
    if not asked and path != GENERATE:
        assert told == []
        return
    assert [choice["index"] for choice in told] == list(range(2 if path == GENERATE else 1))
    for choice in told:
        assert choice["finish_reason"] == "length"
        assert choice["weight_version"] == "c"
        spans = [(span["version"], span["start"], span["end"]) for span in choice["weight_versions"]]
        assert spans == [("a", 0, 2), ("c", 2, 5)]
