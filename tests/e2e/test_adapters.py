"""LoRA adapters of the demo behind a real server: many more than there are slots, and than the host keeps."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import aiohttp
import httpx
import ml_dtypes  # noqa: F401, NumPy learns bfloat16
import openai
import pytest

from model.config import LlamaConfig
from model.loading.source import DEMO_FOLDER
from model.network.lora import TARGETS
from tests.c_compiler import compiler
from tests.e2e.conftest import ADMIN_KEY, DemoServer, serve_exported
from tests.e2e.kv_crowd import healthy
from tests.model.adapters import random_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

BASE = "demo"
NAMES = [f"a{i:02}" for i in range(40)]
RANKS = (1, 2, 4, 7, 8, 16)
TARGET_SETS = [
    ("q_proj", "v_proj"),
    tuple(name for names in TARGETS.values() for name in names),
    ("gate_proj", "up_proj", "down_proj"),
    ("o_proj",),
    ("k_proj", "down_proj"),
]
ADAPTERS = ["--enable-lora", "--max-loras=8", "--max-lora-rank=16", "--max-cpu-loras=12"]
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
# More than a page, so that prefixes of other adapters would be found if they were not apart.
STORY = "Once upon a time there was a little girl named Lily. She liked to play in the park with her dog. One day"
TOLD = {"prompt": STORY, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = TOLD | {"max_tokens": 300}


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
    healthy(adapted)


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


def test_streams_of_forty_adapters_and_the_base_have_the_texts_that_each_has_alone(adapted, http, request):
    """64 at once. Twelve adapters are in the host's memory, and eight in slots."""
    models = [*NAMES, *[BASE] * 28]
    Random(0).shuffle(models)
    before = adapted.metrics()
    with adapted.client() as client, ThreadPoolExecutor(64) as pool:
        found = list(pool.map(lambda model: streamed(client, model, TOLD), models))
    metrics = healthy(adapted)
    assert metrics["lora_adapters"] == len(NAMES)
    assert metrics["lora_adapters_resident"] == 8
    assert metrics["lora_slot_writes_total"] - before["lora_slot_writes_total"] >= len(NAMES) - 8
    told = request.getfixturevalue("told")
    assert dict(zip(models, found, strict=True)) == told
    assert [text for model, text in zip(models, found, strict=True) if model == BASE] == [told[BASE]] * 28


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


def test_clients_that_leave_while_their_adapter_is_awaited_leave_nothing(adapted, http, told):
    async def leave(session: aiohttp.ClientSession, number: int) -> None:
        body = LONG | {"model": NAMES[number % 30], "stream": True}
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (number % 30)), session.post(COMPLETIONS, json=body) as answer:
                await answer.read()

    async def all_leave() -> None:
        async with aiohttp.ClientSession(adapted.url, connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(leave(session, number) for number in range(180)))

    asyncio.run(all_leave())
    assert text_of(http, NAMES[35]) == told[NAMES[35]]
