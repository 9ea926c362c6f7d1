"""LoRA adapters as peft and llama.cpp store them, and what is refused by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.loading.adapter import read_adapter
from model.loading.remote_tensors import RemoteSlice
from model.loading.weights import load_hf
from model.network.lora import LoraWeights
from tests.model import adapters, checkpoints, gguf_files
from tests.model.dense_attention import dense_logits
from tests.model.gguf_files import Type
from tests.model.goldens.make_adapters import GGUF

CONFIG = adapters.base_config()
FIRST = "model.layers.0.self_attn.q_proj"
A, B = (f"{adapters.PREFIX}{FIRST}.lora_{x}.weight" for x in "AB")


def read(folder: Path, max_rank: int = 4) -> LoraWeights:
    return read_adapter(folder, CONFIG, max_rank=max_rank)


def refusal(folder: Path, max_rank: int = 4) -> str:
    """The one line that is said of an adapter."""
    with pytest.raises((ValueError, OSError)) as caught:
        read(folder, max_rank)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 4100
    return str(caught.value)


def assert_read_or_refused(place: Path) -> None:
    try:
        said = f"{len(read(place).layers)} layers"
    except (ValueError, OSError) as error:
        said = str(error)
    assert said == "3 layers" or (str(place) in said and "\n" not in said)


def changed(tmp_path: Path, name: str = "q_and_v", tensors: dict | None = None, **fields: object) -> Path:
    """A golden adapter with other fields, and with other, more or (None) fewer tensors."""
    raw, stored = adapters.read(adapters.folder(name))
    stored = {key: value for key, value in {**stored, **(tensors or {})}.items() if value is not None}
    return adapters.write(tmp_path / "changed", raw | fields, stored)


def same(one: LoraWeights, other: LoraWeights) -> bool:
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            for x, y in zip(ours[name], theirs[name], strict=True):
                np.testing.assert_array_equal(x, y)
    return one.identity == other.identity


@pytest.mark.parametrize("name", adapters.ADAPTERS)
def test_logits_and_greedy_text_equal_pefts(name, tmp_path):
    weights = read(adapters.folder(name))
    folder = checkpoints.write(tmp_path, adapters.BASE)
    checkpoints.write_tensors(folder, adapters.merged(checkpoints.tensors(adapters.BASE), weights))
    golden, tokens = adapters.golden(name)
    prompt = adapters.prompt()
    model = load_hf(folder, CONFIG, dtype=jnp.float32)

    logits = np.asarray(dense_logits(model, np.concatenate([prompt, tokens]).astype(np.int32)))

    assert np.abs(logits[: len(prompt)] - golden).max() < 2e-4
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens


def test_the_identity_is_that_of_the_values(tmp_path):
    usual = read(adapters.folder("q_and_v"))
    assert 0 < usual.identity < 2**63
    raw, stored = adapters.read(adapters.folder("q_and_v"))
    narrow = {key: value.astype(ml_dtypes.bfloat16) for key, value in stored.items()}
    assert same(usual, read(adapters.write(tmp_path / "narrow", raw | {"base_model_name_or_path": "x"}, narrow)))
    halved = {key: value / 2 if "lora_B" in key else value for key, value in stored.items()}
    assert same(usual, read(adapters.write(tmp_path / "halved", raw | {"lora_alpha": 16}, halved)))
    others = [read(changed(tmp_path, lora_alpha=alpha)) for alpha in (0, 4, 9)]
    others += [read(changed(tmp_path, tensors={key: value + 1})) for key, value in stored.items()]
    swapped = {key.replace("layers.0", "layers.9").replace("layers.1", "layers.0"): x for key, x in stored.items()}
    swapped = {key.replace("layers.9", "layers.1"): value for key, value in swapped.items()}
    others.append(read(adapters.write(tmp_path / "swapped", raw, swapped)))
    assert len({usual.identity, *(other.identity for other in others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("all_linear", {"target_modules": "all-linear"}),
        ("all_linear", {"target_modules": r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj"}),
        ("q_and_v", {"target_modules": [f"{part}.{x}_proj" for part in ("self_attn", "other") for x in "qv"]}),
        ("q_and_v", {"target_modules": "all-linear", "exclude_modules": r".*(mlp.*|[ko]_proj)"}),
        ("q_and_v", {"rank_pattern": {"x_proj": 9, "q_pro": 9}, "layers_to_transform": []}),
        ("some_layers", {"layers_pattern": ["model.layers"]}),
        ("rslora", {"use_dora": False, "modules_to_save": [], "unheard_of": True}),
    ],
)
def test_other_spellings_of_a_config_are_the_same_adapter(name, fields, tmp_path):
    assert same(read(changed(tmp_path, name, **fields)), read(adapters.folder(name)))


@pytest.mark.parametrize(("part", "other"), [(".weight", ".default.weight"), ("base_model.model.", "")])
def test_names_with_the_name_of_the_adapter_or_without_the_base_are_read(tmp_path, part, other):
    raw, stored = adapters.read(adapters.folder("q_and_v"))
    renamed = {key.replace(part, other, 1): value for key, value in stored.items()}
    assert renamed.keys().isdisjoint(stored)
    assert same(read(adapters.write(tmp_path, raw, renamed)), read(adapters.folder("q_and_v")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save=\['lm_head'\] is not supported; --models NAME=/.*changed"),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"]}, "adapters of lm_head are not supported; --models NAME="),
        ({"target_modules": ["q_proj", "v_proj", "lm_head"], "use_dora": True}, r"; merge the two \(`merge_"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"layer_replication": [[0, 2]]}, "layer_replication="),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights='pissa_niter_4' has changed the base's weights"),
        ({"peft_type": "IA3"}, "an adapter of 'IA3'; only peft_type='LORA'"),
        ({"r": 10**12}, "r=1000000000000 is not an integer from 1 to 65536"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan|not finite"),
        ({"alpha_pattern": {"q_proj": 1e300}}, "not finite, or too large for bfloat16: .*q_proj$"),
        ({"r": 3}, r"q_proj, .*v_proj has rank 4 and should have 3"),
        ({"rank_pattern": {r".*\.1\.self_attn\.v_proj": 2}}, r"layers\.\{1\}\.self_attn\.v_proj has rank 4 and should"),
        ({"target_modules": ["q_proj"]}, r"not among target_modules: model.layers.\{0,1,2\}.self_attn.v_proj.lora_A"),
        ({"target_modules": ["q_proj", "v_proj", "k_proj"]}, r"missing: .*k_proj.lora_A, .*k_proj.lora_B$"),
        ({"target_modules": r".*(q_proj|v_proj|embed_tokens)"}, "adapters of model.embed_tokens are not supported"),
        ({"target_modules": []}, "names no projection of the model"),
        ({"target_modules": "(q_proj"}, r"'\(q_proj' is not a regular expression: "),
        ({"target_modules": ["q_proj"] * 99}, "target_modules has 99 entries, and the model 23 modules"),
    ],
)  # fmt: skip
def test_a_setting_that_changes_the_result_is_refused(fields, words, tmp_path):
    said = refusal(changed(tmp_path, **fields))
    assert re.search(words, said), said


ZEROS = np.zeros((4, 64), np.float32)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({A: None}, r"missing: model\.layers\.\{0\}\.self_attn\.q_proj\.lora_A$"),
        ({B: ZEROS}, r"q_proj\.lora_B has shape \(4, 64\), not \(64, rank\)"),
        ({A: ZEROS.reshape(-1)}, r"q_proj\.lora_A has shape \(256,\), not \(rank, 64\)"),
        ({A: ZEROS[:3]}, "q_proj has ranks 3 and 4 in A and B"),
        ({A: ZEROS[:0], B: ZEROS[:0].T}, "q_proj has rank 0 and should have 4"),
        ({A: ZEROS.astype(np.float64)}, "serve: .*q_proj.lora_A has type F64, not one of BF16, F16, F32$"),
        ({A: ZEROS * np.nan}, r"not finite, or too large for bfloat16: .*\{0\}\.self_attn\.q_proj$"),
        ({A: ZEROS + np.finfo(np.float32).max}, "too large for bfloat16"),
        ({A.replace("lora_A.weight", "lora_magnitude_vector"): ZEROS}, r"lora_magnitude_vector \(DoRA\) cannot"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": ZEROS}, r"\(adapter of the embedding\) .*; --models"),
        ({"base_model.model.lm_head.lora_A.weight": ZEROS}, r"lm_head\.lora_A.* \(adapter of the head\) cannot"),
        ({"base_model.model.lm_head.base_layer.weight": np.zeros((192, 64), np.float32)},
         r"lm_head\.base_layer\.weight \(weights of the base\) cannot be served; --models"),
        ({"base_model.model.model.embed_tokens.weight": np.zeros((194, 64), np.float32)},
         r"\(modules_to_save, of 194 tokens, and the model has 192\) cannot be served; --model /.*/changed merges"),
        ({A.replace("layers.0", "layers.3"): ZEROS}, r"\(a layer beyond the model's 3\) cannot be served"),
        ({A.replace("layers.0", "layers." + "9" * 5000): ZEROS}, r"\(no A or B of a projection"),
        ({A.replace(".weight", ".default.weight"): ZEROS}, "q_proj.lora_A occurs twice"),
        ({"a\nb\x1b[31m": ZEROS}, r"'a\\nb\\x1b\[31m' \(no A or B"),
    ],
)  # fmt: skip
def test_a_tensor_that_cannot_be_served_is_refused(tensors, words, tmp_path):
    said = refusal(changed(tmp_path, tensors=tensors))
    assert re.search(words, said), said


def test_a_rank_above_the_flag_names_it(tmp_path):
    assert "q_proj, model.layers.{0,1,2}.self_attn.v_proj has rank 4, which is above --max-lora-rank 3" in refusal(
        adapters.folder("q_and_v"), max_rank=3
    )


def test_one_message_has_all_problems(tmp_path):
    tensors = {A: ZEROS[:, :1], "base_model.model.x.lora_magnitude_vector": ZEROS}
    said = refusal(changed(tmp_path, tensors=tensors, use_dora=True, bias="all", use_rslora=3, r=None))
    assert said.startswith(f"{tmp_path}/changed is not a LoRA adapter that this model can serve: ")
    for words in ("use_dora", "bias='all'", "use_rslora=3", "r is missing", "lora_magnitude_vector", "has shape"):
        assert words in said


@pytest.mark.parametrize("field", ["target_modules", "exclude_modules", "rank_pattern", "layers_pattern"])
def test_a_pattern_without_an_end_is_given_up(field, tmp_path, monkeypatch):
    monkeypatch.setattr("model.loading.adapter_targets._MATCHING_S", 0.5)
    hostile = "(.+.?)+!"
    fields = {"rank_pattern": {hostile: 4}, "layers_pattern": [hostile], "layers_to_transform": [0]}
    began = time.monotonic()
    said = refusal(changed(tmp_path, **{field: fields.get(field, hostile), "layers_to_transform": [0]}))
    assert "patterns that take more than 0.5 s" in said
    assert time.monotonic() - began < 5


def test_files_that_are_not_there_are_named(tmp_path):
    assert refusal(tmp_path) == f"{tmp_path} has no adapter_config.json: it is not a folder of a LoRA adapter"
    assert "has no adapter_config.json" in refusal(tmp_path / "nothing")
    shutil.copy(adapters.folder("q_and_v") / "adapter_config.json", tmp_path)
    assert refusal(tmp_path) == f"{tmp_path} has neither adapter_model.safetensors nor adapter_model.bin"


@pytest.mark.parametrize("text", ["", "{", "[]", '"x"', "[" * 100_000, '{"r": ' + "9" * 5000 + "}", "\udcff"])
def test_a_damaged_config_is_refused(text, tmp_path):
    shutil.copytree(adapters.folder("q_and_v"), tmp_path / "x")
    path = tmp_path / "x/adapter_config.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert refusal(tmp_path / "x").startswith(str(path))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "link"])
def test_what_is_no_file_is_refused(name, kind, tmp_path):
    shutil.copytree(adapters.folder("q_and_v"), tmp_path / "x")
    path = tmp_path / "x" / name
    (tmp_path / "x/adapter_model.safetensors").unlink(missing_ok=name.endswith("bin"))
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "gone")
    assert str(tmp_path) in refusal(tmp_path / "x")


def test_sizes_that_a_header_claims_take_no_memory(tmp_path):
    path = changed(tmp_path) / "adapter_model.safetensors"
    for shape, num_bytes in (([1 << 32, 64], 1 << 40), ([4, 64], 1 << 40), ([1 << 62, 1 << 62], 1 << 126)):
        header = json.dumps({A: {"dtype": "F32", "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        os.truncate(path, min(8 + len(header) + num_bytes, 8 + len(header) + (1 << 40)))  # takes no space
        tracemalloc.start()
        refusal(path.parent)
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
        tracemalloc.stop()
    path.write_bytes((1 << 26).to_bytes(8, "little"))
    os.truncate(path, 1 << 40)
    assert "is not a safetensors file" in refusal(path.parent)


@pytest.mark.parametrize("name", ["q_and_v", "torch_file"])
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_file_is_refused_or_read(name, data, tmp_path):
    """As with every reader of these formats, damage to the values is not seen."""
    folder = tmp_path / "x"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapters.folder(name), folder)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    assert_read_or_refused(folder)


def test_an_adapter_that_changes_while_it_is_read_is_not_used(tmp_path, monkeypatch):
    folder = tmp_path / "x"
    shutil.copytree(adapters.folder("q_and_v"), folder)
    read_values = RemoteSlice.__getitem__

    def written_meanwhile(tensor, index):
        os.utime(folder / "adapter_model.safetensors", ns=(0, time.time_ns()))
        return read_values(tensor, index)

    monkeypatch.setattr(RemoteSlice, "__getitem__", written_meanwhile)
    assert refusal(folder) == f"{folder} changed while it was read: load it again"


def test_the_file_of_llama_cpps_converter_is_the_same_adapter():
    assert same(read(GGUF), read(adapters.folder("torch_file")))


@pytest.mark.parametrize("name", ["q_and_v", "all_linear", "some_layers", "alpha_zero"])
@pytest.mark.parametrize("type", [Type.F32, Type.F16, Type.BF16, Type.Q8_0])
def test_a_gguf_adapter_is_the_folder_that_it_was_converted_from(name, type, tmp_path):
    raw, stored = adapters.read(adapters.folder(name))
    path = tmp_path / "adapter.gguf"
    left = gguf_files.write_adapter(path, CONFIG, stored, type, alpha=raw["lora_alpha"])
    if name == "alpha_zero":  # in llama.cpp it stands for no alpha: B is not scaled
        raw["lora_alpha"] = raw["r"]
    assert same(read(path), read(adapters.write(tmp_path / "x", raw, left)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (lambda w: w.add_array("adapter.alora.invocation_tokens", [1, 2]), "adapter.alora.invocation_tokens is not"),
        (lambda w: w.add_tensor("token_embd.weight.lora_a", ZEROS), "'token_embd.weight.lora_a' is not an adapter of"),
        (lambda w: w.add_tensor("blk.0.attn_k.weight.lora_a", ZEROS), r"missing: .*\{0\}\.self_attn\.k_proj\.lora_B$"),
        (lambda w: w.add_tensor("blk.0.attn_k.weight.lora_a", np.zeros((4, 64), np.int8)), "has type I8, not one of"),
        (lambda w: w.add_tensor("blk.0.attn_k.weight.lora_b", np.ones((99, 4), np.float32)), r"\(99, 4\), not \(32,"),
    ],
)  # fmt: skip
def test_a_gguf_adapter_that_cannot_be_served_is_refused(more, words, tmp_path):
    _, stored = adapters.read(adapters.folder("q_and_v"))
    gguf_files.write_adapter(tmp_path / "x.gguf", CONFIG, stored, alpha=8, more=more)
    said = refusal(tmp_path / "x.gguf")
    assert re.search(words, said), said


def test_other_gguf_files_are_no_adapters(tmp_path):
    path = gguf_files.write(tmp_path / "model.gguf", CONFIG, checkpoints.tensors(adapters.BASE))
    assert "general.type=None is not 'adapter'; adapter.type=None is not 'lora'" in refusal(path)
    path.write_bytes(path.read_bytes()[:100])
    assert "is cut off within its head" in refusal(path)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_a_damaged_gguf_adapter_is_refused_or_read(data, tmp_path):
    path = tmp_path / "x.gguf"
    gguf_files.write_adapter(path, CONFIG, adapters.read(adapters.folder("q_and_v"))[1], alpha=8)
    content = bytearray(path.read_bytes())
    for place in data.draw(st.lists(st.integers(0, 2000), max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
    assert_read_or_refused(path)
