from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import LlamaConfig
from model.loading.plain_copy import plain_copy
from model.loading.weights import load_hf
from model.network.packed import pack_for_cpu
from model.network.sharding import make_mesh
from model.quantization.forms import EightBit
from tests.model import checkpoints
from tests.model.loaded import flat


@pytest.mark.parametrize(
    ("variant", "num_chips", "packed", "dtype"),
    [
        ("gqa2", 1, False, jnp.float32),
        ("gqa2", 1, True, jnp.bfloat16),
        ("tied", 1, True, jnp.float32),
        ("gqa2", 2, False, jnp.bfloat16),
        ("gqa2", 4, False, jnp.float32),
        ("mqa", 2, False, jnp.bfloat16),
    ],
)
def test_every_stored_form_gives_the_model_that_one_chip_loads(variant, num_chips, packed, dtype, tmp_path):
    """On four chips `gqa2` stores each of its two KV heads twice."""
    folder = checkpoints.write(tmp_path, variant)
    config = LlamaConfig.from_file(folder)
    mesh = None if num_chips == 1 else make_mesh(num_chips)
    stored = load_hf(folder, config, dtype=dtype, mesh=mesh)
    if packed:
        pack_for_cpu(stored)
        assert 3 in {value.ndim for value in flat(stored).values()}
    expected = load_hf(folder, config, dtype=dtype)

    copy = plain_copy(stored, config, dtype=jnp.float32)

    assert nnx.graphdef(copy) == nnx.graphdef(load_hf(folder, config, dtype=jnp.float32))
    for path, value in flat(expected).items():
        np.testing.assert_array_equal(flat(copy)[path], value.astype(np.float32), err_msg=path)


def test_a_copy_has_its_own_arrays(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    config = LlamaConfig.from_file(folder)
    stored = load_hf(folder, config, dtype=jnp.float32)
    for leaf in jax.tree.leaves(nnx.state(plain_copy(stored, config, dtype=jnp.float32))):
        leaf.delete()
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(nnx.state(stored)))
    assert all(np.isfinite(value).all() for value in flat(stored).values())


def test_rounded_weights_are_not_copied(tmp_path):
    folder = checkpoints.write(tmp_path, "gqa2")
    config = LlamaConfig.from_file(folder)
    stored = load_hf(folder, config, dtype=jnp.float32, quantization=EightBit.INT8)
    with pytest.raises(ValueError, match="int8, which is too coarse to train from"):
        plain_copy(stored, config, dtype=jnp.float32)
