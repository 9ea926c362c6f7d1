"""Quantised products against float32 products with the dequantised kernel, in every form that they are compiled to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.compiling.compiler_options import compiler_options
from model.network import cpu_products
from model.network.cpu_products import BLOCK_WEIGHTS, MAX_ROWS_INT8_STREAMED, STREAMS
from model.network.linear import Linear
from model.network.packed import use_cpu_products
from model.quantization.forms import EightBit
from tests.model.dequantized import dequantize


def make(form: EightBit | None, shape=(48, 80), dtype=jnp.float32, for_cpu=True) -> Linear:
    axes = ("mlp", "embed")
    linear = Linear(shape, axes, dtype=dtype, rngs=nnx.Rngs(1), quantization=form)
    return use_cpu_products(linear) if for_cpu else linear


def compiled(linear: Linear, rows: int, dtype=jnp.float32):
    """The program with the options that steps are compiled with."""
    graph, state = nnx.split(linear)

    def run(state, inputs):
        return nnx.merge(graph, state)(inputs)

    inputs = jax.ShapeDtypeStruct((rows, linear.kernel.shape[1]), dtype)
    program = jax.jit(run).lower(state, inputs).compile(compiler_options=compiler_options("cpu"))
    return program, lambda inputs: program(state, inputs)


@pytest.mark.parametrize("for_cpu", [True, False])
@pytest.mark.parametrize("form", EightBit)
@pytest.mark.parametrize(("rows", "num_out"), [(1, 48), (2, 50), (8, 1), (9, 48), (33, 50), (1, 1)])
def test_products_are_those_of_the_dequantised_kernel(form, rows, num_out, for_cpu, monkeypatch):
    monkeypatch.setattr(cpu_products, "BLOCK_WEIGHTS", 7 * 80)  # blocks of 7 rows, and a rest
    linear = make(form, (num_out, 80), for_cpu=for_cpu)
    inputs = np.random.default_rng(rows).standard_normal((rows, 80)).astype(np.float32)
    wanted = inputs.astype(np.float64) @ np.asarray(dequantize(linear.kernel[...], linear.scale[...]), np.float64).T
    found = np.asarray(compiled(linear, rows)[1](inputs))
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def test_the_output_has_the_inputs_type_or_the_one_that_was_asked_for():
    for form in (None, *EightBit):
        linear = make(form, dtype=jnp.bfloat16)
        for rows in (1, 16):
            inputs = jnp.ones((rows, 80), jnp.bfloat16)
            assert linear(inputs).dtype == jnp.bfloat16
            assert linear(inputs, out_dtype=jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("rows", [1, MAX_ROWS_INT8_STREAMED, MAX_ROWS_INT8_STREAMED + 1, 64])
def test_a_cpu_writes_no_wide_copy_of_the_kernel(rows):
    """The plain form does: that is what the forms of `cpu_products` are for."""
    shape = (4 * BLOCK_WEIGHTS // 512, 512)
    wide = 4 * shape[0] * shape[1]
    results = 2 * STREAMS * rows * shape[0] * 4
    program, _ = compiled(make(EightBit.INT8, shape), rows)
    assert program.memory_analysis().temp_size_in_bytes < wide // 2 + results
    plain, _ = compiled(make(EightBit.INT8, shape, for_cpu=False), rows)
    assert plain.memory_analysis().temp_size_in_bytes >= wide
