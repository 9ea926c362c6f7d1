"""Several models in one LLM on the CPU: each answers as it does alone, whatever the others do."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from batcher.request import SamplingParams
from batcher.stats import ModelState
from model.loading.adapter import read_adapter
from scripts.building import device, models
from scripts.building.stand_in_tokenizer import write_stand_in_tokenizer
from scripts.lab.demo.export import save_hf
from scripts.llm import LLM, LoRARequest, RefusedError
from server.engine import wire
from tests.conftest import COMPILED
from tests.demo.test_adapters import FOLDERS, shown
from tests.demo.test_adapters import LIMITS as DEMO_LIMITS
from tests.model import adapters
from tests.scripts.test_llm_training import CONFIG, is_greedy, model_of

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 16, "num_pages": 7}
LIMITS["compile_all_first"] = True  # another thread's programs would count as compiled after the warm-up
NAMES = ("", "one", "two", "adapted")  # "": the LLM's own model
PROMPTS = [list(range(40, 40 + length)) for length in (6, 20, 35, 50, 20, 35)]  # chunks, and prefixes of each other
DRAFT = "a draft model"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "8-bit pages": {"kv_cache_dtype": "int8"},
    "host memory": {"models_host_memory": 1.0},
    "two chips": {"tensor_parallel_size": 2, "models_host_memory": 1.0},
    "offloaded pages": {"kv_offloading_size": 0.01},
    "int8 weights": {"quantization": "int8", "models_host_memory": 1.0},
    DRAFT: {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2}},
}
CHANGING_TEXTS = ("8-bit pages", "int8 weights")


class Collected:
    """The tokens of a request, as the engine sends them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.last: Future[wire.Output] = Future()

    def on_output(self, output: wire.Output) -> None:
        self.tokens += output.token_ids
        if output.finish_reason is not None:
            self.last.set_result(output)

    def on_tokens(self, token_ids: Sequence[int]) -> None:
        self.tokens += token_ids

    def on_weight_version(self, version: str) -> None:
        pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Folders by name; `projections` is an adapter of them only. `merged` is `adapted` with the adapter in its tensors.
    That adapter has an embedding of its own, and changes the head."""
    place = tmp_path_factory.mktemp("models")
    found = {name: place / (name or "own") for name in ("", "one", "two", "merged")}
    for seed, folder in enumerate(found.values()):
        save_hf(model_of(seed), folder, dtype=jnp.float32)
        write_stand_in_tokenizer(folder, CONFIG.vocab_size)
    found["projections"] = plain = adapters.random_for(place / "plain", CONFIG, seed=5)
    tensors = adapters.merged(load_file(found[""] / "model.safetensors"), read_adapter(plain, CONFIG, max_rank=8))
    raw, stored = adapters.read(plain)
    embedding, a, b = tensors["lm_head.weight"][:, ::-1], np.ones((4, 64), np.float32), np.ones((544, 4), np.float32)
    b[7::9] = -1
    more = {"model.embed_tokens.weight": embedding, "lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b}
    raw |= {"target_modules": [*raw["target_modules"], "lm_head"], "modules_to_save": ["embed_tokens"], "lora_alpha": 1}
    raw["base_model_name_or_path"] = str(found[""])
    stored |= {f"{adapters.PREFIX}{name}": value for name, value in more.items()}
    stored |= {name: value * 4 for name, value in stored.items() if name.endswith("proj.lora_B.weight")}
    found["adapted"] = adapters.write(place / "adapter", raw, stored)
    tensors["model.embed_tokens.weight"] = np.ascontiguousarray(embedding)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + b @ a / 4
    save_file(tensors, found["merged"] / "model.safetensors")
    return found


@contextmanager
def an_llm(folders: dict[str, Path], models: Sequence[str] = (), own: str = "", **settings: Any) -> Iterator[LLM]:
    if models:
        settings = {"models": {name: str(folders[name]) for name in models}, "max_resident_models": 2} | settings
    with LLM(str(folders[own]), device="cpu", compile_cache=str(COMPILED), **LIMITS | settings) as llm:
        yield llm
        stats = llm.stats()
        assert (stats.num_compiles_after_warm_up, stats.integrity_failures, stats.num_pages_used) == (0, 0, 0)


def send(
    llm: LLM, name: str, prompt: Sequence[int], num_tokens: int = 10, number: int = 0, adapter: int = 0
) -> Collected:
    collected = Collected()
    request = wire.WireRequest(
        request_id=f"{name} {number} {adapter}",
        prompt=wire.packed(prompt),
        sampling=SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True),
        model=llm._client.models[name].identity if name else 0,
        adapter=adapter,
    )

    async def submit() -> None:
        llm._client.submit([(request, collected)])

    llm._thread.run(submit())
    return collected


def ask(llm: LLM, change: wire.NamedChange) -> wire.Reply:
    return llm._thread.run(llm._client.ask(change))


def texts(llm: LLM, names: Sequence[str]) -> dict[str, list[list[int]]]:
    """The tokens of each prompt with each model. All run at once."""
    sent = {
        (name, number): send(llm, name, prompt, number=number)
        for number, prompt in enumerate(PROMPTS)
        for name in names
    }
    found: dict[str, list[list[int]]] = {name: [] for name in names}
    for (name, _), collected in sent.items():
        assert collected.last.result(60).finish_reason == "length", collected.last.result()
        found[name].append(collected.tokens)
    return found


@pytest.fixture(autouse=True)
def has_eight_devices(monkeypatch):
    """A start would set their number, which this process cannot change any more."""
    monkeypatch.setattr(device, "start_jax", lambda *_, **__: "cpu")


# --- in one engine and alone ---


@pytest.fixture(scope="module")
def alone_with(folders) -> Callable[[str], dict[str, list[list[int]]]]:
    """The texts of each model in an engine of its own, by the kind of engine."""

    @cache
    def texts_alone(kind: str) -> dict[str, list[list[int]]]:
        found, settings = {}, KINDS[kind] | {"models_host_memory": None}
        for name in NAMES:
            with an_llm(folders, own="merged" if name == "adapted" else name, **settings) as llm:
                found[name] = texts(llm, ("",))[""]
        assert len({str(each) for each in found.values()}) == len(NAMES)
        return found

    return texts_alone


@pytest.mark.parametrize(
    "kind", ["plain", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "plain")]
)
def test_every_text_is_that_of_its_model_alone(folders, alone_with, kind: str) -> None:
    alone, asked = alone_with(kind if kind in CHANGING_TEXTS else "plain"), KINDS[kind]
    if kind == DRAFT:
        asked = {"speculative_config": asked["speculative_config"] | {"model": str(folders["two"])}}
    with an_llm(folders, NAMES[1:], **asked) as llm:
        assert texts(llm, NAMES) == alone
        stats = llm.stats()
        assert stats.num_models_brought >= len(NAMES) - 1
        assert sorted(stats.models.values())[-2:] == [ModelState.RESIDENT] * 2
        off = ModelState.HOST if "models_host_memory" in asked else ModelState.DISK
        assert sorted(stats.models.values())[:2] == [off] * 2
        assert texts(llm, NAMES[::-1]) == alone  # from the prefix cache
    if kind == "plain":
        with an_llm(folders, own="adapted") as llm:  # its config names its model
            assert texts(llm, ("",))[""] == alone["adapted"]
        for seed, name in enumerate(NAMES[:3]):
            assert all(is_greedy(model_of(seed), *pair) for pair in zip(PROMPTS, alone[name], strict=True))


def test_models_have_their_own_end_tokens_and_names(folders, tmp_path) -> None:
    place = shutil.copytree(folders["one"], tmp_path / "ends")
    with an_llm(folders, ("one",), models_host_memory=1) as llm:
        tokens = texts(llm, ("one",))["one"][0]
        (place / "generation_config.json").write_text(f'{{"eos_token_id": {tokens[3]}}}')
        assert ask(llm, wire.LoadModel("ends", str(place))).error is None
        model = llm._client.models["ends"]
        assert (model.path, model.folder, model.max_model_len) == (str(place), str(place), 64)
        request = send(llm, "ends", PROMPTS[0])
        assert request.last.result(60).finish_reason == "length"  # ignore_eos
        collected = Collected()
        asked = SamplingParams(max_tokens=10, temperature=0.0)
        wanted = wire.WireRequest("ends", wire.packed(PROMPTS[0]), asked, model=model.identity)
        llm.on_loop(_submit(llm, wanted, collected)).result()
        assert collected.last.result(60).finish_reason == "stop"
        assert collected.tokens == tokens[: tokens.index(tokens[3]) + 1]
        # Two names of one folder share their weights.
        assert ask(llm, wire.LoadModel("again", str(place))).loaded.identity == model.identity
        assert "already" in ask(llm, wire.LoadModel("again", str(place))).error
        assert ask(llm, wire.UnloadModel("again")).error is None
        assert send(llm, "ends", PROMPTS[1]).last.result(60).error is None
        assert ask(llm, wire.UnloadModel("ends")).error is None
        assert ask(llm, wire.UnloadModel("ends")).status == 404
        refused = Collected()
        llm.on_loop(_submit(llm, wanted, refused)).result()
        assert (refused.last.result(60).status, refused.last.result().param) == (404, "model")
        assert set(llm._client.models) == {"one"}


async def _submit(llm: LLM, request: wire.WireRequest, collected: Collected) -> None:
    llm._client.submit([(request, collected)])


# --- the copies in the host's memory ---


class TwoArrays(nnx.Module):
    def __init__(self) -> None:
        self.embedding = nnx.Param(jnp.zeros((128_256, 512), jnp.float32))
        self.norm = nnx.Param(jnp.zeros((1 << 25, 1), jnp.bfloat16))


@pytest.mark.parametrize(("gib", "has_room"), [(0.4, True), (0.3, False), (0, False)])
def test_the_bound_of_a_copy_is_the_bytes_of_the_model_over_a_measured_speed(
    gib: float, has_room: bool, monkeypatch
) -> None:
    monkeypatch.setattr(models, "time", SimpleNamespace(perf_counter=iter((10.0, 10.5)).__next__))
    embedding = 128_256 * 512 * 4 / 2**30  # GiB, in half a second
    size = embedding + (1 << 25) * 2 / 2**30
    said = models.RunnersModels(SimpleNamespace(settings=SimpleNamespace(models_host_memory=gib))).describe_copy(
        TwoArrays()
    )
    told = f"{size / embedding / 2:.2f} s: {size:.2f} GiB at {embedding * 2:.3g} GiB/s, which a copy has reached"
    assert said == (told if has_room else None)


# --- what cannot be used ---


@pytest.mark.parametrize(
    ("spoil", "message", "status"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no tensors"), "model.safetensors", 400),
        (lambda folder: (folder / "model.safetensors").unlink(), "no safetensors files in", 400),
        (shutil.rmtree, "there is no folder or file", 404),
    ],
)
def test_a_folder_that_cannot_be_used_is_refused(folders, tmp_path, spoil: Callable, message: str, status: int) -> None:
    place = shutil.copytree(folders["one"], tmp_path / "spoilt")
    spoil(place)
    with an_llm(folders, ("two",)) as llm:
        reply = ask(llm, wire.LoadModel("spoilt", str(place)))
        assert reply.status == status and message in reply.error
        assert texts(llm, ("two",))["two"]


@pytest.mark.parametrize("fault", ["removed", "replaced", "broken"])
def test_a_file_that_changes_ends_the_requests_of_its_model_only(folders, tmp_path, fault: str) -> None:
    place = shutil.copytree(folders["one"], tmp_path / "changing")
    file = place / "model.safetensors"
    with an_llm(folders | {"changing": place}, ("changing", "two")) as llm:
        before = texts(llm, ("", "two"))
        if fault == "removed":
            file.unlink()
        elif fault == "replaced":
            shutil.copyfile(folders["two"] / "model.safetensors", tmp_path / "new")
            (tmp_path / "new").replace(file)
        else:
            file.write_bytes(file.read_bytes()[:5000])
        broken = send(llm, "changing", PROMPTS[0])
        assert texts(llm, ("", "two")) == before
        last = broken.last.result(60)
        assert last.status == 503 and "the weights of this request's model cannot be read" in last.error
        if fault == "replaced":
            assert "has changed since it was loaded" in last.error
            assert ask(llm, wire.LoadModel("changing", str(place), wire.IfLoaded.REPLACE)).error is None
            assert texts(llm, ("changing",))["changing"] == before["two"]


def test_a_name_that_is_loaded_again_leaves_its_running_requests_their_weights(folders, tmp_path) -> None:
    place = shutil.copytree(folders["one"], tmp_path / "changing")
    with an_llm(folders | {"changing": place}, ("changing", "two"), max_resident_models=4) as llm:
        before = texts(llm, ("changing", "two"))
        running = send(llm, "changing", PROMPTS[0], num_tokens=50, number=9)
        assert "is loaded already" in ask(llm, wire.LoadModel("changing", str(place))).error
        shutil.copyfile(folders["two"] / "model.safetensors", tmp_path / "new")
        (tmp_path / "new").replace(place / "model.safetensors")
        assert ask(llm, wire.LoadModel("changing", str(place), wire.IfLoaded.REPLACE)).error is None
        assert texts(llm, ("changing",))["changing"] == before["two"]
        assert running.last.result(60).finish_reason == "length"
        assert running.tokens[:10] == before["changing"][0]


def test_one_model_refuses_others(folders) -> None:
    with an_llm(folders) as llm:
        assert "--models" in ask(llm, wire.LoadModel("one", str(folders["one"]))).error


# --- by names ---


def test_methods_take_the_name_of_a_model(folders) -> None:
    greedy = {"temperature": 0, "max_tokens": 10, "ignore_eos": True, "logprobs": 1}
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    with an_llm(folders, NAMES[1:]) as llm:
        told = texts(llm, NAMES)
        for name in NAMES:
            options = {"model": name} if name else {}
            for results in (llm.generate(prompts, greedy, **options), llm.enqueue(prompts, greedy, **options).wait()):
                assert [list(result.outputs[0].token_ids) for result in results] == told[name]
                assert len(results[0].outputs[0].logprobs) == 10
        with pytest.raises(RefusedError, match="does not exist"):
            llm.generate("text", greedy, model="unknown")
        with pytest.raises(ValueError, match="model, lora_request"):
            llm.generate("text", greedy, model="one", lora_request=LoRARequest("a", 1, str(folders["adapted"])))


@pytest.mark.slow
def test_the_demo_and_its_adapters_as_models_answer_as_the_readme_shows() -> None:
    lines = shown()
    models = {name: str(folder) for name, folder in FOLDERS.items()}
    with LLM(model="demo", compile_cache=str(COMPILED), models=models, **DEMO_LIMITS) as llm:
        asked = [
            llm.enqueue([llm_chat_ids(llm, question)], {"temperature": 0, "max_tokens": 64}, model=name)
            for question, name, _ in lines
        ]
        assert [pending.wait()[0].outputs[0].text for pending in asked] == [answer for _, _, answer in lines]


def llm_chat_ids(llm: LLM, question: str) -> dict[str, list[int]]:
    """The prompt of a question as ids."""
    messages = [{"role": "user", "content": question}]
    return {"prompt_token_ids": list(llm.chat([messages], {"max_tokens": 1})[0].prompt_token_ids)}


# --- changes of the LLM's own weights ---


def test_updates_and_sleep_leave_the_other_models_their_weights(folders) -> None:
    with an_llm(folders, NAMES[1:]) as llm:
        before = texts(llm, NAMES)
        running = send(llm, "one", PROMPTS[0], num_tokens=50)
        llm.update_weights(nnx.state(model_of(2)), names="own", requests="keep")
        assert running.last.result(60).finish_reason == "length"
        assert running.tokens[:10] == before["one"][0]
        assert texts(llm, NAMES) == before | {"": before["two"]}
        llm.sleep(level=1)
        assert set(llm.stats().models.values()) == {ModelState.DISK, ModelState.RESIDENT}
        waiting = send(llm, "two", PROMPTS[1])
        llm.wake_up()
        assert waiting.last.result(60).finish_reason == "length" and waiting.tokens == before["two"][1]
        llm.sleep(level=2)
        with pytest.raises(ValueError, match="dropped"):
            llm.wake_up()
        llm.update_weights(nnx.state(model_of(0)), names="own")
        llm.wake_up()
        assert texts(llm, NAMES) == before
        running = send(llm, "one", PROMPTS[0], num_tokens=50)
        llm._ask(wire.ChangeWeights(wire.WeightsChange.RELOAD, str(folders["two"])))
        assert running.last.result(60).finish_reason == "length" and running.tokens[:10] == before["one"][0]
        assert texts(llm, NAMES) == before | {"": before["two"]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "drafts", "two chips"])
def test_adapters_of_models_run_between_the_others(folders, tmp_path, kind: str) -> None:
    """Of the LLM's own model and of another one, both with the same weights."""
    place, path = shutil.copytree(folders["one"], tmp_path / "merged"), str(folders["projections"])
    weights, file = read_adapter(folders["projections"], CONFIG, max_rank=8), place / "model.safetensors"
    save_file(adapters.merged(load_file(file), weights), file)
    modules = [f"own={path}", {"name": "of one", "path": path, "base_model_name": "one"}]
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "lora_modules": modules} | KINDS[kind]
    with an_llm(folders | {"merged": place}, (*NAMES[1:], "projections", "merged"), **lora) as llm:
        identity = llm._client.adapters["own"].identity
        assert identity == llm._client.adapters["of one"].identity
        sent = [
            send(llm, name, prompt, number=number, adapter=identity)
            for number, prompt in enumerate(PROMPTS)
            for name in ("", "one")
        ]
        told = texts(llm, (*NAMES, "projections", "merged"))
        found = [each.last.result(60) and each.tokens for each in sent]
        assert [found[::2], found[1::2]] == [told["projections"], told["merged"]]
        assert len({str(told[name]) for name in ("", "one", "projections", "merged")}) == 4
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        options = {"lora_request": LoRARequest("of one", 1, path, "one")}
        greedy = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}
        assert [list(each.outputs[0].token_ids) for each in llm.generate(prompts, greedy, **options)] == found[1::2]
        assert "'of one' changes this model" in ask(llm, wire.UnloadModel("one")).error


@pytest.mark.slow
def test_hundreds_of_changes_leave_no_array_behind(folders) -> None:
    with an_llm(folders, ("one", "two")) as llm:
        texts(llm, ("one", "two"))
        gc.collect()  # of other tests, too: a count with their garbage would be too great
        held = len(jax.live_arrays())
        for number in range(400):
            assert send(llm, ("one", "two")[number % 2], PROMPTS[0], 2).last.result(60).error is None
        gc.collect()
        assert len(jax.live_arrays()) <= held + 20
        assert llm.stats().num_models_brought >= 400
