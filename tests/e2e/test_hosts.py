"""One engine over two hosts: two `scripts.launch` on this machine, with four CPU devices each.

The model is random and of the smallest size that eight chips can share.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from scripts import convert_checkpoint
from tests.conftest import ANY_DEVICES
from tests.e2e.conftest import ADMIN_KEY, ROOT, serve
from tests.model.adapters import random_for
from tests.model.checkpoints import write_tensors
from tests.model.goldens.make import tensors
from tests.server.engine.hosts.loopback import free_port
from tests.server.support.requests import wait_until
from tests.server.test_lifecycle import alive

pytestmark = [pytest.mark.e2e, pytest.mark.hosts, pytest.mark.slow]

FLAGS = "--seed 0 --max-model-len 256 --max-num-seqs 1 --max-num-batched-tokens 16".split()
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
LAUNCH = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0"]
STARTED_S, ENDED_S = 400, 60  # on a busy machine, with nothing compiled
DEMO = json.loads((DEMO_FOLDER / "config.json").read_text())
# Eight query heads, two of keys and values: four chips share each of these.
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 16}
GREEDY = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "frequency_penalty": 1, "max_tokens": 40, "ignore_eos": True}
ENDLESS = {"prompt": "Count", "max_tokens": 200, "ignore_eos": True, "stream": True}


def converted(folder: Path, seed: int) -> Path:
    """A checkpoint with the demo's tokenizer and random weights, converted."""
    source = folder / "hf"
    source.mkdir()
    raw = DEMO | SIZES | {"tie_word_embeddings": False}
    (source / "config.json").write_text(json.dumps(raw))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_FOLDER / name, source)
    write_tensors(source, tensors(raw, seed))
    assert convert_checkpoint.main([str(source), str(folder / "wide")]) == 0
    return folder / "wide"


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return converted(tmp_path_factory.mktemp("converted"), 0)


class Host:
    """One host: `scripts.launch` and its engine's process."""

    def __init__(self, number: int, port: int, folder: Path, model: Path, *flags: str) -> None:
        self.folder = folder / str(number)  # in which it runs
        self.folder.mkdir()
        self.out, self.err = folder / f"{number}.out", folder / f"{number}.err"
        place = ["--coordinator", f"127.0.0.1:{port}", "--num-hosts", "2", "--host-id", str(number)]
        place += ["--model", str(model), "--tensor-parallel-size", "8"]
        cache = ["--compile-cache", os.environ["JAX_COMPILATION_CACHE_DIR"]]
        environment = os.environ | ANY_DEVICES | {"PALLAS_SERVE_HOSTS_SECRET": "a secret for the tests"}
        environment |= {"PYTHONPATH": str(ROOT)}
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                [*LAUNCH, *FLAGS, *place, *cache, *flags],
                cwd=self.folder, stdout=out, stderr=err, env=environment,
            )  # fmt: skip
        self.family: list[psutil.Process] = []

    def wait_for(self, text: str) -> str:
        """The first line with the text."""
        wait_until(lambda: text in self.out.read_text() or self.process.poll() is not None, STARTED_S)
        lines = self.out.read_text().splitlines()
        found = [line for line in lines if text in line]
        assert found, f"no {text!r} in {lines}, {self.err.read_text()}"
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        return found[0]

    def engine(self) -> psutil.Process:
        return next(child for child in self.family if "spawn_main" in " ".join(child.cmdline()))

    def ended(self) -> int:
        """The exit code. Nothing of the host is left."""
        code = self.process.wait(ENDED_S)
        wait_until(lambda: not any(alive(child) for child in self.family))
        return code

    def kill(self) -> None:
        for process in [*self.family, self.process]:
            if alive(process) if isinstance(process, psutil.Process) else process.poll() is None:
                process.send_signal(signal.SIGKILL)
        self.process.wait()


class Pair:
    """A leader, and a follower that is late."""

    def __init__(self, folder: Path, model: Path, stack: contextlib.ExitStack, *flags: str) -> None:
        port = free_port()
        self.leader = Host(0, port, folder, model, *flags)
        stack.callback(self.leader.kill)
        self.leader.wait_for("waiting for host 1 of 2")
        self.follower = Host(1, port, folder, model, *flags)
        stack.callback(self.follower.kill)
        self.url = self.leader.wait_for("ready after").split(": ")[1].removesuffix("/v1")
        self.health = self.follower.wait_for("following after").split(": ")[1]


@pytest.fixture
def pair(tmp_path, model) -> Iterator[Pair]:
    with contextlib.ExitStack() as stack:
        yield Pair(tmp_path, model, stack)


@pytest.fixture(scope="module")
def kept(tmp_path_factory, model) -> Iterator[Pair]:
    """For tests that leave the hosts as they found them. Both end well after all that the tests did to them."""
    with contextlib.ExitStack() as stack:
        pair = Pair(tmp_path_factory.mktemp("kept"), model, stack, "--admin-api-key", ADMIN_KEY)
        yield pair
        pair.leader.process.terminate()
        pair.follower.process.terminate()  # as a manager of machines does
        assert pair.leader.ended() == 0
        assert pair.follower.ended() == 0


class Stream:
    """A streamed completion that is being read."""

    def __init__(self, url: str) -> None:
        self.text = ""
        self._begun = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,))
        self._thread.start()
        assert self._begun.wait(ENDED_S)

    def _read(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=ENDED_S) as http:
            while "error" not in self.text:
                with http.stream("POST", "/v1/completions", json=ENDLESS) as answer:
                    for piece in answer.iter_text():
                        self.text += piece
                        self._begun.set()

    def end(self) -> str:
        self._thread.join(ENDED_S)
        assert not self._thread.is_alive()
        return self.text


def said(url: str, **changes: int | str) -> list[str]:
    with httpx.Client(base_url=url, timeout=ENDED_S) as http:
        return [
            http.post("/v1/completions", json={"prompt": prompt} | how | changes).json()["choices"][0]["text"]
            for how in (GREEDY, SAMPLED)
            for prompt in ("Once upon a time", "What is 47 + 35?")
        ]


def compiled_since(url: str) -> float:
    metrics = httpx.get(f"{url}/metrics", timeout=ENDED_S).text
    (count,) = re.findall(r"num_compiles_after_warm_up_total\{.*\} (.*)", metrics)
    return float(count)


def test_two_hosts_of_four_chips_say_what_one_chip_says(kept, model):
    with serve("--model", str(model), *FLAGS) as server:
        texts = said(kept.url)
        assert texts == said(server.url)
        assert len({*texts}) == 4
    assert compiled_since(kept.url) == 0
    for path, status in (("/health", 200), ("/live", 200), ("/v1/models", 404)):
        assert httpx.get(kept.health.removesuffix("/health") + path, timeout=ENDED_S).status_code == status


def test_the_weights_of_both_hosts_change_or_none(kept, tmp_path):
    """The hosts run in folders of their own, so a relative name can be of something that only one of them has."""
    told = partial(said, kept.url, max_tokens=6)  # a step of two hosts on two cores takes a tenth of a second
    first = told()
    others = converted(tmp_path, 1)
    places = [host.folder / "others" for host in (kept.leader, kept.follower)]
    with httpx.Client(base_url=kept.url, headers=ADMIN, timeout=ENDED_S) as http, ThreadPoolExecutor(1) as thread:

        def reload(**body: str) -> httpx.Response:
            return http.post("/admin/reload", json=body)

        def refused() -> str:
            answer = reload(model="others")
            assert answer.status_code == 400
            assert told() == first
            return answer.json()["error"]["message"]

        asleep = http.post("/sleep")
        assert asleep.status_code == 200, asleep.text
        waiting = thread.submit(told)
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert not waiting.done()
        assert http.post("/wake_up").status_code == 200
        assert waiting.result(ENDED_S) == first
        assert http.post("/sleep", params={"level": 2}).status_code == 200
        assert "has dropped the weights" in http.post("/wake_up").json()["error"]["message"]
        assert reload().status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert http.post("/wake_up", params={"tags": "kv_cache"}).status_code == 200
        assert told() == first

        lacking = r": model 'others': there is no such folder or file on this machine$"
        for name, place in zip((r"host 1 \(.*\)", r"host 0 \(the leader\)"), places, strict=True):
            place.symlink_to(others)
            assert re.search(f"were not changed: {name}{lacking}", refused())
            place.unlink()

        places[0].symlink_to(others)
        shutil.copytree(others, places[1])
        for file in (places[1] / "orbax" / "arrays").rglob("*"):
            if file.is_file() and file.stat().st_size > 10_000:
                os.truncate(file, file.stat().st_size // 2)
        assert re.search(r"were not changed: host 1 \(.*\): .*convert again", refused())

        shutil.rmtree(places[1])
        places[1].symlink_to(others)
        assert reload(model="others").status_code == 200
        assert (changed := told()) != first
        assert reload().status_code == 200
        assert told() == first

        def update(route: str, **info: object) -> httpx.Response:
            return http.post(route, json={"update_info": info} if info else {})

        assert update("/start_weight_update").status_code == 200
        array = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]], "shared_memory": "block"}
        assert "several hosts take weights from a folder only" in update("/update_weights", **array).text
        assert update("/update_weights", path="others").status_code == 200
        assert told() == first
        assert update("/finish_weight_update").status_code == 200
        assert told() == changed and http.get("/get_weight_version").json() == {"weight_version": "1"}
        assert reload().status_code == 200
    assert told() == first
    assert compiled_since(kept.url) == 0


def test_the_hosts_load_adapters_and_models_together_or_not_at_all(tmp_path, model):
    """One adapter runs at a time, and one model besides --model, so the hosts stage them again and again."""
    config = LlamaConfig.from_hf(json.loads((model.parent / "hf" / "config.json").read_text()))
    one, two = (random_for(tmp_path / name, config, seed=seed) for seed, name in enumerate(("one", "two"), 1))
    flags = ["--enable-lora", "--max-loras", "1", "--admin-api-key", ADMIN_KEY, "--lora-modules", f"one={one}"]
    for name in ("second", "third"):
        (tmp_path / name).mkdir()
    second, third = (converted(tmp_path / name, seed) for seed, name in enumerate(("second", "third"), 1))
    flags += ["--models", f"second={second}"]
    with serve("--model", str(second), *FLAGS) as server:
        alone = said(server.url, max_tokens=8)
    with contextlib.ExitStack() as stack:
        pair = Pair(tmp_path, model, stack, *flags)
        http = stack.enter_context(httpx.Client(base_url=pair.url, headers=ADMIN, timeout=ENDED_S))

        def load(name: str, path: str) -> httpx.Response:
            return http.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": path})

        def text(name: str | None) -> str:
            answer = http.post("/v1/completions", json={"prompt": "Count", "model": name} | GREEDY | {"max_tokens": 8})
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        assert load("two", str(two)).status_code == 200
        texts = [text(name) for name in (None, "one", "two")]
        assert len({*texts}) == 3
        assert [text(name) for name in (None, "one", "two")] == texts

        others = [host.folder / "other" for host in (pair.leader, pair.follower)]
        random_for(others[0], config, seed=3)
        assert re.search(r"^host 1 \(.*\): .*no adapter 'other'", load("other", "other").json()["error"]["message"])
        random_for(others[1], config, seed=4)
        assert re.search(r"^host 1 \(.*\): it finds other weights", load("other", "other").json()["error"]["message"])
        random_for(others[1], config, seed=3)
        assert load("other", "other").status_code == 200
        assert text("other") not in texts
        assert http.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
        assert http.get("/v1/models/two").status_code == 404
        assert text("one") == texts[1]

        def load_model(name: str, path: str) -> httpx.Response:
            return http.post("/v1/models/load", json={"model": name, "path": path})

        assert said(pair.url, max_tokens=8, model="second") == alone
        copies = [host.folder / "copy" for host in (pair.leader, pair.follower)]
        shutil.copytree(third, copies[0])
        assert re.search(r"^host 1 \(.*\): no model 'copy'", load_model("copy", "copy").json()["error"]["message"])
        copies[1].symlink_to(second)
        assert re.search(r"^host 1 \(.*\): it finds other", load_model("copy", "copy").json()["error"]["message"])
        copies[1].unlink()
        shutil.copytree(third, copies[1])
        assert load_model("copy", "copy").status_code == 200
        with ThreadPoolExecutor(3) as pool:
            names = ("copy", None, "second") * 2
            found = list(pool.map(text, names))
        assert found[:3] == found[3:] and len({*found}) == 3
        assert found[1] == texts[0] and said(pair.url, max_tokens=8, model="second") == alone
        assert http.post("/v1/models/unload", json={"model": "copy"}).status_code == 200
        assert http.get("/v1/models/copy").status_code == 404
        assert compiled_since(pair.url) == 0


def test_a_follower_that_stands_still_ends_the_leader(pair):
    stream = Stream(pair.url)
    engine = pair.follower.engine()
    engine.suspend()
    assert "error" in stream.end()
    assert pair.leader.ended() == 1
    lost = f"engine failure: host 1 ({os.uname().nodename}) has gone: its connection has closed"
    assert lost in pair.leader.err.read_text()
    engine.resume()
    assert pair.follower.ended() == 1
    assert "engine failure" in pair.follower.err.read_text()


def test_a_leader_that_is_lost_ends_the_follower(pair):
    pair.leader.engine().kill()
    assert pair.follower.ended() == 1
    assert "the leader has gone: its connection has closed" in pair.follower.err.read_text()
    assert pair.leader.ended() == 1


def test_a_host_that_never_comes_ends_the_start(tmp_path, model):
    leader = Host(0, free_port(), tmp_path, model, "--hosts-timeout", "2")
    assert leader.ended() == 1
    message = "scripts/serve: The engine could not start: host 1 of 2 did not come within 2 s (--hosts-timeout)"
    assert message in leader.err.read_text()
