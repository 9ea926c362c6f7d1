from __future__ import annotations

import json
import math

import httpx
import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from model.config import LlamaConfig
from model.loading import hub as hub_client
from model.loading.source import DEMO_FOLDER, Kind, adapter_place, resolve, small_files
from model.network.sharding import abstract_model
from model.presets import PRESETS
from tests.model import checkpoints
from tests.model.test_config import LLAMA_3_2_1B

PARAMETERS = {  # as published with the models
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_number_of_parameters(name):
    found = resolve(f"preset:{name}")
    assert (found.kind, found.path) == (Kind.PRESET, None)
    assert found.eos_token_ids == (128001, 128008, 128009)
    model = abstract_model(found.config, dtype=jnp.bfloat16)
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model))) == PARAMETERS[name]


def test_the_1b_preset_is_the_published_config():
    assert PRESETS["llama-3.2-1b"] == LlamaConfig.from_hf(LLAMA_3_2_1B)


def test_a_folder_is_read_with_its_generation_config(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    generation = {"eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    found = resolve(str(folder))
    assert (found.kind, found.path, found.config.num_kv_heads) == (Kind.FOLDER, folder, 2)
    assert found.eos_token_ids == (5, 7)


def test_without_a_generation_config_the_model_config_says_the_end_ids(tmp_path):
    assert resolve(str(checkpoints.write(tmp_path, "gqa2"))).eos_token_ids == (2,)


@pytest.mark.parametrize("eos", [3, [3]])
def test_one_end_id_may_be_a_number(eos, tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    assert resolve(str(folder)).eos_token_ids == (3,)


def test_the_demo_has_a_tokenizer():
    assert small_files("demo") == DEMO_FOLDER


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("preset:llama-9", "unknown preset 'llama-9'; there are llama-3-8b"),
        ("no such thing", "no model 'no such thing': it can be 'demo', a folder"),
        ("~nobody_of_this_name/model", "model '~nobody_of_this_name/model': Could not determine home directory"),
        ("gs:/bucket/model", "model 'gs:/bucket/model': a URL is written as gs://bucket/folder"),
        ("https://huggingface.co/org/model", "a model of the Hugging Face hub is named org/model"),
    ],
)
def test_what_is_nothing_is_refused_with_what_it_could_be(name, complaint):
    with pytest.raises(ValueError, match=complaint):
        resolve(name)


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        resolve(str(tmp_path))


def test_a_revision_is_for_the_hub_only():
    with pytest.raises(ValueError, match="revision is for hub models only"):
        resolve("preset:llama-3-8b", revision="main")


def hub(monkeypatch, answer):
    """Replaces the hub's download by `answer(patterns)`; returns the list of what was asked for."""
    calls = []

    def snapshot_download(name, *, revision, allow_patterns, ignore_patterns):
        calls.append((name, revision, allow_patterns))
        return answer(allow_patterns)

    monkeypatch.setattr(hub_client, "snapshot_download", snapshot_download)
    return calls


def raising(error: Exception):
    def answer(patterns):
        raise error

    return answer


def test_a_hub_model_is_checked_before_its_weights_are_fetched(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B | {"mlp_bias": True}))
    calls = hub(monkeypatch, lambda patterns: str(tmp_path))
    with pytest.raises(ValueError, match="mlp_bias"):
        resolve("meta/llama")
    assert len(calls) == 1
    assert "*.safetensors" not in calls[0][2]


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_model_becomes_a_folder(weights, monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_3_2_1B))
    calls = hub(monkeypatch, lambda patterns: str(tmp_path))
    found = resolve("meta/llama", revision="abc", weights=weights)
    assert (found.kind, found.path) == (Kind.HUB, tmp_path)
    assert {(name, revision) for name, revision, _ in calls} == {("meta/llama", "abc")}
    assert any("*.safetensors" in patterns for _, _, patterns in calls) is weights


@pytest.mark.parametrize(
    ("error", "complaint"),
    [
        (LocalEntryNotFoundError("x"), "neither a folder nor in the local hub cache, and the hub cannot be reached"),
        (GatedRepoError("x", response=httpx.Response(403, request=httpx.Request("GET", "http://h"))), "is gated"),
        (
            RepositoryNotFoundError("x", response=httpx.Response(404, request=httpx.Request("GET", "http://h"))),
            "no folder meta/llama, and the hub knows no meta/llama",
        ),
    ],
)
def test_the_hubs_refusals_are_explained(error, complaint, monkeypatch):
    hub(monkeypatch, raising(error))
    with pytest.raises(ValueError, match=complaint):
        resolve("meta/llama")


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "adapter_model.bin"])
def test_only_the_files_of_an_adapter_are_fetched(file, monkeypatch, tmp_path):
    def answer(patterns):
        for name in {"adapter_config.json", file}.intersection(patterns):
            (tmp_path / name).touch()
        return str(tmp_path)

    calls = hub(monkeypatch, answer)
    assert adapter_place("org/adapter") == tmp_path
    assert (tmp_path / file).exists()
    asked = {pattern for _, _, patterns in calls for pattern in patterns}
    assert asked <= {"adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"}


def test_an_adapter_is_a_folder_or_a_gguf_file(monkeypatch, tmp_path):
    (tmp_path / "a.gguf").touch()
    (tmp_path / "adapter_model.safetensors").touch()
    assert adapter_place(str(tmp_path)) == tmp_path
    assert adapter_place(str(tmp_path / "a.gguf")) == tmp_path / "a.gguf"
    for name in ("", "nothing", "a/b/c", "b.gguf", "adapter_model.safetensors"):
        with pytest.raises(ValueError, match=r"no adapter '.*': it can be a folder, a GGUF file or a hub name"):
            adapter_place(str(tmp_path / "x" / name))
    with pytest.raises(ValueError, match="HTTP"):
        adapter_place("https://example.com/adapter")
    hub(monkeypatch, raising(LocalEntryNotFoundError("no network")))
    with pytest.raises(ValueError, match="org/adapter is neither a folder nor in the local hub cache"):
        adapter_place("org/adapter")
