from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from model.config import LlamaConfig
from model.loading import tensor_files
from model.loading.weights import load_hf, random_weights
from model.network.linear import INIT_STDDEV
from model.network.sharding import make_mesh
from tests.model import checkpoints
from tests.model.loaded import flat
from tests.model.network.test_llama import TINY


def config_of(variant: str, tmp_path) -> LlamaConfig:
    return LlamaConfig.from_file(checkpoints.write(tmp_path / "config", variant))


def test_fused_rows_by_hand(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    config = LlamaConfig.from_file(folder)  # 4 query heads, 2 KV heads of 16
    given = checkpoints.tensors("gqa2")
    q, k, v = (given[f"model.layers.2.self_attn.{x}_proj.weight"] for x in "qkv")
    gate, up = (given[f"model.layers.2.mlp.{x}_proj.weight"] for x in ("gate", "up"))

    one = flat(load_hf(folder, config, dtype=jnp.float32))
    np.testing.assert_array_equal(one["layers.2.attention.qkv.kernel"], np.concatenate([q, k, v]))
    np.testing.assert_array_equal(one["layers.2.mlp.gate_up.kernel"], np.concatenate([gate, up]))
    np.testing.assert_array_equal(one["head.kernel"], given["lm_head.weight"])

    four = flat(load_hf(folder, config, dtype=jnp.float32, mesh=make_mesh(4)))
    head = 16
    third_chip = np.concatenate([q[2 * head : 3 * head], k[head:], v[head:]])  # query 2 belongs to KV head 1
    np.testing.assert_array_equal(four["layers.2.attention.qkv.kernel"][96:144], third_chip)
    second_chip = np.concatenate([gate[40:80], up[40:80]])
    np.testing.assert_array_equal(four["layers.2.mlp.gate_up.kernel"][80:160], second_chip)


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_file_or_several_give_the_same_weights_in_the_asked_dtype(num_files, dtype, tmp_path):
    folder = checkpoints.write(tmp_path, "bf16", num_files=num_files)
    weights = flat(load_hf(folder, LlamaConfig.from_file(folder), dtype=dtype))
    given = checkpoints.tensors("bf16")
    assert {w.dtype for w in weights.values()} == {np.dtype(dtype)}
    np.testing.assert_array_equal(
        weights["layers.0.mlp.down.kernel"], given["model.layers.0.mlp.down_proj.weight"].astype(dtype)
    )


def test_several_files_without_an_index_are_read_too(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2", num_files=2)
    (folder / "model.safetensors.index.json").unlink()
    weights = flat(load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32))
    np.testing.assert_array_equal(weights["norm.scale"], checkpoints.tensors("gqa2")["model.norm.weight"])


def test_everything_wrong_is_named_in_one_error(tmp_path):
    config = config_of("gqa2", tmp_path)
    given = checkpoints.tensors("gqa2")
    del given["model.norm.weight"]
    for layer in (0, 2):
        del given[f"model.layers.{layer}.mlp.up_proj.weight"]
    given["model.layers.1.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
    given["model.layers.1.self_attn.k_proj.weight"] = np.zeros((16, 64), np.float32)
    given["model.layers.1.mlp.down_proj.weight"] = np.zeros((64, 160), np.int8)
    checkpoints.write_tensors(tmp_path, given)
    with pytest.raises(ValueError, match="does not hold this model's weights") as error:
        load_hf(tmp_path, config, dtype=jnp.float32)
    message = str(error.value)
    assert "missing: model.layers.{0,2}.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.{1}.self_attn.q_proj.bias" in message
    assert "model.layers.{1}.self_attn.k_proj.weight has shape (16, 64), not (32, 64)" in message
    assert "model.layers.{1}.mlp.down_proj.weight has type I8, not one of BF16, F16, F32" in message


def test_known_harmless_tensors_are_ignored(tmp_path):
    config = config_of("tied", tmp_path)
    given = checkpoints.tensors("tied")
    given["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    given["model.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    given["lm_head.weight"] = given["model.embed_tokens.weight"].copy()  # tied: the embedding is the head
    checkpoints.write_tensors(tmp_path, given)
    weights = flat(load_hf(tmp_path, config, dtype=jnp.float32))
    assert "head.kernel" not in weights
    np.testing.assert_array_equal(weights["embedding"], given["model.embed_tokens.weight"])


def test_a_tied_embedding_may_be_stored_as_the_head_alone(tmp_path):
    config = config_of("tied", tmp_path)
    given = checkpoints.tensors("tied")
    given["lm_head.weight"] = embedding = given.pop("model.embed_tokens.weight")
    checkpoints.write_tensors(tmp_path, given)
    model = load_hf(tmp_path, config, dtype=jnp.float32)
    assert model.config.tie_word_embeddings
    np.testing.assert_array_equal(flat(model)["embedding"], embedding.astype(np.float32))
    del given["lm_head.weight"]
    checkpoints.write_tensors(tmp_path, given)
    with pytest.raises(ValueError, match=r"missing: model\.embed_tokens\.weight"):
        load_hf(tmp_path, config, dtype=jnp.float32)


def test_files_that_are_not_there_are_named(tmp_path):
    config = config_of("gqa2", tmp_path)
    with pytest.raises(ValueError, match="no safetensors files"):
        load_hf(tmp_path, config, dtype=jnp.float32)
    checkpoints.write(tmp_path, "gqa2", num_files=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"not there: model-00002-of-00003\.safetensors"):
        load_hf(tmp_path, config, dtype=jnp.float32)


def test_all_files_that_break_the_indexs_promise_are_named(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2", num_files=3)
    losses = ("model.embed_tokens.weight", "lm_head.weight")
    for lost in losses:
        path = next(path for path in folder.glob("*.safetensors") if lost in load_file(path))
        save_file({key: tensor for key, tensor in load_file(path).items() if key != lost}, path)
    with pytest.raises(ValueError, match="does not hold") as error:
        load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)
    assert "missing" not in str(error.value)
    for lost in losses:
        assert re.search(rf"\d-of-00003\.safetensors lacks tensors that the index promises: {lost}", str(error.value))


def test_a_tensor_in_two_files_and_an_index_without_a_map_are_named(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2", num_files=2)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json has no weight_map"):
        load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, folder / "z.safetensors")
    with pytest.raises(ValueError, match=r"in more than one file: model\.norm\.weight"):
        load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_tied_config_takes_the_head_that_the_files_hold_where_it_differs(dtype, is_last, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_files, "_ROWS_COMPARED", 50)
    config = config_of("tied", tmp_path)
    given = checkpoints.tensors("tied")
    head = given["model.embed_tokens.weight"].astype(dtype)
    given["model.embed_tokens.weight"] = head.astype(np.float32)  # the same values in another type are no other head
    given["lm_head.weight"] = head.copy()
    checkpoints.write_tensors(tmp_path, given)
    assert "head.kernel" not in flat(load_hf(tmp_path, config, dtype=jnp.float32))
    given["lm_head.weight"][-1 if is_last else 0, 3] = 7
    checkpoints.write_tensors(tmp_path, given)
    model = load_hf(tmp_path, config, dtype=jnp.float32)
    assert not model.config.tie_word_embeddings
    np.testing.assert_array_equal(flat(model)["head.kernel"], given["lm_head.weight"].astype(np.float32))


def test_a_head_of_another_shape_is_refused_though_it_is_tied(tmp_path):
    config = config_of("tied", tmp_path)
    given = checkpoints.tensors("tied")
    given["lm_head.weight"] = given["model.embed_tokens.weight"][:100].copy()
    checkpoints.write_tensors(tmp_path, given)
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \(100, 64\), not \(192, 64\)"):
        load_hf(tmp_path, config, dtype=jnp.float32)


def test_a_single_file_is_read_whatever_an_index_next_to_it_says(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2", num_files=2)
    other = checkpoints.tensors("gqa2")
    other["model.norm.weight"] = other["model.norm.weight"] * 2
    checkpoints.write_tensors(folder, other)
    weights = flat(load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32))
    np.testing.assert_array_equal(weights["norm.scale"], other["model.norm.weight"])


@pytest.mark.parametrize("name", [5, "", "../x.safetensors", "/etc/passwd"])
def test_an_index_that_names_no_file_next_to_it_is_refused(name, tmp_path):
    folder = checkpoints.write(tmp_path / "model", "gqa2", num_files=2)
    save_file(checkpoints.tensors("gqa2"), tmp_path / "x.safetensors")
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"must name files next to it, and for 'model\.norm\.weight' it has"):
        load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 619264\n"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda raw: raw[:-100], r"has 619164 bytes, and its header describes 619264: download it again"),
        (lambda raw: raw[:1000], r"has 1000 bytes, and its header alone takes 3072: download it again"),
        (lambda raw: b"", "is empty: download it again"),
        (lambda raw: LFS_POINTER, "is a Git LFS pointer and not the weights: run `git lfs pull`"),
        (lambda raw: b"<!DOCTYPE html><title>404", r"is not a safetensors file: it begins with b'<!DOCTYPE"),
        (lambda raw: raw[:8] + b"?" + raw[9:], "is not a safetensors file: .*invalid JSON"),
    ],
)
def test_a_file_that_is_not_whole_is_told_what_it_is(spoil, words, tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    path = folder / "model.safetensors"
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))} {words}") as error:
        load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("num_shards", [None, 4])
def test_random_weights_are_noise_of_the_usual_size(num_shards):
    mesh = None if num_shards is None else make_mesh(num_shards)
    model = random_weights(TINY, dtype=jnp.bfloat16, mesh=mesh)
    weights = flat(model)
    assert len(weights) == len(jax.tree.leaves(nnx.state(model)))
    for name, value in weights.items():
        assert value.dtype == ml_dtypes.bfloat16
        value = value.astype(np.float32)
        if name.endswith("scale"):
            assert (value == 1).all()
        else:
            assert abs(value.mean()) < INIT_STDDEV / 8
            assert abs(value.std() / INIT_STDDEV - 1) < 0.1
            assert len(np.unique(value)) > 100
    assert not np.array_equal(weights["layers.0.mlp.down.kernel"], weights["layers.1.mlp.down.kernel"])
