"""Weights from a trainer while the demo serves: by shared memory, over the network, and from folders."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.flax import load_file

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from scripts.lab.demo.export import save_hf
from scripts.lab.grpo import Trainer, advantages
from scripts.lab.rollouts import rollouts
from scripts.offline.results import request_output
from scripts.weight_sender import SendError, WeightSender
from tests.e2e.conftest import ADMIN_KEY, ROOT, DemoServer, serve
from tests.e2e.test_weights import copied, story

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
NORM = "model.norm.weight"
PIECES = 2**20  # bytes; the demo takes several
LONG = {"prompt": "Once upon a time", "max_tokens": 480, "temperature": 0, "ignore_eos": True, "stream": True}
# A trainer that gives the first arrays of a folder, says so, and does not go on.
STUCK = """
import sys
from safetensors.flax import load_file
from scripts.weight_sender import WeightSender

class Stuck(dict):
    num_reads = 0
    def items(self):
        self.num_reads += 1
        for i, item in enumerate(super().items()):
            if self.num_reads == 2 and i == 4:
                print("stuck", flush=True)
                sys.stdin.read()
            yield item

url, key, file = sys.argv[1:]
WeightSender(url, key, piece_bytes=1).send(Stuck(load_file(file)), "killed")
"""


@pytest.fixture(scope="module")
def own() -> dict[str, jax.Array]:
    """The demo's weights."""
    return load_file(DEMO_FOLDER / "model.safetensors")


@pytest.fixture(scope="module")
def tensors(own) -> dict[str, jax.Array]:
    """They with another last norm."""
    return own | {NORM: -own[NORM]}


@pytest.fixture(scope="module")
def server(engine_flags) -> Iterator[DemoServer]:
    """One of this module: the check of the first update compiles, which counts."""
    with serve(*engine_flags, "--admin-api-key", ADMIN_KEY) as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def num_compiles(server: DemoServer, own: dict[str, jax.Array]) -> float:
    """With those of the first update in each type."""
    with sender(server) as trainer:
        trainer.send({name: array.astype(jnp.float32) for name, array in own.items()})
        trainer.send(own)
        assert trainer.weight_version == "2"
    return compiles(server)


@pytest.fixture
def http(server: DemoServer, num_compiles: float) -> Iterator[httpx.Client]:
    """An administrator's client. The server has its own weights, and serves, before and after. Nothing is compiled."""
    with server.http(headers=ADMIN) as http:
        yield http
        http.post("/finish_weight_update")  # of none, or of one that a test has left
        assert http.post("/resume").status_code == 200
        assert http.post("/admin/reload", json={}).status_code == 200
    assert compiles(server) == num_compiles


@pytest.fixture
def told(http: httpx.Client) -> str:
    return story(http)


@pytest.fixture
def other(http: httpx.Client, told: str, tmp_path: Path) -> str:
    """What the server says with the weights of `tensors`, read from a folder."""
    assert http.post("/admin/reload", json={"model": str(copied(tmp_path / "other"))}).status_code == 200
    other = story(http)
    assert http.post("/admin/reload", json={}).status_code == 200
    assert other != story(http) == told
    return other


def compiles(server: DemoServer) -> float:
    """Compilations after the warm-up. The engine's readings are up to a second old: tokens show that one is newer."""
    before = server.metrics()["generation_tokens_total"]
    with server.http() as http:
        story(http)
    newer = server.wait_for_metrics(lambda metrics: metrics["generation_tokens_total"] > before)
    return newer["num_compiles_after_warm_up_total"]


def sender(server: DemoServer) -> WeightSender:
    return WeightSender(server.url, ADMIN_KEY, piece_bytes=PIECES)


def version(http: httpx.Client) -> str:
    return http.get("/get_weight_version").json()["weight_version"]


def test_the_tokens_are_those_of_the_weights_that_came_last(server, http, told, other, own, tensors):
    with sender(server) as trainer:
        for weights, text, name in ((tensors, other, "step-1"), (own, told, "step-2"), (tensors, other, "step-3")):
            trainer.send(weights, name)
            assert story(http) == text
            assert trainer.weight_version == version(http) == name
    assert http.get("/weight_info").json() == {"weight_version": "step-3"}


def test_weights_come_from_a_folder(server, http, other, tmp_path):
    with sender(server) as trainer:
        trainer.send_folder(str(copied(tmp_path / "given")), "from a folder")
        assert story(http) == other and version(http) == "from a folder"
        with pytest.raises(SendError, match="no such folder"):
            trainer.send_folder(str(tmp_path / "none"))
    assert story(http) == other and version(http) == "from a folder"


def test_a_trainer_borrows_the_memory_and_gives_it_back_in_parts(server, http, other, tensors, tmp_path):
    def post(path: str) -> None:
        answer = http.post(path)
        assert answer.status_code == 200, answer.text

    folder = str(copied(tmp_path / "given"))
    with sender(server) as trainer, ThreadPoolExecutor(1) as thread:
        for give in (lambda: trainer.send(tensors), lambda: trainer.send_folder(folder)):
            post("/sleep?level=2")
            waiting = thread.submit(story, http)
            refused = http.post("/wake_up")
            assert refused.status_code == 400 and "has dropped the weights" in refused.json()["error"]["message"]
            post("/wake_up?tags=weights")
            give()
            assert http.get("/is_sleeping").json() == {"is_sleeping": True} and not waiting.done()
            post("/wake_up?tags=kv_cache")
            assert waiting.result(60) == other


def test_a_trainer_that_is_killed_changes_nothing_and_another_begins_anew(server, http, told, other, tensors):
    before = version(http)
    arguments = [server.url, ADMIN_KEY, str(DEMO_FOLDER / "model.safetensors")]
    killed = subprocess.Popen(
        [sys.executable, "-c", STUCK, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with killed:
        assert killed.stdout.readline() == "stuck\n"
        killed.kill()
    assert story(http) == told and version(http) == before
    with sender(server) as trainer:
        trainer.send(tensors, "after")
    assert story(http) == other and version(http) == "after"


def test_a_step_of_grpo_over_http(server, http, tmp_path):
    demo = load_hf(DEMO_FOLDER, LlamaConfig.from_file(DEMO_FOLDER), dtype=jnp.float32)
    trainer = Trainer(demo, optax.adam(1e-4), clip=0.2, kl_weight=0.04)
    body = {"messages": [{"role": "user", "content": "Which is the largest of 12, 85 and 40?"}], "n": 8, "seed": 3}
    told = {"logprobs": True, "return_token_ids": True, "return_weight_versions": True, "return_logprobs_by_id": True}
    with sender(server) as weights:
        for number in range(3):
            answer = http.post("/v1/chat/completions", json=body | told | {"max_tokens": 16})
            result = request_output(answer.json())
            rewards = np.array([[output.text.count("85") for output in result.outputs]], np.float32)
            _, off = trainer.step(rollouts([result]), advantages(rewards))
            assert off < 1e-4, "the server's log-probabilities are those of the trainer's weights"
            assert number == 0 or {output.weight_versions[-1][0] for output in result.outputs} == {f"step-{number}"}
            save_hf(trainer.model, tmp_path / str(number), dtype=jnp.float32)
            weights.send(load_file(tmp_path / str(number) / "model.safetensors"), f"step-{number + 1}")


@pytest.mark.hosts
def test_all_engines_and_processes_have_the_new_weights(engine_flags, own, tensors):
    flags = ("--admin-api-key", ADMIN_KEY, "--data-parallel-size", "2", "--api-server-count", "2")
    with serve(*engine_flags, *flags) as both:

        def stories() -> set[str]:
            """Of connections that reach both processes and both engines."""
            texts = set()
            for _ in range(8):
                with both.http() as one:
                    texts.add(story(one))
            return texts

        (told,) = stories()
        with sender(both) as trainer:
            trainer.send(tensors, "step-1")
            (other,) = stories()
            assert other != told
            nan = tensors | {NORM: tensors[NORM].at[0].set(jnp.nan)}
            with pytest.raises(SendError, match=NORM):
                trainer.send(nan, "not a number")
            assert stories() == {other}
            trainer.pause("keep")
            trainer.resume()
            trainer.send(own, "step-2")
        assert stories() == {told}
        with both.http(headers=ADMIN) as admin:
            assert {version(admin) for _ in range(4)} == {"step-2"}
            assert admin.get("/get_world_size").json() == {"world_size": 2}
            assert admin.get("/get_world_size", params={"include_dp": "false"}).json() == {"world_size": 1}
