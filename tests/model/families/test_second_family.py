"""A second family of decoders needs one file (qwen3.py) and one line in the table of families. Its oracle is
transformers (make.py)."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from batcher.request import Request, SamplingParams
from model.config import LlamaConfig
from model.families import FAMILIES
from model.loading.given_tensors import GivenWeights
from model.loading.orbax_format import save_orbax
from model.loading.plain_copy import plain_copy
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from scripts.building import device
from scripts.building.runner import build_runner, warm_engine
from scripts.flags.settings import EngineSettings
from scripts.lab.serve_all import serve_all
from tests.conftest import COMPILED
from tests.model import checkpoints
from tests.model.dense_attention import dense_logits
from tests.model.families.make import FILE, RAW, tensors
from tests.model.families.qwen3 import QWEN3
from tests.model.goldens.make import PROMPT_LENGTH, prompt
from tests.model.loaded import flat, load_orbax

GOLDENS = dict(np.load(FILE))
SEED = int(GOLDENS["seed"])
PROMPT = prompt(RAW, SEED).astype(np.int32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A checkpoint of Qwen3, which the engine then knows."""
    monkeypatch.setitem(FAMILIES, QWEN3.model_type, QWEN3)
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    checkpoints.write_tensors(tmp_path, tensors(SEED))
    return tmp_path


@pytest.mark.parametrize(
    ("raw", "problems"),
    [
        (RAW, ["architectures=['Qwen3ForCausalLM'] is not supported (only LlamaForCausalLM is)"]),
        (RAW | {"architectures": None}, ["architectures=[None] is not supported (only LlamaForCausalLM is)"]),
    ],
)
def test_a_family_that_is_not_in_the_table_is_refused(raw, problems):
    problems = [*problems, "model_type='qwen3' is not supported (only 'llama')"]
    with pytest.raises(ValueError) as error:
        LlamaConfig.from_hf(raw)
    assert str(error.value) == "2 problem(s) in the model's config: " + "; ".join(problems)


def test_the_config_is_read_by_its_own_family(folder):
    config = LlamaConfig.from_file(folder)
    assert (config.model_type, LlamaConfig.from_hf(config.to_hf())) == ("qwen3", config)
    for refused in ({"model_type": "llama"}, {"use_sliding_window": True}, {"attention_bias": True}):
        (name,) = refused
        with pytest.raises(ValueError, match=rf"1 problem\(s\) in the model's config: {name}=.* is not supported"):
            LlamaConfig.from_hf(RAW | refused)
    assert LlamaConfig.from_hf(RAW | {"architectures": None}) == config


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_logits_equal_transformers(num_shards, folder):
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32, mesh=mesh)
    found = np.asarray(dense_logits(model, np.concatenate([PROMPT, GOLDENS["tokens"]])))
    assert np.abs(found[:PROMPT_LENGTH] - GOLDENS["logits"]).max() < 2e-4
    assert found[PROMPT_LENGTH - 1 : -1].argmax(-1).tolist() == GOLDENS["tokens"].tolist()


@pytest.mark.parametrize("num_shards", [1, 2])
def test_the_batcher_serves_transformers_text_from_pages(num_shards, folder, monkeypatch):
    """With the attention that a start chooses for a CPU. The prompt is computed in two chunks."""
    monkeypatch.setattr(device, "start_jax", lambda *_, **__: "cpu")  # jax has started, with several devices
    settings = EngineSettings(
        model=str(folder),
        device="cpu",
        dtype="float32",
        tensor_parallel_size=num_shards,
        max_num_seqs=2,
        max_num_batched_tokens=16,
        max_model_len=64,
        num_pages=16,
        compile_cache=str(COMPILED),
    )
    sampling = SamplingParams(max_tokens=len(GOLDENS["tokens"]), temperature=0.0, ignore_eos=True)
    requests = [
        Request(request_id=str(number), prompt=tuple(map(int, PROMPT[number:])), sampling=sampling)
        for number in range(2)
    ]
    engine = warm_engine(build_runner(settings, lambda line: None), lambda line: None)
    tokens = serve_all(engine, requests).tokens
    assert list(tokens[0]) == GOLDENS["tokens"].tolist()


def test_its_weights_are_stored_given_and_copied_as_those_of_a_llama(folder):
    config = LlamaConfig.from_file(folder)
    model = load_hf(folder, config, dtype=jnp.float32)
    expected = flat(model)
    assert expected["layers.1.attention.query_norm.scale"].shape == (RAW["head_dim"],)
    save_orbax(model, folder / "orbax", config)
    over_two = load_orbax(folder / "orbax", config, dtype=jnp.float32, mesh=make_mesh(2))
    for found in (
        load_orbax(folder / "orbax", config, dtype=jnp.float32),
        plain_copy(over_two, config, dtype="float32"),
    ):
        assert flat(found).keys() == expected.keys()
        assert all((flat(found)[path] == expected[path]).all() for path in expected)
    form = {"dtype": jnp.float32, "mesh": None, "quantization": None, "rounding": None}
    for names, arrays in (("hf", tensors(SEED)), ("own", model)):
        given = GivenWeights(arrays, config, names=names).modules(form)
        made = {f"{module}.{name}".strip("."): value for module, values in given for name, value in values.items()}
        assert made.keys() == expected.keys()
        assert all((np.asarray(made[path]) == expected[path]).all() for path in expected)
    with pytest.raises(ValueError, match="names='maxtext' is not supported for 'qwen3': give names='hf' or 'own'"):
        GivenWeights({}, config, names="maxtext")
