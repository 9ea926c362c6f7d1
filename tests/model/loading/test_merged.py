"""Adapters that are merged into their model as it is read: peft's logits and texts, and what is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from model.loading.hf_format import ADAPTER_FILE
from model.loading.merged import weights_of
from model.loading.source import resolve
from model.loading.stored_weights import StoredWeights
from model.loading.weights_digest import weights_digest
from model.network.sharding import TENSOR_AXIS
from tests.model import adapters, checkpoints
from tests.model.dense_attention import dense_logits
from tests.model.goldens.make_adapters import MERGED, MERGED_ARRAYS, MERGED_FOLDERS

EMBEDDING, HEAD = (f"{adapters.PREFIX}{name}.weight" for name in ("model.embed_tokens", "lm_head"))


def folder(tmp_path: Path, name: str, tensors: dict | None = None, **fields: object) -> Path:
    """A golden adapter next to its model, with other fields, and with other, more or (None) fewer tensors."""
    base = checkpoints.write(tmp_path / "base", MERGED[name].get("base", adapters.BASE))
    raw, stored = adapters.read(MERGED_FOLDERS / name)
    stored = {key: value for key, value in {**stored, **(tensors or {})}.items() if value is not None}
    return adapters.write(tmp_path / "adapter", raw | {"base_model_name_or_path": str(base)} | fields, stored)


def found(place: Path) -> StoredWeights:
    return weights_of(resolve(str(place)))


def refusal(place: Path) -> str:
    with pytest.raises(ValueError) as caught:
        found(place)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", MERGED)
def test_logits_and_greedy_text_equal_pefts(name, tmp_path):
    place = folder(tmp_path, name)
    with np.load(MERGED_ARRAYS) as file:
        golden, tokens, prompt = (file[f"{name}.{part}"] for part in ("logits", "tokens", "prompt"))
    source = resolve(str(place))
    stored = weights_of(source)
    assert golden.shape[1] == source.config.vocab_size == stored.config.vocab_size == MERGED[name].get("tokens", 192)
    assert not stored.config.tie_word_embeddings
    model = stored.load(dtype="float32")

    logits = np.asarray(dense_logits(model, np.concatenate([prompt, tokens]).astype(np.int32)))

    assert np.abs(logits[: len(prompt)] - golden).max() < 2e-4
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens.tolist()

    mesh = Mesh(np.array(jax.devices()[:2]), (TENSOR_AXIS,))
    halves = stored.load(dtype="float32", mesh=mesh)
    for one, two in ((model.embedding, halves.embedding), (model.head.kernel, halves.head.kernel)):
        np.testing.assert_array_equal(np.asarray(one[...]), np.asarray(two[...]))


def test_older_names_are_read(tmp_path):
    place = folder(tmp_path, "saved")
    expected = tensors_of(found(place))
    values = load_file(place / ADAPTER_FILE)
    renamed = {re.sub(r"(embed_tokens|lm_head)", r"\1.modules_to_save.default", key): x for key, x in values.items()}
    assert renamed.keys() != values.keys()
    save_file(renamed, place / ADAPTER_FILE)
    for name, value in tensors_of(found(place)).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def tensors_of(stored: StoredWeights) -> dict[str, np.ndarray]:
    keys = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.v_proj.weight")
    files = stored._open()
    return {key: files.reader(key, slice(0, None))((slice(0, None),)) for key in keys}


ROWS = np.zeros((196, 64), np.float32)


@pytest.mark.parametrize(
    ("name", "tensors", "fields", "words"),
    [
        ("saved", {HEAD: None}, {}, "missing: the weights of 'lm_head', which modules_to_save names$"),
        ("saved", {}, {"modules_to_save": ["score"]}, "missing: the weights of 'score'"),
        ("saved", {}, {"modules_to_save": "lm_head"}, "modules_to_save='lm_head' is not a list of names"),
        ("saved", {HEAD: ROWS}, {}, r"lm_head\.weight has shape \(196, 64\), not \(192, 64\)"),
        ("saved", {EMBEDDING: ROWS}, {}, r"lm_head\.weight has shape \(192, 64\), not \(196, 64\)"),
        ("saved", {HEAD: ROWS[:192].astype(np.float64)}, {}, "lm_head.weight has type F64"),
        ("saved", {"base_model.model.lm_head.modules_to_save.weight": ROWS}, {}, "lm_head.weight occurs twice"),
        ("saved", {EMBEDDING: ROWS, HEAD: None}, {"modules_to_save": ["embed_tokens"]},
         "it lacks a head and an embedding of 196 tokens"),
        ("saved", {}, {"use_dora": True}, r"use_dora=True is not supported; merge the two \(`merge_and_unload`"),
        ("ends", {"base_model.model.lm_head.lora_A.weight": None}, {}, r"missing: lm_head\.lora_A"),
        ("ends", {"base_model.model.lm_head.bias": ROWS[0]}, {}, r"lm_head\.bias \(bias\) cannot be served; merge"),
        ("tied_saved", {}, {"ensure_weight_tying": True}, "ensure_weight_tying=True is not supported"),
        ("saved", {}, {"base_model_name_or_path": None}, "names no model: with --model BASE and --models NAME=/"),
        ("saved", {}, {"base_model_name_or_path": "/no/model"}, "adapter of '/no/model': no model '/no/model'.*; with"),
    ],
)  # fmt: skip
def test_what_cannot_be_merged_is_refused_by_name(name, tensors, fields, words, tmp_path):
    said = refusal(folder(tmp_path, name, tensors, **fields))
    assert re.search(words, said), said


def test_an_adapter_of_an_adapter_is_refused(tmp_path):
    place = folder(tmp_path, "saved", base_model_name_or_path=str(tmp_path / "adapter"))
    assert f"adapter is an adapter of '{place}': {place} is an adapter, too; with --model BASE" in refusal(place)


def test_the_adapters_own_tokenizer_counts_and_its_files_are_part_of_the_weights(tmp_path):
    place = folder(tmp_path, "resized")
    assert resolve(str(place)).tokenizer == tmp_path / "base"
    (place / "tokenizer.json").write_text("{}")
    assert resolve(str(place)).tokenizer == place
    stored = found(place)
    before = weights_digest(stored)
    values = load_file(place / ADAPTER_FILE)
    save_file(values | {HEAD: values[HEAD] * 2}, place / ADAPTER_FILE)
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors changed while it was read"):
        stored.load(dtype="float32")
    again = found(place)
    assert weights_digest(again) != before and again != stored
