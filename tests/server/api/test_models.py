"""Several models behind one engine: each request has the tokenizer, templates, defaults and context of its own."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, processors

from batcher.stats import EngineStats, ModelState
from server.api import served_model
from server.api.state import ServerState
from server.app import create_state
from server.engine import wire
from server.settings import GenerationDefaults, GenerationRules, Settings
from server.text.tokenizer import ByteLevelTokenizer
from tests.server.support.requests import CHAT, HELLO
from tests.server.support.stub_app import COMPLETIONS, DONE, StubClient, call, post_all
from tests.server.support.tokenizers import BOS, byte_tokenizer, write_folder
from tests.server.support.tokenizers import VOCAB_SIZE as BASE_SIZE

ADMIN = {"headers": {"Authorization": "Bearer boss"}}
OWN_TEMPLATE = "{{ bos_token }}{% for message in messages %}Arr: {{ message['content'] }}{% endfor %}"
VOCAB_SIZE = BASE_SIZE + 2  # with merges
LOAD, UNLOAD = "/v1/models/load", "/v1/models/unload"
LORAS = (("of pirate", "pirate", 7), ("of base", None, 0))


class ManyModels(StubClient):
    """An engine that loads folders as models. Their weights are the text of the file `weights`."""

    def __init__(self, *outputs: wire.Output) -> None:
        super().__init__(*outputs)
        self.info = wire.EngineInfo(max_model_len=64, vocab_size=VOCAB_SIZE, max_models=2, max_loras=2)
        self.stats = EngineStats(models={0: ModelState.RUNNING})
        self.asked: list[Any] = []

    async def ask(self, question: Any) -> wire.Reply:
        self.asked.append(question)
        match question:
            case wire.LoadModel(name=name, path=path) if (Path(path) / "weights").exists():
                identity = int((Path(path) / "weights").read_text())
                own = Path(path) / "tokenizer.json"
                folder = path if own.exists() else ""
                loaded = wire.LoadedModel(name, identity, path, 32, VOCAB_SIZE, folder=folder, load=len(self.asked))
                self.models = {**self.models, name: loaded}
                self.stats.models[identity] = ModelState.DISK
                return wire.Reply(loaded=loaded)
            case wire.LoadModel(path=path):
                return wire.Reply(error=f"{path} has no weights", status=400)
            case wire.UnloadModel(name=name) if name in self.models:
                self.models = {other: model for other, model in self.models.items() if other != name}
                return wire.Reply()
        return wire.Reply(error="there is no such model", status=404)


def write_model(folder: Path, weights: int, *, merges: tuple[tuple[str, str], ...] = (), **defaults: Any) -> Path:
    write_folder(folder, template=OWN_TEMPLATE)
    tokenizer = byte_tokenizer(merges)
    special = [("<|begin_of_text|>", BOS + len(merges))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin_of_text|> $A", special_tokens=special)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    (folder / "weights").write_text(str(weights))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("models")
    write_folder(place / "base")
    write_model(place / "pirate", 7, merges=(("h", "e"), ("l", "l")), temperature=0.25, max_new_tokens=5)
    write_model(place / "twin", 9, merges=(("h", "e"), ("l", "l")), temperature=0.5)
    write_model(place / "untalkative", 11)
    (place / "untalkative" / "tokenizer_config.json").write_text('{"chat_template": "{% if"}')
    (place / "empty").mkdir()
    (place / "merged").mkdir()
    (place / "merged" / "weights").write_text("13")
    return place


def state_of(folder: Path, client: StubClient | None = None, **settings: Any) -> ServerState:
    fields = {"models_folder": folder, "admin_api_keys": ("boss",), "vocab_size": VOCAB_SIZE, **settings}
    asked = Settings(tokenizer_folder=folder / "base", model_names=("base", "alias"), **fields)
    tokenizer = ByteLevelTokenizer.from_folder(asked.tokenizer_folder, vocab_size=VOCAB_SIZE)
    return create_state(asked, client or ManyModels(DONE), tokenizer)


def test_a_chat_has_the_tokenizer_template_and_defaults_of_its_model(folder):
    state = state_of(folder)
    bodies = [HELLO | {"model": name} for name in ("base", "pirate", "twin", "merged", "alias")]
    answers = post_all(state, CHAT, bodies)
    assert [answer.json()["model"] for answer in answers] == ["base", "pirate", "twin", "merged", "alias"]
    base, pirate, twin, merged, alias = state.engine.submitted
    assert [sent.model for sent in (base, pirate, twin, merged, alias)] == [0, 7, 9, 13, 0]
    oracle = Tokenizer.from_file(str(folder / "pirate" / "tokenizer.json"))
    text = "<|begin_of_text|>Arr: " + HELLO["messages"][0]["content"]
    assert wire.unpacked(pirate.prompt).tolist() == oracle.encode(text, add_special_tokens=False).ids
    assert pirate.prompt == twin.prompt != base.prompt == merged.prompt == alias.prompt
    assert [sent.sampling.temperature for sent in (base, pirate, twin, merged)] == [1.0, 0.25, 0.5, 1.0]
    length = len(wire.unpacked(pirate.prompt))
    assert (pirate.sampling.max_tokens, twin.sampling.max_tokens) == (5, 32 - length)
    assert base.sampling.max_tokens == 64 - len(wire.unpacked(base.prompt))


def test_an_adapter_of_a_model_has_its_tokenizer_template_limits_and_state(folder):
    state = state_of(folder)
    assert call(state, "POST", LOAD, json={"model": "pirate"}, **ADMIN).status_code == 200
    state.engine.adapters = {name: wire.Adapter(name, 3, "/a", base, of) for name, base, of in LORAS}
    post_all(state, CHAT, [HELLO | {"model": name} for name in ("pirate", "of pirate", "of base")])
    pirate, of_pirate, of_base = state.engine.submitted
    assert [(sent.model, sent.adapter) for sent in (pirate, of_pirate, of_base)] == [(7, 0), (7, 3), (0, 3)]
    assert of_pirate.prompt == pirate.prompt != of_base.prompt
    assert of_pirate.sampling.max_tokens == 5
    models = {model["id"]: model for model in call(state, "GET", "/v1/models").json()["data"]}
    shown = [(models[name]["parent"], models[name]["state"], models[name]["max_model_len"]) for name, *_ in LORAS]
    assert shown == [("pirate", "disk", 32), ("base", "running", 64)]


def test_the_models_of_a_start_with_limits_have_them_too(folder):
    rules = GenerationRules(replacement=GenerationDefaults(), changes='{"top_k": 3}', most_tokens=4)
    state = state_of(folder, generation_rules=rules)
    post_all(state, CHAT, [HELLO | {"model": "pirate"}])
    (sent,) = state.engine.submitted
    assert (sent.sampling.temperature, sent.sampling.top_k, sent.sampling.max_tokens) == (1.0, 3, 4)


@pytest.mark.parametrize(
    ("path", "body", "count"),
    [
        (COMPLETIONS, {"prompt": "hello"}, 4),
        (CHAT, {"messages": HELLO["messages"]}, None),
        ("/v1/chat/completions/batch", {"messages": [HELLO["messages"]]}, None),
        ("/v1/messages", {"messages": HELLO["messages"], "max_tokens": 2}, None),
        ("/v1/responses", {"input": "hello"}, None),
        ("/invocations", {"prompt": "hello"}, 4),
        ("/inference/v1/generate", {"token_ids": [104, 256, 257]}, 3),
    ],
)
def test_every_route_asks_for_the_model_that_is_named(folder, path, body, count):
    state = state_of(folder)
    answers = post_all(state, path, [body | {"model": name} for name in ("pirate", "base", "missing", "../base")])
    assert [answer.status_code for answer in answers] == [200, 200, 404, 404], answers[0].text
    assert [sent.model for sent in state.engine.submitted] == [7, 0]
    if count is not None:  # begin-of-text, he, ll, o
        assert len(wire.unpacked(state.engine.submitted[0].prompt)) == count


def test_tokens_are_counted_and_read_as_the_named_model_does(folder):
    state = state_of(folder)
    asked = {
        "/tokenize": {"prompt": "hello", "add_special_tokens": False, "return_token_strs": True},
        "/detokenize": {"tokens": [256, 257]},
        "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "hello"}]},
        "/v1/responses/input_tokens": {"input": "hello"},
    }
    own, base = (
        {path: call(state, "POST", path, json=body | {"model": name}).json() for path, body in asked.items()}
        for name in ("pirate", "base")
    )
    assert own["/tokenize"]["token_strs"] == ["he", "ll", "o"]
    assert (own["/tokenize"]["max_model_len"], base["/tokenize"]["max_model_len"]) == (32, 64)
    assert (own["/detokenize"]["prompt"], base["/detokenize"]["prompt"]) == ("hell", "<|begin_of_text|><|end_of_text|>")
    counts = [each["/v1/messages/count_tokens"]["input_tokens"] for each in (own, base)]
    assert counts == [len("Arr: ") + 4, len("hello") + len("user\n\nassistant\n\n") + 6]
    assert [each["/v1/responses/input_tokens"]["input_tokens"] for each in (own, base)] == counts


def test_a_prompt_must_fit_the_context_of_its_model(folder):
    bodies = [{"prompt": [65] * 40, "max_tokens": 1, "model": name} for name in ("base", "pirate")]
    fits, refused = post_all(state_of(folder), COMPLETIONS, bodies)
    assert (fits.status_code, refused.status_code) == (200, 400)
    assert "maximum context length is 32 tokens" in refused.json()["error"]["message"]


def test_the_list_of_models_has_those_that_are_loaded_with_their_state(folder):
    state = state_of(folder)
    assert call(state, "POST", LOAD, json={"model": "pirate"}, **ADMIN).json() == {"success": True}
    models = {model["id"]: model for model in call(state, "GET", "/v1/models", **ADMIN).json()["data"]}
    shown = {name: (model["state"], model["max_model_len"], model["parent"]) for name, model in models.items()}
    running = ("running", 64, None)
    assert shown == {"base": running, "alias": running, "pirate": ("disk", 32, None)}
    assert models["pirate"]["root"] == str(folder / "pirate")
    assert call(state, "GET", "/v1/models/pirate").json()["root"] == "pirate"
    figures = state.metrics.render().decode()
    for place, count in (("disk", 1), ("running", 1), ("host", 0)):
        assert f'pallas_serve:models{{engine="0",model_name="base",state="{place}"}} {count}.0' in figures
    assert "models_brought_total" in figures
    page = call(state, "GET", "/ui/state").json()
    assert page["models"] == {"base": "running", "pirate": "disk"}
    state.engine.stats = EngineStats()  # an HTTP process begins before it hears from the engine
    models = {model["id"]: model["state"] for model in call(state, "GET", "/v1/models").json()["data"]}
    assert models == {"base": "resident", "alias": "resident", "pirate": "disk"}
    alone = state_of(folder, StubClient(DONE))
    assert "models_brought_total" not in alone.metrics.render().decode()
    assert all("state" not in model for model in call(alone, "GET", "/v1/models").json()["data"])


def test_a_model_is_loaded_and_unloaded_by_its_administrator(folder):
    state = state_of(folder, models_folder=None)

    def post(route: str, **body: Any) -> tuple[int, Any]:
        answer = call(state, "POST", route, json=body, **ADMIN)
        return answer.status_code, answer.json() if answer.status_code == 200 else answer.json()["error"]["message"]

    state.engine.adapters = {"lora": wire.Adapter("lora", 3, "/lora")}
    done = (200, {"success": True})
    assert call(state, "POST", LOAD, json={"model": "x"}).status_code == 401
    assert post(LOAD, model="mine", path=str(folder / "pirate")) == done
    assert post(CHAT, **HELLO | {"model": "mine"})[0] == 200
    assert post("/models/unload", model="mine") == done
    assert post(CHAT, **HELLO | {"model": "mine"}) == (404, "The model `mine` does not exist.")
    assert post(UNLOAD, model="mine")[0] == 404
    assert post(LOAD, model="mine")[0] == 404  # there is no folder of models
    assert post(LOAD, model="mine", path=str(folder / "empty")) == (400, f"{folder}/empty has no weights")
    assert post(LOAD, model="alias", path="/") == (400, "model: 'alias' is the name of the model")
    assert post(LOAD, model="lora", path="/") == (400, "model: 'lora' is the name of an adapter")
    assert post(UNLOAD, model="base") == (400, "model: 'base' is the model of the start, which stays")
    assert post("/models/load", model="mine", path=str(folder / "twin")) == done
    words = "lora_name: 'mine' is the name of a model"
    assert post("/v1/load_lora_adapter", lora_name="mine", lora_path="/") == (400, words)
    assert post(LOAD, model="mine", load_inplace=True) == done
    assert state.engine.asked[-1] == wire.LoadModel("mine", str(folder / "twin"), wire.IfLoaded.REPLACE)
    alone = state_of(folder, StubClient(DONE))
    answer = call(alone, "POST", LOAD, json={"model": "pirate"}, **ADMIN)
    assert (answer.status_code, "--models-folder" in answer.text) == (404, True)


def test_a_model_whose_template_is_broken_is_refused_and_unloaded(folder):
    state = state_of(folder, models_folder=None)
    answer = call(state, "POST", LOAD, json={"model": "x", "path": str(folder / "untalkative")}, **ADMIN)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model")
    assert "The model x cannot be used" in answer.json()["error"]["message"]
    assert not state.engine.models
    post = partial(call, state, "POST", LOAD, **ADMIN)
    assert post(json={"model": "x", "path": str(folder / "pirate")}).status_code == 200
    again = {"model": "x", "path": str(folder / "untalkative"), "load_inplace": True}
    assert post(json=again).status_code == 400
    assert state.engine.models["x"].path == str(folder / "pirate")


def test_a_broken_model_in_the_folder_is_told_to_those_who_name_it(folder):
    state = state_of(folder)
    broken, empty, other = post_all(state, CHAT, [HELLO | {"model": n} for n in ("untalkative", "empty", "pirate")])
    assert (broken.status_code, empty.status_code, other.status_code) == (400, 400, 200)
    assert empty.json()["error"]["message"] == "The model cannot be used: empty has no weights"
    assert str(folder) not in broken.text


def test_a_client_that_names_a_thousand_models_leaves_nothing_behind(folder):
    state = state_of(folder)
    answers = post_all(state, CHAT, [HELLO | {"model": f"model-{number}"} for number in range(1000)])
    assert {answer.status_code for answer in answers} == {404}
    (folder_of_models,) = state.folders
    assert not (folder_of_models._loading or folder_of_models._refused or state.models._read or state.engine.asked)
    assert list(state.metrics.counts().model_requests) == []


def test_models_with_the_same_tokenizer_share_its_vocabulary(folder):
    state = state_of(folder)
    post_all(state, CHAT, [HELLO | {"model": name} for name in ("pirate", "twin", "pirate")])
    first, second = (reading.result() for reading in state.models._read.values())
    assert (first.name, second.name) == ("twin", "pirate")
    assert first.tokenizer._backend is second.tokenizer._backend is not state.model.tokenizer._backend
    assert first.chat_template is not second.chat_template


def test_the_files_of_few_models_are_kept(folder, monkeypatch):
    monkeypatch.setattr(served_model, "MOST_KEPT", 1)
    state = state_of(folder)
    answers = post_all(state, CHAT, [HELLO | {"model": name} for name in ("pirate", "twin", "pirate", "merged")])
    assert [sent.model for sent in state.engine.submitted] == [7, 9, 7, 13], answers
    assert [loaded.name for loaded in state.models._read] == ["pirate"]


def test_a_model_that_is_loaded_again_is_read_again(folder, tmp_path):
    state, place = state_of(folder, models_folder=None), write_model(tmp_path / "changing", 21)
    ask = {"model": "m", "path": str(place), "load_inplace": True}
    assert call(state, "POST", LOAD, json=ask, **ADMIN).status_code == 200
    post_all(state, CHAT, [HELLO | {"model": "m"}])
    write_model(place, 23, merges=(("h", "e"),))
    assert call(state, "POST", LOAD, json=ask, **ADMIN).status_code == 200
    post_all(state, CHAT, [HELLO | {"model": "m"}])
    before, after = state.engine.submitted
    assert (before.model, after.model) == (21, 23)
    assert len(wire.unpacked(after.prompt)) < len(wire.unpacked(before.prompt))
    assert [loaded.identity for loaded in state.models._read] == [23]
    write_folder(place, template="{{ messages[0]['content'] }}")  # the weights stay
    assert call(state, "POST", LOAD, json=ask, **ADMIN).status_code == 200
    post_all(state, CHAT, [HELLO | {"model": "m"}])
    assert len(wire.unpacked(state.engine.submitted[-1].prompt)) == len(HELLO["messages"][0]["content"])


def test_ids_length_and_dimensions_are_those_of_the_model_of_the_request(folder):
    state = state_of(folder)
    state.engine.info = msgspec.structs.replace(state.engine.info, embedding_size=4)
    state.engine.models = {"small": wire.LoadedModel("small", 5, "/m", 96, 50, embedding_size=2)}

    def statuses(path: str, **body: Any) -> list[int]:
        return [
            answer.status_code for answer in post_all(state, path, [body | {"model": n} for n in ("base", "small")])
        ]

    assert statuses(COMPLETIONS, prompt=[60]) == [200, 400]
    assert statuses("/inference/v1/generate", token_ids=[60], sampling_params={"max_tokens": 1}) == [200, 400]
    assert statuses(COMPLETIONS, prompt=[1] * 80, max_tokens=8) == [400, 200]
    vectors = call(state, "POST", "/v1/embeddings", json={"model": "small", "input": [1], "dimensions": 4})
    assert vectors.status_code == 400 and "vectors have 2 numbers" in vectors.text


def test_requests_and_tokens_are_counted_by_model(folder):
    state = state_of(folder, StubClient(wire.Output("", [ord("a")] * 2, "length")))
    state.engine.models = {f"m{n}": wire.LoadedModel(f"m{n}", n + 1, "/m", 32, VOCAB_SIZE) for n in range(120)}
    post_all(state, COMPLETIONS, [{"prompt": [65, 66, 67], "model": f"m{n}"} for n in range(120)])
    counts = state.metrics.counts()
    assert len(counts.model_requests) == 101
    assert (counts.model_requests["others"], counts.model_requests["m0"]) == (20, 1)
    assert (counts.model_prompt_tokens["m0"], counts.model_generation_tokens["others"]) == (3, 40)
    assert 'model_requests_total{engine="0",model="m0",model_name="base"} 1.0' in state.metrics.render().decode()
