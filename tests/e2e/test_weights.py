"""Other weights while the demo serves: to the host and back, and from other folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.flax import load_file, save_file

from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import ADMIN_KEY, DemoServer

pytestmark = pytest.mark.e2e

STORY = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


@pytest.fixture
def http(server: DemoServer) -> Iterator[httpx.Client]:
    """An administrator's client. The server has its own weights, awake, before and after."""
    with server.http(headers={"Authorization": f"Bearer {ADMIN_KEY}"}) as http:
        yield http
        assert http.post("/wake_up").status_code == 200
        assert http.post("/admin/reload", json={}).status_code == 200
    assert server.metrics()["num_compiles_after_warm_up_total"] == 0


def story(http: httpx.Client) -> str:
    return http.post("/v1/completions", json=STORY).json()["choices"][0]["text"]


def copied(folder: Path, **config: Any) -> Path:
    """The demo's checkpoint with another last norm."""
    shutil.copytree(DEMO_FOLDER, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.norm.weight": -tensors["model.norm.weight"]}, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return folder


def test_requests_wait_while_the_engine_sleeps(server, http):
    told = story(http)
    for _ in range(2):  # the second time it sleeps already
        assert http.post("/sleep", params={"level": 1}).status_code == 200
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = http.post("/admin/reload", json={})
    assert refused.status_code == 400 and "wake it up" in refused.json()["error"]["message"]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(story, http)
        server.wait_for_metrics(lambda metrics: metrics["num_requests_waiting"] == 1)
        assert not waiting.done()
        assert http.post("/wake_up").status_code == 200
        assert waiting.result(60) == told
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}


@pytest.mark.parametrize(("path", "param"), [("/sleep?level=3", "level"), ("/wake_up?tags=heat", "tags")])
def test_what_there_is_not_is_refused(http, path, param):
    refused = http.post(path)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


def test_other_weights_are_loaded_and_a_broken_folder_changes_nothing(http, tmp_path):
    told = story(http)
    assert http.post("/admin/reload", json={"model": str(copied(tmp_path / "other"))}).status_code == 200
    other = story(http)
    assert other != told
    deeper = copied(tmp_path / "deeper", rope_theta=7.0)
    cut = copied(tmp_path / "cut")
    file = cut / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    for folder, reason in [
        (tmp_path / "none", "no such folder"),
        (deeper, "not a model of the same shapes: config rope_theta is 7.0"),
        (cut, "model.safetensors"),
        ("nope://bucket/folder", "no package of fsspec is for nope://"),
    ]:
        refused = http.post("/admin/reload", json={"model": str(folder)})
        assert refused.status_code == 400
        assert reason in refused.json()["error"]["message"]
        assert story(http) == other
    assert http.post("/admin/reload", json={}).status_code == 200
    assert story(http) == told
