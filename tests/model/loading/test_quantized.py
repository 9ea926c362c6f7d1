"""Weights quantised while they are loaded, and quantised conversions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.config import LlamaConfig
from model.execution.memory_plan import weights_bytes
from model.loading.orbax_format import save_orbax
from model.loading.source import CONVERTED
from model.loading.stored_weights import find_weights
from model.loading.weights import load_hf, random_weights
from model.network.eight_bit import quantize
from model.network.sharding import abstract_model, make_mesh
from model.quantization.forms import EightBit, Rounding
from scripts.lab.demo.export import save_hf
from tests.model import checkpoints
from tests.model.dense_attention import dense_logits
from tests.model.dequantized import dequantize
from tests.model.loaded import flat, load_orbax
from tests.model.network.test_llama import TINY


def checkpoint(tmp_path, variant="gqa2"):
    folder = checkpoints.write(tmp_path / variant, variant)
    return folder, LlamaConfig.from_file(folder)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize("form", EightBit)
def test_every_projection_and_the_head_are_quantised_row_by_row(tmp_path, form, num_shards):
    """With the scales of one chip on every number of chips."""
    folder, config = checkpoint(tmp_path)
    mesh = make_mesh(num_shards) if num_shards > 1 else None
    exact = flat(load_hf(folder, config, dtype=jnp.float32, mesh=mesh))
    found = flat(load_hf(folder, config, dtype=jnp.float32, mesh=mesh, quantization=form))
    kernels = [name for name in exact if name.endswith(".kernel")]
    assert len(kernels) == 4 * config.num_layers + 1
    for name in kernels:
        kernel, scale = jax.jit(quantize, static_argnums=1)(exact[name], form)
        np.testing.assert_array_equal(found[name], kernel)
        np.testing.assert_array_equal(found[name.replace("kernel", "scale")], scale)
    for name in exact.keys() - kernels:
        np.testing.assert_array_equal(found[name], exact[name])


@pytest.mark.parametrize("variant", ["gqa2", "tied"])
def test_logits_are_those_of_the_dequantised_weights_on_every_number_of_chips(tmp_path, variant):
    folder, config = checkpoint(tmp_path, variant)
    tokens = checkpoints.golden_sequence(variant)
    exact = load_hf(folder, config, dtype=jnp.float32)
    for module in (*(getattr(layer.attention, n) for layer in exact.layers for n in ("qkv", "out")),
                   *(getattr(layer.mlp, n) for layer in exact.layers for n in ("gate_up", "down"))):  # fmt: skip
        module.kernel.set_value(dequantize(*quantize(module.kernel[...], EightBit.INT8)))
    if exact.head is not None:
        exact.head.kernel.set_value(dequantize(*quantize(exact.head.kernel[...], EightBit.INT8)))
    wanted = np.asarray(dense_logits(exact, tokens)) if variant == "gqa2" else None
    logits = []
    for num_shards in (1, 2):
        mesh = make_mesh(num_shards) if num_shards > 1 else None
        model = load_hf(folder, config, dtype=jnp.float32, mesh=mesh, quantization=EightBit.INT8)
        logits.append(np.asarray(dense_logits(model, tokens)))
    np.testing.assert_allclose(logits[0], logits[1], atol=2e-5)
    if wanted is not None:
        # The scales multiply sums here, and weights there.
        np.testing.assert_allclose(logits[0], wanted, atol=3e-5)


def test_rounded_inputs_have_the_scales_of_whole_tokens_on_every_number_of_chips(tmp_path):
    folder, config = checkpoint(tmp_path)
    how = {"dtype": jnp.float32, "quantization": EightBit.INT8, "rounding": Rounding()}
    models = [load_hf(folder, config, mesh=mesh, **how) for mesh in (None, make_mesh(2))]
    one, two = (np.asarray(dense_logits(model, checkpoints.golden_sequence("gqa2"))) for model in models)
    np.testing.assert_allclose(one, two, atol=2e-5)


def test_a_tied_head_becomes_a_kernel_of_its_own(tmp_path):
    folder, config = checkpoint(tmp_path, "tied")
    exact = flat(load_hf(folder, config, dtype=jnp.float32))
    model = load_hf(folder, config, dtype=jnp.float32, quantization=EightBit.INT8)
    found = flat(model)
    assert model.config.tie_word_embeddings
    np.testing.assert_array_equal(found["embedding"], exact["embedding"])
    np.testing.assert_array_equal(found["head.kernel"], quantize(exact["embedding"], EightBit.INT8)[0])


def test_eight_bits_are_counted_as_one_byte():
    config = LlamaConfig.from_hf(TINY.to_hf())
    wide, narrow = (
        weights_bytes(abstract_model(config, dtype=jnp.bfloat16, quantization=form)) for form in (None, EightBit.FP8)
    )
    kernels = [
        value for name, value in flat(random_weights(config, dtype=jnp.bfloat16)).items() if name.endswith("kernel")
    ]
    assert wide - narrow == sum(value.size - 4 * value.shape[0] for value in kernels)


def test_a_conversion_of_another_form_is_refused(tmp_path):
    folder, config = checkpoint(tmp_path)
    save_orbax(load_hf(folder, config, dtype=jnp.float32), folder / CONVERTED, config)
    with pytest.raises(ValueError, match="holds weights that are not quantised, and int8 is asked for"):
        find_weights(folder, config).load(dtype=jnp.float32, quantization=EightBit.INT8)
    other = tmp_path / "other"
    save_orbax(load_hf(folder, config, dtype=jnp.float32, quantization=EightBit.FP8), other, config)
    assert load_orbax(other, config, dtype=jnp.float32).quantization is EightBit.FP8
    (other / "stored.json").write_text((other / "stored.json").read_text().replace('"fp8"', '"fp4"'))
    with pytest.raises(ValueError, match="damaged"):
        load_orbax(other, config, dtype=jnp.float32)


def test_quantised_weights_are_not_exported(tmp_path):
    model = random_weights(TINY, dtype=jnp.float32, quantization=EightBit.INT8)
    with pytest.raises(ValueError, match="quantised weights are not exported"):
        save_hf(model, tmp_path)
