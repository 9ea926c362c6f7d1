from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from model.config import LlamaConfig
from model.loading.weights import load_hf
from model.network.sharding import make_mesh
from scripts.lab.demo.export import save_hf
from tests.model import checkpoints


@pytest.mark.parametrize("variant", ["gqa2", "tied", "llama3_rope", "bf16"])
def test_export_is_the_inverse_of_loading(variant, tmp_path):
    folder = checkpoints.write(tmp_path / "in", variant)
    config = LlamaConfig.from_file(folder)
    model = load_hf(folder, config, dtype=jnp.float32)

    save_hf(model, tmp_path / "out", dtype=config.checkpoint_dtype)

    assert LlamaConfig.from_file(tmp_path / "out") == config
    written, given = load_file(tmp_path / "out" / "model.safetensors"), checkpoints.tensors(variant)
    assert written.keys() == given.keys()
    for key, tensor in given.items():
        assert written[key].dtype == tensor.dtype
        np.testing.assert_array_equal(written[key], tensor, err_msg=key)


def test_a_model_cut_for_several_chips_is_refused(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    model = load_hf(folder, LlamaConfig.from_file(folder), dtype=jnp.float32, mesh=make_mesh(2))
    with pytest.raises(ValueError, match=r"model\.num_shards=2"):
        save_hf(model, tmp_path / "out")
