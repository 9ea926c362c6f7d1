from __future__ import annotations

import json
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from model.checkpoint import load_orbax, save_orbax
from model.config import LlamaConfig
from model.sharding import make_mesh
from model.weights import load_hf
from tests.model import checkpoints
from tests.model.test_weights import flat


def load(tmp_path, variant, **options):
    """The variant's config and its model as loaded from safetensors."""
    folder = checkpoints.write(tmp_path / "hf", variant)
    config = LlamaConfig.from_file(folder)
    return config, load_hf(folder, config, **options)


def same(first, second) -> None:
    first, second = flat(first), flat(second)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        np.testing.assert_array_equal(value, second[name], err_msg=name)


@pytest.mark.parametrize("num_shards", [None, 4])
@pytest.mark.parametrize("variant", ["gqa2", "tied"])
def test_what_is_saved_is_restored_where_it_was(variant, num_shards, tmp_path):
    mesh = None if num_shards is None else make_mesh(num_shards)
    config, model = load(tmp_path, variant, dtype=jnp.bfloat16, mesh=mesh)
    save_orbax(model, tmp_path / "orbax", config)
    restored = load_orbax(tmp_path / "orbax", config, dtype=jnp.bfloat16, mesh=mesh)
    same(restored, model)
    expected = model.layers[0].attention.qkv[...].sharding
    assert restored.layers[0].attention.qkv[...].sharding == expected


def test_it_is_cast_to_the_dtype_that_is_asked_for(tmp_path):
    config, model = load(tmp_path, "bf16", dtype=jnp.bfloat16)
    save_orbax(model, tmp_path / "orbax", config)
    _, expected = load(tmp_path, "bf16", dtype=jnp.float32)
    same(load_orbax(tmp_path / "orbax", config, dtype=jnp.float32), expected)


def test_the_form_of_another_number_of_chips_is_refused(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32, mesh=make_mesh(2))
    save_orbax(model, tmp_path / "orbax", config)
    with pytest.raises(ValueError, match=r"converted for 2 chip\(s\), and 4 are asked for"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32, mesh=make_mesh(4))


def test_another_model_is_refused_and_what_differs_is_named(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    other = replace(config, rms_norm_eps=1e-6, rope_theta=1.0, eos_token_ids=(9,))
    with pytest.raises(ValueError, match=r"another model .*: rms_norm_eps, rope_theta differ"):
        load_orbax(tmp_path / "orbax", other, dtype=jnp.float32)


def test_an_unfinished_conversion_and_another_format_are_refused(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    save_orbax(model, tmp_path / "orbax", config)
    path = tmp_path / "orbax" / "stored.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    with pytest.raises(ValueError, match="has format 0"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)
    path.unlink()
    with pytest.raises(ValueError, match="no finished conversion"):
        load_orbax(tmp_path / "orbax", config, dtype=jnp.float32)


def test_nothing_is_overwritten(tmp_path):
    config, model = load(tmp_path, "gqa2", dtype=jnp.float32)
    with pytest.raises(ValueError, match="is not empty"):
        save_orbax(model, tmp_path / "hf", config)
