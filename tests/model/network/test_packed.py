"""A packed model computes what it computed before, and has the shapes that were planned."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.loading.weights import random_weights
from model.network.linear import Linear
from model.network.packed import pack_for_cpu, pack_for_tpu
from model.network.sharding import abstract_model, make_mesh
from model.quantization.forms import EightBit, FourBit, Rounding, ScaleFormat
from pallas_kernels.cpu import library
from scripts.lab.accounts.dequantized_copies import quantized_kernels
from tests.c_compiler import NATIVE, compiler
from tests.model.dense_attention import dense_logits
from tests.model.driver import TINY


@pytest.fixture(scope="module")
def native():
    compiler()
    library.load(NATIVE)


def shapes(model) -> list:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(nnx.state(model))]


def flat(model) -> dict[str, jax.Array]:
    """Path -> value."""
    return {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}


def logits(model) -> np.ndarray:
    return np.asarray(dense_logits(model, np.arange(7)), np.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [(jnp.float32, None, 1e-5), (jnp.float32, EightBit.INT8, 1e-5), (jnp.bfloat16, None, 2e-2)],
)
def test_packed_weights_give_the_same_logits(native, tied, dtype, quantization, tolerance):
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=320, tie_word_embeddings=tied)
    options = {"dtype": dtype, "quantization": quantization}
    expected = logits(random_weights(config, **options))
    planned, packed = pack_for_cpu(abstract_model(config, **options)), pack_for_cpu(random_weights(config, **options))
    assert shapes(planned) == shapes(packed)
    kernels = {value.ndim for path, value in flat(packed).items() if path.endswith("kernel")}
    assert kernels == {3}
    assert flat(packed)["embedding"].ndim == (3 if tied and quantization is None else 2)
    np.testing.assert_allclose(logits(packed), expected, atol=tolerance * np.abs(expected).max())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("is_static", [False, True])
def test_packed_weights_round_the_inputs_as_others_do(native, dtype, is_static):
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=320)
    rounding = Rounding(is_static=is_static)
    options = {"dtype": dtype, "quantization": EightBit.INT8, "rounding": rounding}
    linear = Linear((96, 64), ("mlp", "embed"), rngs=nnx.Rngs(0), **options)
    if is_static:
        linear.input_scale.set_value(jnp.float32(0.02))
    inputs = np.random.default_rng(0).standard_normal((9, 64)).astype(dtype)
    expected = np.asarray(linear(inputs))
    packed = pack_for_cpu(linear)
    assert packed.kernel.shape == (3, 16, 128)
    np.testing.assert_array_equal(np.asarray(packed(inputs)), expected)
    planned = pack_for_cpu(abstract_model(config, **options))
    assert planned.layers[0].mlp.down.kernel.shape == (2, 24, 128)
    assert planned.head.kernel.shape == (10, 64, 32)  # the head's inputs are not rounded
    if not is_static:
        assert shapes(planned) == shapes(pack_for_cpu(random_weights(config, **options)))


def test_a_cpu_rounds_the_inputs_of_all_steps_or_of_none(native):
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=320)
    model = abstract_model(config, dtype=jnp.float32, quantization=EightBit.INT8, rounding=Rounding(min_rows=9))
    with pytest.raises(ValueError, match="in all steps or in none, not from 9 rows on"):
        pack_for_cpu(model)


def test_a_model_on_several_devices_is_not_packed(native):
    """The C code reads the columns of one group of heads."""
    with pytest.raises(ValueError, match="num_shards=2"):
        pack_for_cpu(abstract_model(TINY, dtype=jnp.float32, mesh=make_mesh(2)))


def test_what_has_no_packed_form_stays(native):
    """Kernels whose outputs are not whole panels."""
    config = replace(TINY, hidden_size=64, intermediate_size=96, vocab_size=100)
    whole = flat(pack_for_cpu(random_weights(config, dtype=jnp.float32)))
    assert whole["head.kernel"].ndim == 2
    assert whole["layers.0.mlp.down.kernel"].ndim == 3


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize(
    ("form", "has_zeros"),
    [(FourBit(group=32), False), (FourBit(group=32), True), (FourBit(group=16, numbers=ScaleFormat.NVFP4), False)],
)
def test_a_tpus_form_of_4_bits_gives_the_same_logits(form, has_zeros, num_shards):
    """Outputs are split over the chips in one half of a layer's products, inputs in the other."""
    config = replace(TINY, hidden_size=64, intermediate_size=128, vocab_size=320)
    mesh = make_mesh(2) if num_shards > 1 else None
    options = {"dtype": jnp.float32, "quantization": form, "mesh": mesh}
    model = random_weights(config, **options)
    if has_zeros:
        add_zeros(model)
    expected = logits(model)
    packed = pack_for_tpu(model, mesh, interpret=True)
    kernel, scale = packed.layers[0].mlp.down.kernel, packed.layers[0].mlp.down.scale
    assert (kernel.shape, kernel.dtype, scale.shape) == ((128, 64), jnp.int4, (128 // form.group, 64))
    assert packed.head.method.form is (None if form.is_float else EightBit.INT8)
    np.testing.assert_allclose(logits(packed), expected, atol=1e-5 * np.abs(expected).max())
    if not has_zeros:
        planned = pack_for_tpu(abstract_model(config, **options), mesh, interpret=True)
        assert shapes(planned) == shapes(packed)
        plans, values = (jax.tree.leaves(nnx.state(model)) for model in (planned, packed))
        assert all(like.sharding.is_equivalent_to(x.sharding, x.ndim) for like, x in zip(plans, values, strict=True))
        assert repr(nnx.split(planned)[0]) == repr(nnx.split(packed)[0])
    of_chip = (128 // form.group // num_shards, form.group, 64)  # of `down`, with its groups apart
    assert tuple(sorted(of_chip)) in quantized_kernels(packed, "tpu", mesh)
    assert pack_for_tpu(packed, mesh) is packed and packed.layers[0].mlp.down.method.interpret


def add_zeros(model) -> None:
    """To kernels that have none."""
    rng = np.random.default_rng(0)
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.mlp.gate_up, layer.mlp.down):
            scale = linear.scale.get_value()
            zero = jax.device_put(jnp.asarray(rng.uniform(-4, 4, scale.shape), jnp.bfloat16), scale.sharding)
            linear.zero = nnx.Param(zero, axes=linear.scale.get_metadata("axes"))
