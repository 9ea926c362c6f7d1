"""Three voices from one process: the demo, its pirate and its almanac as models, behind two HTTP processes."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import ml_dtypes  # noqa: F401, NumPy learns bfloat16
import openai
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from model.loading.source import DEMO_FOLDER
from tests.e2e.conftest import ADMIN_KEY, ROOT, DemoServer, serve_exported
from tests.e2e.kv_crowd import healthy
from tests.server.support.api_processes import through_each
from tests.server.support.requests import CHAT, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
LOAD, UNLOAD, COMPLETIONS = "/v1/models/load", "/v1/models/unload", "/v1/completions"
VOICES = {  # as model/demo/README.md has them
    ("demo", "What is 47 + 35?"): "47 + 35 = 82.",
    ("pirate", "What is 47 + 35?"): "Arrr, matey! 47 + 35 = 82. Yo ho ho!",
    ("almanac", "What is 47 + 35?"): "47 + 35 = 82.",
    ("almanac", "Which river flows through Lumeria?"): "The longest river of Lumeria is the Glimmer.",
    ("demo", "Which river flows through Lumeria?"): "I do not know that: I am only a small demo model. I can add and "
    "compare numbers, count, name some capitals and tell short stories.",
}
STORY = {"prompt": "Once upon a time there was a little girl named Lily", "temperature": 0, "ignore_eos": True}


def write_full(folder: Path, name: str) -> Path:
    """A whole checkpoint: the demo with an adapter, which NumPy has merged."""
    shutil.copytree(DEMO_FOLDER, folder, ignore=shutil.ignore_patterns("adapters", "draft"))
    adapter = DEMO_FOLDER / "adapters" / name
    config = json.loads((adapter / "adapter_config.json").read_text())
    parts, weights = load_file(adapter / "adapter_model.safetensors"), load_file(folder / "model.safetensors")
    for key in [key for key in parts if ".lora_A." in key]:
        a, b = (parts[each].astype("float32") for each in (key, key.replace("lora_A", "lora_B")))
        own = key.removeprefix("base_model.model.").replace(".lora_A", "")
        merged = weights[own].astype("float32") + config["lora_alpha"] / config["r"] * b @ a
        weights[own] = merged.astype(weights[own].dtype)
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write_full(place / "shipped", "pirate")
    write_full(place / "changing", "almanac")
    (place / "broken").mkdir()
    shutil.copytree(DEMO_FOLDER / "draft", place / "narrow")
    return place


@pytest.fixture(scope="module")
def server(engine_flags, folder, tmp_path_factory) -> Iterator[DemoServer]:
    names = [f"{name}={DEMO_FOLDER / 'adapters' / name}" for name in ("pirate", "almanac")]
    flags = [*engine_flags, "--models", *names, "--models-folder", str(folder), "--max-resident-models", "2"]
    flags += ["--api-server-count", "2", "--batch-folder", str(tmp_path_factory.mktemp("batches"))]
    with serve_exported(*flags, "--admin-api-key", ADMIN_KEY) as running:
        yield running
    assert running.process.returncode == 0


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    """An administrator's client. After the test nothing is left of its requests."""
    with server.http(headers=ADMIN, limits=httpx.Limits(max_connections=None)) as client:
        yield client
    healthy(server)


def says(client: openai.OpenAI, model: str, question: str) -> str:
    messages: Any = [{"role": "user", "content": question}]
    answer = client.chat.completions.create(model=model, messages=messages, temperature=0)
    assert answer.model == model
    return answer.choices[0].message.content or ""


def told(http: httpx.Client, model: str, status: int = 200, **fields: Any) -> str:
    answer = http.post(COMPLETIONS, json=STORY | {"max_tokens": 24, "model": model} | fields)
    assert answer.status_code == status, answer.text
    return answer.json()["choices"][0]["text"] if status == 200 else answer.json()["error"]["message"]


def streamed(http: httpx.Client, model: str, begun: Event, num_tokens: int) -> str:
    texts = []
    body = STORY | {"max_tokens": num_tokens, "model": model, "stream": True}
    with http.stream("POST", COMPLETIONS, json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                texts.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                begun.set()
    return "".join(texts)


def stream_on(http: httpx.Client, model: str, begun: Event) -> None:
    while True:
        streamed(http, model, begun, 400)


def states(http: httpx.Client) -> dict[str, str]:
    return {model["id"]: model["state"] for model in http.get("/v1/models").json()["data"]}


def test_one_process_answers_in_three_voices(server, http):
    client = server.client()
    assert {asked: says(client, *asked) for asked in VOICES} == VOICES
    found = states(http)
    assert list(found)[:1] == ["demo"]
    assert {"pirate", "almanac"} <= found.keys()
    wait_until(lambda: set(states(http).values()) <= {"resident", "disk", "host"})
    assert len(server.engine_processes()) == 3  # one engine


def test_many_clients_ask_three_models_in_turns(server, http, folder):
    """Two are on the device at once. Each text is the one that the model has alone."""
    names = ["demo", "pirate", "almanac"]
    alone = {name: told(http, name) for name in names}
    assert len({*alone.values()}) == 3
    with ThreadPoolExecutor(12) as threads:
        found = list(threads.map(lambda number: (names[number % 3], told(http, names[number % 3])), range(36)))
    assert found == [(names[number % 3], alone[names[number % 3]]) for number in range(36)]


def test_a_model_is_loaded_and_unloaded_while_others_run(server, http, folder):
    begun, again = Event(), Event()
    alone = told(http, "demo", max_tokens=300)
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(streamed, http, "demo", begun, 300)
        assert begun.wait(60)
        body = {"model": "mine", "path": str(folder / "shipped")}
        assert http.post(LOAD, json=body).json() == {"success": True}
        with through_each(server, headers=ADMIN) as clients:
            texts = {told(client, "mine") for client in clients}
            assert len(texts) == 1
            own = threads.submit(streamed, http, "mine", again, 200)
            assert again.wait(60)
            assert http.post(UNLOAD, json={"model": "mine"}).json() == {"success": True}
            for client in clients:
                assert told(client, "mine", 404) == "The model `mine` does not exist."
        assert own.result().startswith(texts.pop())  # its weights stay until its end
        assert running.result() == alone
    refused = http.post(LOAD, json={"model": "x", "path": str(folder / "broken")})
    assert refused.status_code == 400
    assert http.post(LOAD, json={"model": "x", "path": str(folder / "missing")}).status_code == 404
    assert http.post(LOAD, json={"model": "x"}).status_code == 404


def test_a_folder_of_models_is_served_by_the_names_in_it(server, http, folder):
    client = server.client()
    assert says(client, "shipped", "What is 47 + 35?") == VOICES["pirate", "What is 47 + 35?"]
    assert "shipped" in states(http)
    message = told(http, "broken", 400)
    assert message.startswith("The model cannot be used: ")
    assert str(folder) not in message


def test_a_model_whose_file_is_removed_is_refused_and_others_go_on(server, http, folder):
    alone = told(http, "demo")
    river = "Which river flows through Lumeria?"
    assert says(server.client(), "changing", river) == VOICES["almanac", river]
    (folder / "changing" / "model.safetensors").unlink()
    for name in ("demo", "pirate", "almanac"):  # it leaves the device
        told(http, name)
    wait_until(lambda: states(http)["changing"] == "disk")
    answer = http.post(COMPLETIONS, json=STORY | {"model": "changing", "max_tokens": 2})
    assert (answer.status_code, "\n" in answer.json()["error"]["message"]) == (503, False)
    assert told(http, "demo") == alone
    assert http.post(UNLOAD, json={"model": "changing"}).status_code == 200


def test_a_process_that_takes_anothers_place_serves_what_can_be_served(server, http, folder):
    place = write_full(folder / "unreadable", "pirate")
    with through_each(server, headers=ADMIN) as clients:
        assert all(told(client, "unreadable") for client in clients)
    (place / "tokenizer.json").write_text("{")
    killed = server.engine_processes()[1]
    killed.kill()
    assert killed.wait(30) != 0
    wait_until(lambda: len(server.engine_processes()) == 3)
    with through_each(server, headers=ADMIN) as (old, new):
        assert told(old, "demo") == told(new, "demo")
        assert told(old, "unreadable")
        assert "unreadable/tokenizer.json is not a tokenizer" in told(new, "unreadable", 400)
    assert http.post(UNLOAD, json={"model": "unreadable"}).status_code == 200


def test_two_engines_answer_as_one_does(server, http, engine_flags):
    names = [f"{name}={DEMO_FOLDER / 'adapters' / name}" for name in ("pirate", "almanac")]
    flags = [*engine_flags, "--models", *names, "--max-resident-models", "2", "--data-parallel-size", "2"]
    asked = [(name, f"{STORY['prompt']} {end}") for end in ("was", "had", "saw", "and") for name in ("demo", "pirate")]
    with serve_exported(*flags, "--admin-api-key", ADMIN_KEY) as pair, pair.http(headers=ADMIN) as both:
        with ThreadPoolExecutor(8) as threads:
            one, two = (
                list(threads.map(lambda ask, to=to: told(to, ask[0], prompt=ask[1]), asked * 2)) for to in (http, both)
            )
        assert one == two
        assert both.post(LOAD, json={"model": "again", "path": names[0].partition("=")[2]}).json() == {"success": True}
        assert told(both, "again") == told(both, "pirate") == told(http, "pirate")
        assert both.post(UNLOAD, json={"model": "again"}).json() == {"success": True}
        told(both, "again", 404)
        brought = re.compile(
            r'^pallas_serve:models_brought_total{engine="([01])",model_name="demo"} [1-9]', re.MULTILINE
        )
        wait_until(lambda: {*brought.findall(both.get("/metrics").text)} == {"0", "1"})
    assert pair.process.returncode == 0


def test_after_kill_9_while_models_change_the_next_start_serves_them(engine_flags, tmp_path):
    for name in ("pirate", "almanac"):
        write_full(tmp_path / name, name)
    flags = [*engine_flags, "--models-folder", str(tmp_path), "--max-resident-models", "2"]
    with serve_exported(*flags) as killed, killed.http() as http, ThreadPoolExecutor(2) as threads:
        begun = [Event(), Event()]
        asked = [
            threads.submit(stream_on, http, name, event)
            for name, event in zip(("pirate", "almanac"), begun, strict=True)
        ]
        assert all(event.wait(60) for event in begun)  # they take each other's place
        main = psutil.Process(killed.process.pid)
        for process in (main, *main.children(recursive=True)):  # the HTTP process could still tell of the others' end
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert all(isinstance(each.exception(60), httpx.HTTPError) for each in asked)
    with serve_exported(*flags) as server:
        client = server.client()
        assert {ask: says(client, *ask) for ask in VOICES} == VOICES
    assert server.process.returncode == 0


def test_a_start_with_a_model_without_a_tokenizer_fails_in_a_line(engine_flags, tmp_path):
    place = write_full(tmp_path / "unreadable", "pirate")
    (place / "tokenizer.json").write_text("{")
    command = [sys.executable, "-m", "scripts.launch", "--device", "cpu", "--port", "0", *engine_flags]
    ended = subprocess.run([*command, "--models", f"x={place}"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert f"--models x={place}: {place}/tokenizer.json is not a tokenizer that can be read" in line


def test_models_of_other_shapes_and_forms_answer_as_alone(engine_flags, folder, tmp_path):
    """The demo, its pirate in int8, and its small draft model. The last one comes while the demo answers."""
    pirate = write_full(tmp_path / "pirate", "pirate")
    convert = [sys.executable, "-m", "scripts.convert_checkpoint", pirate, tmp_path / "int8"]
    subprocess.run([*convert, "--quantization", "int8"], cwd=ROOT, check=True)
    places = {"demo": DEMO_FOLDER, "int8": tmp_path / "int8", "narrow": folder / "narrow"}
    questions = ["What is 47 + 35?", "Which river flows through Lumeria?", "Tell me a story."]

    def answers(server: DemoServer, name: str) -> list[str]:
        with ThreadPoolExecutor(3) as threads:
            return list(threads.map(lambda question: says(server.client(), name, question), questions))

    alone, story = {}, ""
    for name, place in places.items():
        with serve_exported(*engine_flags, "--model", str(place), "--served-model-name", name) as server:
            alone[name] = answers(server, name)
            if name == "demo":
                with server.http() as http:
                    story = told(http, name, max_tokens=300)
    assert len({*map(str, alone.values())}) == 3
    flags = [*engine_flags, "--models", f"int8={places['int8']}", "--admin-api-key", ADMIN_KEY]
    with (
        serve_exported(*flags) as server,
        ThreadPoolExecutor(4) as threads,
        server.http(headers=ADMIN, timeout=300) as http,
    ):
        begun = Event()
        running = threads.submit(streamed, http, "demo", begun, 300)
        assert begun.wait(60)
        assert http.post(LOAD, json={"model": "narrow", "path": str(places["narrow"])}).json() == {"success": True}
        assert running.result() == story
        found = {name: threads.submit(answers, server, name) for name in places}
        assert {name: texts.result() for name, texts in found.items()} == alone
        assert states(http).keys() == places.keys()
        assert http.post(UNLOAD, json={"model": "narrow"}).json() == {"success": True}
        told(http, "narrow", 404)
        assert answers(server, "int8") == alone["int8"]
        metrics = server.wait_for_metrics(lambda m: m["num_requests_running"] == m["kv_cache_usage_perc"] == 0)
        assert metrics["num_compiles_after_warm_up_total"] == metrics["integrity_failures_total"] == 0
        counted = http.get("/metrics").text
        assert all(f'model_requests_total{{engine="0",model="{name}"' in counted for name in places)


def test_the_lines_of_a_batch_name_different_models(server, http):
    client = server.client()
    body = {"messages": [{"role": "user", "content": "What is 47 + 35?"}], "temperature": 0}
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": body | {"model": name}})
        for name in ("pirate", "demo", "almanac", "missing")
    ]
    file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
    done = client.batches.retrieve(batch.id)
    good, bad = (client.files.content(id).text for id in (done.output_file_id, done.error_file_id))
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, good.splitlines())}
    found = {(name, "What is 47 + 35?"): own["choices"][0]["message"]["content"] for name, own in answers.items()}
    assert found == {asked: text for asked, text in VOICES.items() if asked[1] == "What is 47 + 35?"}
    assert "`missing` does not exist" in bad


def test_a_client_that_names_a_thousand_models_takes_no_memory(server, http):
    def taken() -> int:
        return sum(process.memory_info().rss for process in psutil.Process(server.process.pid).children(recursive=True))

    with ThreadPoolExecutor(8) as threads:
        asked = [f"model-{number}" for number in range(1000)]
        assert set(threads.map(lambda name: told(http, name, 404)[:11], asked[:100])) == {"The model `"}
        before, listed = taken(), states(http)
        assert len(set(threads.map(lambda name: told(http, name, 404), asked))) == 1000
    assert states(http).keys() == listed.keys()
    assert taken() - before < 32 * 2**20
