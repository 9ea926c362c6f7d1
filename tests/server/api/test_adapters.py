"""LoRA adapters by their names, over real sockets: loaded, unloaded, named on every route, and found in a folder."""

from __future__ import annotations

import contextlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import httpx
import pytest

from batcher.request import Request
from server.engine import wire
from server.engine.adapters import AdapterError, Adapters
from server.engine.protocol import Receiver
from server.engine.wire import (
    Adapter,
    ChangePhase,
    IfLoaded,
    LoadAdapter,
    LoadedModel,
    LoadModel,
    Phase,
    UnloadAdapter,
    UnloadModel,
)
from tests.server.support.adapters import TEXT, FakeStore, num_reads, write_adapter
from tests.server.support.api_processes import through_each
from tests.server.support.echo_engine import EchoConfig
from tests.server.support.requests import CHAT, HELLO, wait_until
from tests.server.support.running import ECHO, RunningServer, running_server
from tests.server.support.sse_events import stream_events
from tests.server.support.stub_app import StubClient, call, post_all, state_of
from tests.server.support.tokenizers import VOCAB_SIZE

ADMIN = {"Authorization": "Bearer boss"}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BASE = tuple(b"base")


def config(**fields: object) -> EchoConfig:
    return EchoConfig(reply=BASE, adapters=FakeStore(), **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory) -> Iterator[RunningServer]:
    write_adapter(folder / "first", "of the start")
    engine = config(modules=(("first", str(folder / "first")),))
    with running_server(tmp_path_factory.mktemp("server"), ECHO, engine, admin_api_keys=("boss",)) as running:
        yield running


@pytest.fixture
def http(server) -> Iterator[httpx.Client]:
    with server.http(headers=ADMIN) as client:
        yield client


@contextlib.contextmanager
def administrator(folder: Path, engine: EchoConfig, *others: EchoConfig) -> Iterator[httpx.Client]:
    """Of a server with these engines."""
    with (
        running_server(folder, ECHO, engine, more_engines=others, admin_api_keys=("boss",)) as server,
        server.http(headers=ADMIN) as client,
    ):
        yield client


def says(client: httpx.Client, model: str, status: int = 200, **fields: object) -> str:
    """What a chat with this model answers."""
    answer = client.post(CHAT, json=HELLO | {"model": model} | fields)
    assert answer.status_code == status, answer.text
    if status != 200:
        return answer.json()["error"]["message"]
    assert answer.json()["model"] == model
    return answer.json()["choices"][0]["message"]["content"]


def load(client: httpx.Client, name: str, path: Path | str, **fields: object) -> httpx.Response:
    return client.post(LOAD, json={"lora_name": name, "lora_path": str(path)} | fields)


def test_an_adapter_of_the_start_is_a_model_with_a_parent(http, folder):
    assert says(http, "first") == "of the start"
    assert says(http, "test-model") == says(http, "alias") == "base"
    models = {model["id"]: model for model in http.get("/v1/models").json()["data"]}
    assert list(models) == ["test-model", "alias", "first"]
    assert models["first"]["parent"] == "test-model"
    assert models["first"]["root"] == str(folder / "first")
    assert models["test-model"]["parent"] is None
    assert models["first"].keys() == models["test-model"].keys()
    assert http.get("/v1/models/first").json() == models["first"]
    plain = {"Authorization": "Bearer nobody"}
    assert http.get("/v1/models/first", headers=plain).json() == models["first"] | {"root": "first"}
    named = http.get("/v1/models", headers={"anthropic-version": "1"}).json()
    assert (named["last_id"], len(named["data"])) == ("first", 3)


def test_it_is_loaded_named_and_unloaded_with_vllms_answers(http, folder):
    write_adapter(folder / "second", "two")
    assert says(http, "second", 404) == "The model `second` does not exist."
    loaded = load(http, "second", folder / "second")
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'second' added successfully.")
    assert loaded.headers["content-type"].startswith("text/plain")
    assert says(http, "second") == "two"
    again = load(http, "second", folder / "second")
    assert (again.status_code, "loaded already" in again.json()["error"]["message"]) == (400, True)
    unloaded = http.post(UNLOAD, json={"lora_name": "second", "lora_int_id": 7})
    assert (unloaded.status_code, unloaded.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
    says(http, "second", 404)
    assert http.get("/v1/models/second").status_code == 404
    assert http.post(UNLOAD, json={"lora_name": "second"}).status_code == 404


def test_a_name_that_is_loaded_again_has_the_new_weights(http, folder):
    write_adapter(folder / "changing", "old")
    assert load(http, "changing", folder / "changing").status_code == 200
    write_adapter(folder / "changing", "new")
    assert says(http, "changing") == "old"
    assert load(http, "changing", folder / "changing", load_inplace=True).status_code == 200
    assert says(http, "changing") == "new"
    assert http.post(UNLOAD, json={"lora_name": "changing"}).status_code == 200
    write_adapter(folder / "changing", "newest")
    assert load(http, "changing", folder / "changing").status_code == 200
    assert says(http, "changing") == "newest"


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({}, 400, "lora_name"),
        ({"lora_name": "x"}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": 3}, 400, "lora_path"),
        ({"lora_name": "", "lora_path": "{good}"}, 400, "a name has 1 to 256 printable characters"),
        ({"lora_name": "a\x00b", "lora_path": "{good}"}, 400, "printable"),
        ({"lora_name": "a\nb", "lora_path": "{good}"}, 400, "printable"),
        ({"lora_name": "n" * 10_000, "lora_path": "{good}"}, 400, "1 to 256"),
        ({"lora_name": "alias", "lora_path": "{good}"}, 400, "is the name of the model"),
        ({"lora_name": "x", "lora_path": ""}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "/a\x00b"}, 400, "printable"),
        ({"lora_name": "x", "lora_path": "/" + "p" * 10_000}, 400, "lora_path"),
        ({"lora_name": "x", "lora_path": "/" + "p" * 3000}, 400, "File name too long"),
        ({"lora_name": "x", "lora_path": "/no/such/folder"}, 404, "is no folder"),
        ({"lora_name": "x", "lora_path": "{good}/text"}, 404, "is no folder"),
        ({"lora_name": "x", "lora_path": "{good}/text/x"}, 404, "is no folder"),
        ({"lora_name": "x", "lora_path": "{broken}"}, 400, "holds no adapter_config.json"),
    ],
)
def test_what_cannot_be_loaded_is_refused_in_words(http, folder, body, status, words):
    write_adapter(folder / "broken", None)
    places = {"{good}": str(folder / "first"), "{broken}": str(folder / "broken")}
    for place, path in places.items():
        body = {name: value.replace(place, path) if isinstance(value, str) else value for name, value in body.items()}
    answer = http.post(LOAD, json=body)
    assert answer.status_code == status
    message = answer.json()["error"]["message"]
    assert words in message
    assert len(message) < 5000
    assert says(http, "first") == "of the start"


def test_without_the_flag_there_are_no_adapters(tmp_path):
    with administrator(tmp_path, EchoConfig()) as client:
        for answer in (load(client, "a", "/"), client.post(UNLOAD, json={"lora_name": "a"})):
            assert answer.status_code == 404
            assert "--enable-lora" in answer.json()["error"]["message"]


def test_every_route_takes_an_adapters_name_and_says_it(http):
    named = {"model": "first"}
    turns = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 50}
    texts = {
        "/v1/completions": ({"prompt": "a", "max_tokens": 50}, lambda a: a["choices"][0]["text"]),
        "/v1/chat/completions": (turns, lambda a: a["choices"][0]["message"]["content"]),
        "/v1/messages": (turns, lambda a: a["content"][0]["text"]),
        "/v1/responses": ({"input": "hello"}, lambda a: a["output"][0]["content"][0]["text"]),
        "/invocations": ({"prompt": "a", "max_tokens": 50}, lambda a: a["choices"][0]["text"]),
        "/v1/chat/completions/batch": (
            {"messages": [HELLO["messages"]] * 2, "max_tokens": 50},
            lambda a: a["choices"][1]["message"]["content"],
        ),
        "/inference/v1/generate": (
            {"token_ids": [1, 2], "sampling_params": {"max_tokens": 50}},
            lambda a: bytes(a["choices"][0]["token_ids"][:-1]).decode(),
        ),
    }
    for path, (body, text_of) in texts.items():
        answer = http.post(path, json=named | body)
        assert (answer.status_code, answer.json()["model"], text_of(answer.json())) == (200, "first", "of the start"), (
            path
        )
        assert http.post(path, json={"model": "third"} | body).status_code == 404, path
    for path, body in {
        "/tokenize": {"prompt": "a"},
        "/detokenize": {"tokens": [65]},
        "/v1/messages/count_tokens": {"messages": HELLO["messages"]},
        "/v1/responses/input_tokens": {"input": "a"},
    }.items():
        assert http.post(path, json=named | body).status_code == 200, path
        assert http.post(path, json={"model": "third"} | body).status_code == 404, path


def test_a_conversation_may_go_on_with_another_model(http):
    first = http.post("/v1/responses", json={"model": "test-model", "input": "a"}).json()
    second = http.post(
        "/v1/responses", json={"model": "first", "input": "b", "previous_response_id": first["id"]}
    ).json()
    assert (second["model"], second["output"][0]["content"][0]["text"]) == ("first", "of the start")


class Embedding(StubClient):
    """An engine that embeds: each vector is the same."""

    def submit(self, requests: Sequence[tuple[wire.WireRequest, Receiver]]) -> None:
        for request, receiver in requests:
            self.submitted.append(request)
            vector = array("f", [1.0, 0.0]).tobytes()
            receiver.on_output(wire.Output(request.request_id, [], "stop", embedding=vector))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/pooling", {"input": ["a", "b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/invocations", {"input": ["a", "b"]}),
    ],
)
def test_vectors_are_an_adapters_too(path, body):
    client = Embedding()
    client.info = wire.EngineInfo(max_model_len=64, vocab_size=VOCAB_SIZE, embedding_size=2)
    client.adapters = {"mine": wire.Adapter("mine", 7, "/mine")}
    answers = post_all(state_of(client), path, [body | {"model": "mine"}, body | {"model": "m"}])
    assert [answer.json()["model"] for answer in answers] == ["mine", "m"]
    assert [request.adapter for request in client.submitted] == [7, 7, 0, 0]


def test_an_adapter_that_is_unloaded_before_its_request_arrives_is_unknown():
    client = StubClient(wire.failure("", "The LoRA adapter has been unloaded.", status=404, param="model"))
    client.adapters = {"mine": wire.Adapter("mine", 7, "/mine")}
    answer = call(state_of(client), "POST", CHAT, json=HELLO | {"model": "mine"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_running_requests_finish_with_the_weights_that_they_began_with(folder, tmp_path):
    write_adapter(folder / "slow", "slow words of an adapter")
    with administrator(tmp_path, config(step_s=0.1)) as client, ThreadPoolExecutor(4) as threads:
        assert load(client, "slow", folder / "slow").status_code == 200
        text = "slow words of an adapter"
        running = [threads.submit(says, client, "slow") for _ in range(4)]
        figure = 'num_requests_running{engine="0",model_name="test-model"} 4.0'
        wait_until(lambda: figure in client.get("/metrics").text)
        assert client.post(UNLOAD, json={"lora_name": "slow"}).status_code == 200
        says(client, "slow", 404)
        write_adapter(folder / "slow", "others")
        assert load(client, "slow", folder / "slow").status_code == 200
        assert says(client, "slow") == "others"
        assert [one.result() for one in running] == [text] * 4


def test_loading_stops_no_stream(folder, tmp_path):
    text = write_adapter(folder / "large", None) / TEXT
    os.mkfifo(text)  # whose reader waits
    with administrator(tmp_path, config(step_s=0.01)) as client, ThreadPoolExecutor(1) as threads:
        loading = threads.submit(load, client, "large", folder / "large")
        wait_until(lambda: num_reads(folder / "large") == 1)
        body = HELLO | {"stream": True, "ignore_eos": True, "max_tokens": 20}
        assert len(stream_events(client, CHAT, body)) > 2  # tokens may share an event
        assert not loading.done()
        text.write_text("large")
        assert loading.result().status_code == 200


def test_metrics_and_the_page_name_the_adapters_that_run(folder, tmp_path):
    write_adapter(folder / "seen", "seen")
    with administrator(tmp_path, config(step_s=0.2)) as client, ThreadPoolExecutor(1) as threads:
        assert load(client, "seen", folder / "seen").status_code == 200
        state = client.get("/ui/state").json()
        assert (state["max_loras"], state["adapters"]) == (4, {"running": 0, "loaded": 1, "swaps": 0})
        running = threads.submit(says, client, "seen", ignore_eos=True, max_tokens=40)
        labels = 'max_lora="4",model_name="test-model",running_lora_adapters="seen",waiting_lora_adapters=""'
        wait_until(lambda: f'lora_requests_info{{engine="0",{labels}}}' in client.get("/metrics").text)
        assert client.get("/ui/state").json()["adapters"]["running"] == 1
        assert running.result().startswith("seen")
        figures = client.get("/metrics").text
        assert 'pallas_serve:lora_loads_total{engine="0",model_name="test-model"} 1.0' in figures
        assert 'pallas_serve:lora_adapters{engine="0",model_name="test-model"} 1.0' in figures


def test_weights_are_forgotten_when_no_name_and_no_request_has_them(tmp_path):
    engine, store = Waiting(), FakeStore()
    adapters = Adapters(store, engine)
    one, other = (str(write_adapter(tmp_path / text, text)) for text in ("one", "other"))
    first = adapters.change(LoadAdapter("a", one)).identity
    assert adapters.name_of(first) == "a"
    assert adapters.change(LoadAdapter("b", one)).identity == first
    adapters.change(UnloadAdapter("a"))
    assert store.forgotten == []
    engine.used = {first}
    adapters.change(UnloadAdapter("b"))
    adapters.change(LoadAdapter("c", other))
    assert store.forgotten == [] and adapters.name_of(first) == "b"
    engine.used = set()
    adapters.forget_unused()
    wait_until(lambda: store.forgotten == ["one"])
    assert adapters.name_of(first) is None
    with pytest.raises(AdapterError, match="has been unloaded"):
        adapters.add_request(Request(request_id="r", prompt=(1,), sampling=None, adapter=first), print)
    adapters.close()


def test_a_load_that_is_abandoned_leaves_the_name_its_weights(tmp_path):
    store, told, answers = FakeStore(), [], SimpleQueue()
    adapters = Adapters(store, Waiting())
    place = write_adapter(tmp_path / "a", "old")
    old = adapters.change(LoadAdapter("a", str(place)))
    write_adapter(place, "new")
    load = LoadAdapter("a", str(place), if_loaded=IfLoaded.REPLACE)

    def answer(phase: Phase) -> Adapter | None:
        adapters.ask(ChangePhase(phase, load), answers.put)
        adapters.forget_unused()  # as the engine process does at any time
        reply = answers.get(timeout=30)
        assert reply.error is None
        return reply.loaded

    new = answer(Phase.PREPARE)
    assert new != old and store.texts == {old.identity: "old", new.identity: "new"}
    adapters.tell(told.append)
    assert told[-1].adapters == [old]
    answer(Phase.ABANDON)
    answer(Phase.ABANDON)  # there is nothing to abandon
    adapters.tell(told.append)
    assert told[-1] == told[0] and store.texts == {old.identity: "old"}
    assert answer(Phase.PREPARE) == new
    answer(Phase.COMMIT)
    adapters.tell(told.append)
    assert told[-1].adapters == [new] and told[-1].num_loads == 2
    wait_until(lambda: store.texts == {new.identity: "new"})
    adapters.close()


class Models(FakeStore):
    """Those with the text "wide" have another shape."""

    def loaded(self, name, identity, path) -> LoadedModel:
        return LoadedModel(name, identity, path, 64, VOCAB_SIZE, max_loras=int(self.texts[identity] != "wide"))


def test_an_adapter_changes_the_model_that_it_names(tmp_path):
    adapters = Adapters(FakeStore(), Waiting(), Models())
    one, wide, plain = (str(write_adapter(tmp_path / text, text)) for text in ("one", "wide", "plain"))
    model = adapters.change(LoadModel("m", one))
    adapters.change(LoadModel("wide", wide))
    with pytest.raises(AdapterError, match="base_model_name: 'wide' has another shape than --model"):
        adapters.change(LoadAdapter("a", plain, "wide"))
    bases = {"a": None, "b": "a name for clients", "c": "m"}
    found = [adapters.change(LoadAdapter(name, plain, base)) for name, base in bases.items()]
    assert [each.base_model for each in found] == list(bases.values())
    assert [each.model for each in found] == [0, 0, model.identity]
    for change in (UnloadModel("m"), LoadModel("m", wide, IfLoaded.REPLACE)):
        with pytest.raises(AdapterError, match="The LoRA adapter 'c' changes this model: unload the adapter first"):
            adapters.change(change)
    adapters.change(UnloadAdapter("c"))
    adapters.change(UnloadModel("m"))
    adapters.close()


class Waiting:
    """An engine whose requests have the adapters in `used`."""

    def __init__(self) -> None:
        self.used: set[int] = set()

    def add_request(self, request, on_output) -> None:
        raise AssertionError("no request is to reach it")

    def in_use(self, kind) -> set[int]:
        return self.used


# --- a folder of adapters ---


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("lora")
    write_adapter(place / "within", "within")
    write_adapter(place / "many", "of many", delay_s=0.3)
    write_adapter(place / "broken", None, delay_s=0.3)
    write_adapter(place / "test-model", "not the base")
    (place / "inner").symlink_to("within")
    outside = write_adapter(tmp_path_factory.mktemp("outside") / "secret", "secret")
    (place / "outer").symlink_to(outside)
    (place / "loop").symlink_to("loop")
    (place / "file").write_text("no folder")
    return place


@pytest.fixture(scope="module")
def lazy(lora_folder, tmp_path_factory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("lazy")
    with running_server(folder, ECHO, config(), lora_folder=lora_folder, admin_api_keys=("boss",)) as running:
        yield running


def together(server: RunningServer, count: int, ask: Callable[[httpx.Client], str]) -> set[str]:
    limits = httpx.Limits(max_connections=None)
    with server.http(limits=limits) as client, ThreadPoolExecutor(count) as threads:
        return set(threads.map(lambda _: ask(client), range(count)))


def test_a_name_in_the_folder_is_loaded_once_for_all_who_ask(lazy, lora_folder):
    assert together(lazy, 40, lambda client: says(client, "many")) == {"of many"}
    assert num_reads(lora_folder / "many") == 1
    with lazy.http() as client:
        assert says(client, "inner") == says(client, "within") == "within"
        assert says(client, "test-model") == "base"
        assert {"many", "inner", "within"} <= {model["id"] for model in client.get("/v1/models").json()["data"]}


def test_a_broken_folder_is_read_once_and_told_to_all(lazy, lora_folder):
    (message,) = together(lazy, 40, lambda client: says(client, "broken", 400))
    assert message.startswith("The LoRA adapter cannot be used: broken holds no adapter_config.json")
    with lazy.http() as client:
        assert says(client, "broken", 400) == message
    assert num_reads(lora_folder / "broken") == 1


@pytest.mark.parametrize(
    "name",
    ["..", ".", "../lora", "within/", "/within", "./within", "a\x00b", "within\n", "n" * 10_000, "n" * 256, "é" * 200,
     "outer", "loop", "file", "missing", "\ud800"],
)  # fmt: skip
def test_a_name_leads_to_nothing_outside_the_folder(lazy, name):
    with lazy.http() as client:
        answer = client.post(CHAT, content=json.dumps(HELLO | {"model": name}))
    assert answer.status_code == (400 if name == "\ud800" else 404)
    assert answer.json()["error"]["param"] in ("model", None)


def test_an_unloaded_name_of_the_folder_is_loaded_again(lazy, lora_folder):
    with lazy.http(headers=ADMIN) as client:
        assert says(client, "within") == "within"
        assert client.post(UNLOAD, json={"lora_name": "within"}).status_code == 200
        write_adapter(lora_folder / "within", "changed")
        assert says(client, "within") == "changed"
        write_adapter(lora_folder / "within", "within")


def test_a_batch_line_names_an_adapter(lora_folder, tmp_path):
    batches = tmp_path / "batches"
    with running_server(tmp_path, ECHO, config(), lora_folder=lora_folder, batch_folder=batches) as server:
        client = server.client()
        lines = [
            json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": HELLO | {"model": name}})
            for name in ("many", "test-model", "missing")
        ]
        file = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        done = client.batches.retrieve(batch.id)
        good, bad = (client.files.content(id).text for id in (done.output_file_id, done.error_file_id))
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, good.splitlines())}
    said = {name: (body["model"], body["choices"][0]["message"]["content"]) for name, body in answers.items()}
    assert said == {"many": ("many", "of many"), "test-model": ("test-model", "base")}
    assert "`missing` does not exist" in bad


# --- several engines and HTTP processes ---


def test_all_engines_load_an_adapter_or_none_does(folder, tmp_path):
    write_adapter(folder / "shared", "one")
    write_adapter(folder / "refused", "no")
    engines = [EchoConfig(reply=BASE, adapters=FakeStore(refused=name)) for name in ("", "refused")]
    with administrator(tmp_path, *engines) as client:
        assert load(client, "x", folder / "shared").status_code == 200
        refused = load(client, "y", folder / "refused")
        assert refused.status_code == 400
        assert refused.json()["error"]["message"].startswith("engine 1: ")
        says(client, "y", 404)
        refused = load(client, "x", folder / "refused", load_inplace=True)
        assert refused.status_code == 400
        answers = {says(client, "x", messages=[{"role": "user", "content": f"{n} alone"}]) for n in range(12)}
        assert answers == {"one"}
        assert client.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
        says(client, "x", 404)
        missing = load(client, "z", "/no/such/folder")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "lora_path: '/no/such/folder' is no folder"


def test_engines_that_find_other_weights_refuse(folder, tmp_path):
    write_adapter(folder / "differs", "one")
    engines = [EchoConfig(reply=BASE, adapters=FakeStore(changes=text)) for text in ("", "!")]
    with administrator(tmp_path, *engines) as client:
        answer = load(client, "x", folder / "differs")
        assert (answer.status_code, "other weights" in answer.text) == (400, True)
        says(client, "x", 404)


def test_all_http_processes_know_a_change_when_it_is_answered(lora_folder, folder, tmp_path):
    write_adapter(folder / "known", "known")
    options = {"api_server_count": 2, "admin_api_keys": ("boss",), "lora_folder": lora_folder}
    with running_server(tmp_path, ECHO, config(), more_engines=(config(),), **options) as server:
        with through_each(server, num_engines=2, headers=ADMIN) as (one, other):
            for _ in range(5):
                assert load(one, "x", folder / "known").status_code == 200
                assert says(other, "x") == says(one, "x") == "known"
                assert [model["id"] for model in other.get("/v1/models").json()["data"]][2:] == ["x"]
                assert other.post(UNLOAD, json={"lora_name": "x"}).status_code == 200
                says(one, "x", 404)
            assert says(one, "many") == says(other, "many") == "of many"
            assert load(other, "y", folder / "broken").status_code == 400
        reads = num_reads(lora_folder / "many")
        killed = server.engine_processes()[2]
        killed.kill()
        assert killed.wait(30) != 0
        wait_until(lambda: len(server.engine_processes()) == 4)
        with through_each(server, num_engines=2, headers=ADMIN) as (old, new):
            assert says(old, "many") == says(new, "many") == "of many"  # a new process knows what is loaded
        assert num_reads(lora_folder / "many") == reads
