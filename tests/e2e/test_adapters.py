"""LoRA adapters of the demo behind a real server: a hundred of them, whatever is done to them and to their folders."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import aiohttp
import httpx
import jax.numpy as jnp
import ml_dtypes  # noqa: F401, NumPy learns bfloat16
import numpy as np
import openai
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from model.config import LlamaConfig
from model.loading.adapter import read_adapter
from model.loading.hf_format import ADAPTER_CONFIG, ADAPTER_FILE, ADAPTER_TORCH_FILE
from model.loading.source import DEMO_FOLDER
from model.loading.weights import load_hf
from model.network.llama import Llama
from model.network.lora import TARGETS
from tests.c_compiler import compiler
from tests.e2e.conftest import ADMIN_KEY, DemoServer, serve_exported
from tests.model.adapters import merged, random_for
from tests.model.dense_attention import dense_hidden, dense_logits
from tests.server.support.api_processes import through_each
from tests.server.support.canary import canary

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BASE = "demo"
NAMES = [f"a{i:02}" for i in range(100)]
RANKS = (1, 2, 4, 7, 8, 16)
TARGET_SETS = [
    ("q_proj", "v_proj"),
    tuple(name for names in TARGETS.values() for name in names),
    ("gate_proj", "up_proj", "down_proj"),
    ("o_proj",),
    ("k_proj", "down_proj"),
]
MAX_CPU = 12
ADAPTERS = ["--enable-lora", "--max-loras=8", "--max-lora-rank=16", f"--max-cpu-loras={MAX_CPU}"]
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
# More than a page, so that prefixes of other adapters would be found if they were not apart.
STORY = "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog. One day"
TOLD = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = TOLD | {"max_tokens": 300}
COUNT = '{"text": "47 + 35 = 82.", "answer": 82}\n' * 3


@pytest.fixture(scope="module")
def config() -> LlamaConfig:
    return LlamaConfig.from_file(DEMO_FOLDER)


@pytest.fixture(scope="module")
def lora_folder(config, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for i, name in enumerate(NAMES):
        random_for(folder / name, config, rank=RANKS[i % 6], seed=i, targets=TARGET_SETS[i % 5])
    return folder


@pytest.fixture(scope="module")
def flags(engine_flags, lora_folder) -> list[str]:
    """More rows than adapters that run at once, so that requests wait for slots."""
    return [*engine_flags, "--max-num-seqs=16", *ADAPTERS, f"--lora-folder={lora_folder}", "--admin-api-key", ADMIN_KEY]


@pytest.fixture(scope="module")
def adapted(flags) -> Iterator[DemoServer]:
    """Shared by all tests here that leave it as they found it."""
    with serve_exported(*flags, "--enable-embeddings") as server:
        yield server
    assert server.process.returncode == 0


@pytest.fixture
def http(adapted) -> Iterator[httpx.Client]:
    """An administrator's client. After the test nothing is left of its requests, and the base model is what it was."""
    with adapted.http(headers=ADMIN, limits=httpx.Limits(max_connections=None)) as http:
        told = text_of(http, BASE)
        yield http
        assert text_of(http, BASE) == told
    metrics = adapted.wait_for_metrics(
        lambda m: m["num_requests_running"] == m["num_requests_waiting"] == m["kv_cache_usage_perc"] == 0
    )
    assert metrics["num_compiles_after_warm_up_total"] == metrics["integrity_failures_total"] == 0
    assert metrics["failed_steps_total"] == 0


def text_of(http: httpx.Client, model: str, body: dict[str, Any] = TOLD) -> str:
    answer = http.post(COMPLETIONS, json=body | {"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def text_alone(http: httpx.Client, model: str, body: dict[str, Any] = TOLD) -> str:
    """Computed anew."""
    assert http.post("/reset_prefix_cache").status_code == 200
    return text_of(http, model, body)


def refusal(answer: httpx.Response, *statuses: int) -> str:
    """The one line of an error with one of these statuses."""
    assert answer.status_code in statuses, answer.text
    message = answer.json()["error"]["message"]
    assert message and "\n" not in message
    return message


def load(http: httpx.Client, name: str, path: Path, **fields: object) -> None:
    answer = http.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | fields)
    assert answer.status_code == 200, answer.text


def unload(http: httpx.Client, name: str) -> None:
    assert http.post(UNLOAD, json={"lora_name": name}).status_code == 200


def streamed(client: openai.OpenAI, model: str, body: dict[str, Any], begun: Event | None = None) -> str:
    """The text of a stream. `begun` is set when a part of it is there."""
    fields = {name: body[name] for name in ("prompt", "max_tokens", "temperature")}
    extra = {"ignore_eos": True}
    with client.completions.create(model=model, stream=True, extra_body=extra, **fields) as stream:
        texts = []
        for chunk in stream:
            texts.append(chunk.choices[0].text)
            if begun is not None:
                begun.set()
    return "".join(texts)


def begin(pool: ThreadPoolExecutor, client: openai.OpenAI, models: Sequence[str]) -> list[Future[str]]:
    """Long streams, which all have begun."""
    begun = [Event() for _ in models]
    streams = [pool.submit(streamed, client, m, LONG, event) for m, event in zip(models, begun, strict=True)]
    assert all(event.wait(60) for event in begun)
    return streams


@pytest.fixture(scope="module")
def told(adapted, server) -> dict[str, str]:
    """The text of each adapter alone, and that of a server without adapters. They do not depend on other rows in C."""
    compiler()
    with adapted.http(headers=ADMIN) as http:
        texts = {name: text_alone(http, name) for name in NAMES}
    assert len(set(texts.values())) > 0.9 * len(NAMES)
    with server.http() as plain:
        return texts | {BASE: text_of(plain, BASE)}


def test_streams_of_a_hundred_adapters_and_the_base_have_the_texts_that_each_has_alone(adapted, http, request):
    """64 at once. Twelve adapters are in the host's memory, and eight in slots."""
    models = [*NAMES, *[BASE] * 28]
    Random(0).shuffle(models)
    before = adapted.metrics()
    with adapted.client() as client, ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda model: streamed(client, model, TOLD), models))
    metrics = adapted.wait_for_metrics(lambda m: m["num_requests_running"] == 0)
    assert metrics["lora_adapters"] == len(NAMES)
    assert metrics["lora_adapters_resident"] == 8
    assert metrics["lora_slot_writes_total"] - before["lora_slot_writes_total"] >= len(NAMES) - 8
    told = request.getfixturevalue("told")
    assert dict(zip(models, found, strict=True)) == told
    assert [text for model, text in zip(models, found, strict=True) if model == BASE] == [told[BASE]] * 28


@pytest.fixture(scope="module")
def merged_model(config, lora_folder, tmp_path_factory) -> tuple[str, Llama]:
    """An adapter of all projections, and the demo into which it is merged."""
    name, folder = NAMES[1], tmp_path_factory.mktemp("merged")
    weights = read_adapter(lora_folder / name, config, max_rank=16)
    tensors = load_file(DEMO_FOLDER / "model.safetensors")
    tensors = merged({key: np.asarray(tensor, np.float32) for key, tensor in tensors.items()}, weights)
    shutil.copy(DEMO_FOLDER / "config.json", folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return name, load_hf(folder, config, dtype=jnp.float32)


def test_numbers_are_those_of_a_model_into_which_the_adapter_is_merged(adapted, http, merged_model):
    name, model = merged_model
    ids = http.post("/tokenize", json={"model": name, "prompt": STORY}).json()["tokens"]
    body = {"model": name, "prompt": STORY, "max_tokens": 1, "echo": True, "logprobs": 2, "temperature": 0}
    logprobs = http.post(COMPLETIONS, json=body).json()["choices"][0]["logprobs"]["token_logprobs"]
    logits = np.asarray(dense_logits(model, np.array(ids, np.int32)), np.float64)
    expected = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
    drawn = np.array([*ids[1:], expected[-1].argmax()])
    np.testing.assert_allclose(logprobs[1:], expected[np.arange(len(drawn)), drawn], atol=2e-3)
    with adapted.client() as client:
        vector = np.array(client.embeddings.create(model=name, input=STORY).data[0].embedding)
    last = np.asarray(dense_hidden(model, np.array(ids, np.int32)))[-1].astype(np.float64)
    np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-3)


def test_every_api_serves_an_adapter(adapted, http):
    name, question = NAMES[6], "What is 47 + 35?"
    messages = [{"role": "user", "content": question}]
    kinds = {"type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"]}
    schema = {"name": "pet", "schema": kinds | {"additionalProperties": False}}
    with adapted.client() as client:
        chat = client.chat.completions.create(model=name, messages=messages, max_tokens=20, temperature=0)
        response = client.responses.create(model=name, input=question, max_output_tokens=20, temperature=0)
        form = {"type": "json_schema", "json_schema": schema}
        pet = client.chat.completions.create(model=name, messages=messages, response_format=form)
    text = chat.choices[0].message.content
    body = {"model": name, "messages": messages, "max_tokens": 20, "temperature": 0}
    message = http.post("/v1/messages", json=body).json()
    assert chat.model == response.model == pet.model == message["model"] == name
    assert response.output_text == message["content"][0]["text"] == text
    assert (
        text
        != http.post("/v1/chat/completions", json=body | {"model": BASE}).json()["choices"][0]["message"]["content"]
    )
    assert json.loads(pet.choices[0].message.content)["kind"] in ("cat", "dog")


@pytest.mark.parametrize(
    "steps", ['--speculative-config={"method": "ngram", "num_speculative_tokens": 3}', "--num-scheduler-steps=4"]
)
def test_steps_of_several_tokens_have_the_same_texts(adapted, http, engine_flags, lora_folder, steps):
    small = ["--max-num-seqs=2", "--max-num-batched-tokens=16"]
    models = [NAMES[1], BASE, NAMES[0]]
    body = {"prompt": COUNT, "max_tokens": 48, "temperature": 0, "ignore_eos": True}
    expected = [text_of(http, model, body) for model in models]
    with serve_exported(*engine_flags, *small, *ADAPTERS, f"--lora-folder={lora_folder}", steps) as server:
        with server.http() as own, ThreadPoolExecutor(3) as pool:
            assert list(pool.map(lambda model: text_of(own, model, body), models)) == expected
        metrics = server.wait_for_metrics(lambda m: m["num_requests_running"] == 0 < m["num_steps_total"])
    assert metrics["num_compiles_after_warm_up_total"] == metrics["integrity_failures_total"] == 0
    assert ("ngram" in steps) == (metrics["spec_decode_num_accepted_tokens_total"] > 0)


def test_streams_finish_with_their_own_weights_when_the_name_gets_others(adapted, http, config, tmp_path, told):
    path = random_for(tmp_path / "changing", config, seed=500, targets=TARGET_SETS[1])
    other = random_for(tmp_path / "other", config, seed=501, targets=TARGET_SETS[1])
    load(http, "changing", path)
    load(http, "other", other)
    old, new = (text_alone(http, name, LONG) for name in ("changing", "other"))
    unload(http, "other")
    assert old != new
    with adapted.client() as client, ThreadPoolExecutor(16) as pool:
        streams = begin(pool, client, ["changing"] * 4)
        shutil.copytree(other, path, dirs_exist_ok=True)
        load(http, "changing", path, load_inplace=True)
        later = begin(pool, client, ["changing"] * 4)
        unload(http, "changing")
        assert not any(stream.done() for stream in streams + later)
        refusal(http.post(COMPLETIONS, json=TOLD | {"model": "changing"}), 404)
        assert text_of(http, NAMES[3]) == told[NAMES[3]]
        assert [stream.result() for stream in streams] == [old] * 4
        assert [stream.result() for stream in later] == [new] * 4


def test_a_name_of_the_folder_that_was_unloaded_is_read_anew(http, config, lora_folder, told):
    folder, name = lora_folder / "again", "again"
    shutil.copytree(lora_folder / NAMES[2], folder)
    assert text_of(http, name) == told[NAMES[2]]
    shutil.copytree(lora_folder / NAMES[7], folder, dirs_exist_ok=True)
    assert text_of(http, name) == told[NAMES[2]]
    unload(http, name)
    assert text_of(http, name) == told[NAMES[7]]
    shutil.rmtree(folder)
    unload(http, name)
    refusal(http.post(COMPLETIONS, json=TOLD | {"model": name}), 404)


def test_a_server_that_was_killed_serves_the_same_texts_again(flags, told):
    """With -9 and in the middle of streams. The next one has two HTTP processes."""
    with serve_exported(*flags, "--enable-embeddings") as server, ThreadPoolExecutor(16) as pool:
        with server.client() as client:
            streams = begin(pool, client, NAMES[:8])
            engine = server.engine_process()
            server.process.kill()
            for stream in streams:
                with pytest.raises((openai.APIError, httpx.HTTPError)):
                    stream.result(60)
        gone, _ = psutil.wait_procs([engine], 30)
        assert gone
    with (
        serve_exported(*flags, "--enable-embeddings", "--api-server-count=2") as server,
        through_each(server, headers=ADMIN) as clients,
        ThreadPoolExecutor(16) as pool,
    ):
        models = [BASE, *NAMES[:31]]
        found = pool.map(lambda i: text_of(clients[i % 2], models[i]), range(32))
        assert dict(zip(models, found, strict=True)).items() <= told.items()
        first, second = clients
        unload(first, NAMES[0])
        listed = [model["id"] for model in second.get("/v1/models").json()["data"]]
        assert sorted(listed) == [*NAMES[1:31], BASE]


@pytest.mark.hosts
def test_two_engines_serve_the_same_texts(flags, told):
    models = [BASE, *NAMES[:24]] * 2
    with (
        serve_exported(*flags, "--enable-embeddings", "--data-parallel-size=2") as pair,
        pair.client() as client,
        ThreadPoolExecutor(len(models)) as pool,
    ):
        found = list(pool.map(lambda model: streamed(client, model, TOLD), models))
        metrics = pair.wait_for_metrics(lambda m: m["num_requests_running"] == 0)
    assert found == [told[model] for model in models]
    assert metrics["num_compiles_after_warm_up_total"] == 0


def test_adapters_outlive_changes_of_the_base(http, told):
    """The device forgets what is in the slots. Requests that wait meanwhile are answered after it."""
    models = [BASE, *NAMES[:12]]
    for changes in (["/sleep?level=1", "/wake_up"], ["/admin/reload"]):
        with ThreadPoolExecutor(len(models)) as pool:
            found = pool.map(lambda model: text_of(http, model), models)
            for change in changes:
                assert http.post(change, json={}).status_code == 200
            assert dict(zip(models, found, strict=True)).items() <= told.items()
        assert text_of(http, NAMES[20]) == told[NAMES[20]]


class Code:
    """What a pickle can do."""

    def __reduce__(self) -> Any:
        return os._exit, (7,)


def replace_by_code(folder: Path) -> None:
    """In the form of torch.save."""
    (folder / ADAPTER_FILE).unlink()
    with zipfile.ZipFile(folder / ADAPTER_TORCH_FILE, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"a": Code()}, protocol=2))
        archive.writestr("archive/version", "3\n")


def replace_by_pipe(folder: Path) -> None:
    (folder / ADAPTER_FILE).unlink()
    os.mkfifo(folder / ADAPTER_FILE)


BROKEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "half": ("header describes", lambda f: os.truncate(f / ADAPTER_FILE, (f / ADAPTER_FILE).stat().st_size // 2)),
    "no-config": ("has no adapter_config.json", lambda f: (f / ADAPTER_CONFIG).unlink()),
    "pipe": ("is not a file", replace_by_pipe),
    "code": ("adapter_model.bin", replace_by_code),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_is_refused_in_a_line(http, config, lora_folder, kind):
    words, change = BROKEN[kind]
    folder = random_for(lora_folder / kind, config)
    change(folder)
    try:
        asked = http.post(COMPLETIONS, json=TOLD | {"model": kind}, timeout=20)
        loaded = http.post(LOAD, json={"lora_name": "loaded", "lora_path": str(folder)}, timeout=20)
    finally:
        shutil.rmtree(folder)
    assert words in refusal(loaded, 400)
    assert words in refusal(asked, 400)
    assert str(lora_folder) not in refusal(asked, 400)


def test_links_and_names_lead_to_no_other_folder(http, config, lora_folder, tmp_path, told):
    links = {"inside": lora_folder / NAMES[5], "outside": random_for(tmp_path / "outside", config), "up": ".."}
    for name, target in links.items():
        (lora_folder / name).symlink_to(target)
    try:
        assert text_of(http, "inside") == told[NAMES[5]]
        unload(http, "inside")
        names = ["outside", "up", ".", "..", f"../{lora_folder.name}/a00", str(tmp_path / "outside"), "/a00", "a00/"]
        names += ["a00/../a01", "%2e%2e", "a\0b", "a00\0", "a\nb", "n" * 256, "n" * 10_000, "../" * 3000]
        for name in names:
            assert len(refusal(http.post(COMPLETIONS, json=TOLD | {"model": name}), 404)) < 300, name
        lone_surrogate = json.dumps(TOLD | {"model": "\ud800"})
        refusal(http.post(COMPLETIONS, content=lone_surrogate, headers={"Content-Type": "application/json"}), 400)
        assert http.get("/v1/models/..%2Fa00").status_code == 404
    finally:
        for name in links:
            (lora_folder / name).unlink()


def test_a_thousand_requests_for_a_broken_adapter_are_refused_at_once(adapted, http, lora_folder, told):
    (lora_folder / "empty").mkdir()

    async def ask(session: aiohttp.ClientSession) -> tuple[int, str]:
        async with session.post(COMPLETIONS, json=TOLD | {"model": "empty"}) as answer:
            return answer.status, (await answer.json())["error"]["message"]

    async def ask_all() -> list[tuple[int, str]]:
        async with aiohttp.ClientSession(adapted.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            return await asyncio.gather(*(ask(session) for _ in range(1000)))

    with canary(adapted), ThreadPoolExecutor(1) as pool:
        answers = pool.submit(asyncio.run, ask_all())
        assert text_of(http, NAMES[8]) == told[NAMES[8]]
        assert len(set(answers.result())) == 1
    status, message = answers.result()[0]
    assert status == 400 and "no adapter_config.json" in message
    (lora_folder / "empty").rmdir()


def test_clients_that_leave_while_their_adapter_is_awaited_leave_nothing(adapted, http, told):
    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        body = LONG | {"model": NAMES[number % 60], "stream": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (number % 30)), session.post(COMPLETIONS, json=body) as answer:
                await answer.read()

    async def all_leave() -> None:
        async with aiohttp.ClientSession(adapted.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(leave(session, number) for number in range(180)))

    asyncio.run(all_leave())
    assert text_of(http, NAMES[70]) == told[NAMES[70]]


def test_loads_in_loops_disturb_no_stream(adapted, http, lora_folder, told):
    def load_and_unload(number: int) -> None:
        for i in range(10):
            name, source = f"loop {number}", NAMES[(11 * number + i) % len(NAMES)]
            load(http, name, lora_folder / source)
            assert text_of(http, name) == told[source]
            unload(http, name)

    models = [BASE, *NAMES[40:71]]
    with adapted.client() as client, ThreadPoolExecutor(36) as pool:
        loops = [pool.submit(load_and_unload, number) for number in range(4)]
        found = list(pool.map(lambda model: streamed(client, model, TOLD), models))
        for loop in loops:
            loop.result()
    assert dict(zip(models, found, strict=True)).items() <= told.items()


def test_a_folder_that_is_written_while_it_is_read_gives_one_or_the_other(http, config, tmp_path):
    folder, *others = (
        random_for(tmp_path / name, config, rank=16, seed=seed, targets=TARGET_SETS[1])
        for seed, name in enumerate(("written", "one", "other"), 600)
    )
    texts, contents = [], [(other / ADAPTER_FILE).read_bytes() for other in others]
    for other in others:
        load(http, "written", other, load_inplace=True)
        texts.append(text_of(http, "written"))
    is_done = Event()

    def write() -> None:
        for i in range(10_000):
            (folder / ADAPTER_FILE).write_bytes(contents[i % 2])
            if is_done.wait(0.01):
                return

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        for _ in range(40):
            answer = http.post(LOAD, json={"lora_name": "written", "lora_path": str(folder), "load_inplace": True})
            if answer.status_code != 200:
                refusal(answer, 400)
            assert text_of(http, "written") in texts
        is_done.set()
        writing.result()
    load(http, "written", folder, load_inplace=True)
    assert text_of(http, "written") == texts[contents.index((folder / ADAPTER_FILE).read_bytes())]
    unload(http, "written")


def test_a_name_keeps_its_weights_when_another_of_the_same_is_gone(http, lora_folder, tmp_path, told):
    copy = shutil.copytree(lora_folder / NAMES[4], tmp_path / "copy")
    assert text_of(http, NAMES[4]) == told[NAMES[4]]
    load(http, "copy", copy)
    unload(http, "copy")
    shutil.rmtree(copy)
    for name in NAMES[5 : MAX_CPU + 13]:  # out of the slots and the host's memory
        text_of(http, name)
    assert text_of(http, NAMES[4]) == told[NAMES[4]]


def test_an_adapter_whose_folder_is_gone_is_missed_by_its_own_requests_only(http, config, tmp_path, told):
    """It must have left the slots and the host's memory. With its folder it comes back."""
    folder = random_for(tmp_path / "gone", config, seed=700)
    load(http, "gone", folder)
    text = text_of(http, "gone")
    others = NAMES[: MAX_CPU + 8]
    assert [text_of(http, name) for name in others] == [told[name] for name in others]
    shutil.rmtree(folder)

    def ask(number: int) -> None:
        if number % 3:
            body = TOLD | {"model": "gone", "stream": number % 2 == 0}
            assert str(folder) in refusal(http.post(COMPLETIONS, json=body), 404)
        else:
            assert text_of(http, NAMES[number]) == told[NAMES[number]]

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(ask, range(30)))
    random_for(folder, config, seed=701)
    assert "has changed since it was loaded" in refusal(http.post(COMPLETIONS, json=TOLD | {"model": "gone"}), 404)
    random_for(folder, config, seed=700)
    assert text_of(http, "gone") == text
    unload(http, "gone")
