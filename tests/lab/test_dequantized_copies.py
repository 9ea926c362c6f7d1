"""Weights that a program writes out in a wider type: found in its text."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from model.compiling.compiler_options import compiler_options
from model.network.linear import Linear
from model.network.packed import use_cpu_products
from model.network.sharding import abstract_model
from model.quantization.forms import EightBit, FourBit
from scripts.lab.accounts import dequantized_copies
from tests.model.driver import TINY

KERNELS = {(4096, 14336): dequantized_copies.Quantized("layers.0.mlp.down.kernel")}
PROGRAM = """\
HloModule jit_step, is_scheduled=true

%fused (p0: s8[4096,14336], p1: bf16[8,14336]) -> bf16[8,4096] {
  %p0 = s8[4096,14336]{1,0} parameter(0)
  %inside = bf16[4096,14336]{1,0} convert(%p0)
  ROOT %dot = bf16[8,4096]{1,0} dot(%p1, %inside)
}

ENTRY %main (w: s8[4096,14336], e: bf16[4096,14336], x: bf16[8,14336]) -> bf16[8,4096] {
  %e = bf16[4096,14336]{1,0} parameter(1)
  %narrow_copy = s8[14336,4096]{1,0:T(8,128)(4,1)} copy(%w)
  %cast = bf16[4096,14336]{1,0} bitcast(%e)
  %gemm_fusion = bf16[8,4096]{1,0} fusion(%w, %x), kind=kCustom, calls=%fused
@
}
"""


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", {}),
        ("  %c = bf16[4096,14336]{1,0:T(8,128)(2,1)} convert(%w)", {"bf16[4096,14336]": 112}),
        ("  ROOT %c = f32[1,14336,4096]{2,1,0} transpose(%w)", {"f32[1,14336,4096]": 224}),
        ("  %c = (bf16[8]{0}, /*index=1*/f16[14336,4096]{1,0}) fusion(%w), calls=%f", {"f16[14336,4096]": 112}),
        ("  %c = bf16[4096,14336,2]{2,1,0} broadcast(%w)", {}),
    ],
)
def test_what_is_written_outside_of_fusions_is_found(line, found):
    expected = {f"layers.0.mlp.down.kernel: {array}": mib << 20 for array, mib in found.items()}
    assert dequantized_copies.find(PROGRAM.replace("@", line), KERNELS) == expected


@pytest.mark.parametrize(
    ("array", "bytes_found"),
    [("s4[512,256]", 0), ("s8[512,256]", 1), ("bf16[512,2,128]", 2), ("f32[2,128,512]", 4), ("bf16[512,2]", 0)],
)
def test_a_4_bit_kernel_has_copies_in_8_bits_and_in_groups(array, bytes_found):
    config = replace(TINY, hidden_size=256, intermediate_size=512, head_dim=64)
    model = abstract_model(config, dtype=jnp.bfloat16, quantization=FourBit(group=128))
    kernels = dequantized_copies.quantized_kernels(model, "gpu", None)
    assert dequantized_copies.quantized_kernels(model, "cpu", None) == {}
    width = model.layers[0].attention.qkv.kernel.shape[0]
    for shape in ((256, width), (2, 128, width)):
        assert kernels[tuple(sorted(shape))] == dequantized_copies.Quantized("layers.0.attention.qkv.kernel", 4)
    line = f"  %c = {array.replace('512', str(width))} fusion(%w), kind=kLoop, calls=%f"
    assert sum(dequantized_copies.find(PROGRAM.replace("@", line), kernels).values()) == bytes_found * width * 256


@pytest.mark.parametrize("rows", [1, 16])
def test_a_cpu_writes_a_wide_copy_unless_the_product_has_a_form_for_it(rows):
    for for_cpu, num_found in ((False, 1), (True, 0)):
        axes, form = ("mlp", "embed"), EightBit.INT8
        linear = Linear((2048, 512), axes, dtype=jnp.float32, rngs=nnx.Rngs(0), quantization=form)
        if for_cpu:
            use_cpu_products(linear)
        graph, state = nnx.split(linear)
        lowered = jax.jit(lambda state, x, graph=graph: nnx.merge(graph, state)(x)).lower(state, jnp.ones((rows, 512)))
        text = lowered.compile(compiler_options=compiler_options("cpu")).as_text()
        assert len(dequantized_copies.find(text, {(512, 2048): dequantized_copies.Quantized("kernel")})) == num_found
