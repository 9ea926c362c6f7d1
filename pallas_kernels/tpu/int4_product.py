"""Products with int4 kernels that have a scale for each group of inputs.

XLA writes such a kernel to memory in bfloat16 before every product. This Pallas kernel dequantises blocks in VMEM, so
it reads 4 bits per weight from memory. Each tile of rows dequantises all blocks, while the matrix units multiply.

The kernel is stored as [in, out]. The scales of a group are then one row of lanes. Stored as [out, in], each scale
would have to be spread over lanes, which takes more instructions than the product.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.tpu import vmem

MIB = 1 << 20
INPUT_BYTES = 32 * MIB  # of VMEM for a block of inputs, and the next one
KERNEL_BYTES = 16 * MIB  # of VMEM for a block of the kernel in 4 bits, the next one, and a dequantised block
MAX_ROWS, MIN_ROWS = 512, 128  # rows of a block
MAX_OUT, MIN_OUT = 512, 256  # outputs of a block; with fewer, a matrix unit of a v6e would be half idle


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """The sizes of the blocks that one turn of the kernel multiplies."""

    rows: int
    out: int


def choose_blocks(rows: int, num_in: int, num_out: int, itemsize: int) -> Blocks:
    """Blocks that fit in VMEM, and whose code the compiler lays out in seconds.

    Args:
        itemsize: bytes of an input.
    """
    most, widest = MAX_ROWS, MAX_OUT
    while most > MIN_ROWS and 2 * most * num_in * itemsize > INPUT_BYTES:
        most //= 2
    while widest > MIN_OUT and num_in * widest * (1 + itemsize) > KERNEL_BYTES:
        widest //= 2
    return Blocks(rows=min(rows, most), out=min(num_out, widest))


@functools.partial(jax.jit, static_argnames=("out_dtype", "blocks", "interpret"))
def multiply(
    inputs: jax.Array,  # [T, in]
    kernel: jax.Array,  # int4[in, out]
    scale: jax.Array,  # bf16[in / group, out]
    zero: jax.Array | None = None,  # bf16[in / group, out], in units of the scale
    row_scale: jax.Array | None = None,  # f32[1, out]
    *,
    out_dtype: Any,
    blocks: Blocks | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> jax.Array:
    """inputs times `(kernel - zero) * scale`: [T, out] of `out_dtype`, summed in float32.

    The dequantised weights are rounded to the inputs' type.

    Args:
        zero: the zero of each group; None: there are none.
        row_scale: a factor of each output. If it is given, the kernel holds codes of e2m1, and is decoded in halves
            (`model.network.four_bit`).
        blocks: block sizes that replace the chosen ones.
        interpret: runs the kernel on a CPU.
    """
    rows, num_in = inputs.shape
    groups, num_out = scale.shape
    blocks = blocks or choose_blocks(rows, num_in, num_out, inputs.dtype.itemsize)
    dequantized = pltpu.VMEM((num_in, blocks.out), inputs.dtype)
    of_groups = pl.BlockSpec((groups, blocks.out), lambda t, n: (0, n))
    zeros = [] if zero is None else [zero]
    factors = [] if row_scale is None else [row_scale]
    buffers = [
        *2 * [jax.ShapeDtypeStruct((blocks.rows, num_in), inputs.dtype)],
        jax.ShapeDtypeStruct((num_in, blocks.out), jnp.int8),  # two of int4
        *2 * [jax.ShapeDtypeStruct((blocks.rows, blocks.out), jnp.float32)],
    ]
    return pl.pallas_call(
        functools.partial(_kernel, group=num_in // groups, is_float=row_scale is not None),
        # A block of inputs stays for all blocks of outputs: what is read again for other rows is the int4 kernel.
        grid=(pl.cdiv(rows, blocks.rows), pl.cdiv(num_out, blocks.out)),
        in_specs=[
            pl.BlockSpec((blocks.rows, num_in), lambda t, n: (t, 0)),
            pl.BlockSpec((num_in, blocks.out), lambda t, n: (0, n)),
            *(1 + len(zeros)) * [of_groups],
            *len(factors) * [pl.BlockSpec((1, blocks.out), lambda t, n: (0, n))],
        ],
        out_specs=pl.BlockSpec((blocks.rows, blocks.out), lambda t, n: (t, n)),
        out_shape=jax.ShapeDtypeStruct((rows, num_out), out_dtype),
        scratch_shapes=[dequantized],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=vmem.bytes_with([dequantized, *buffers])
        ),
        interpret=interpret,
        name="int4_product",
    )(inputs, kernel, scale, *zeros, *factors)


def _kernel(inputs: Any, kernel: Any, scale: Any, *rest: Any, group: int, is_float: bool) -> None:
    """References to blocks: [rows, in], int4[in, out], [groups, out] once or twice, [1, out] of e2m1, [rows, out] and
    [in, out]. Straight code: the compiler dequantises the last weights while the first are multiplied."""
    *zero, out, dequantized = rest
    factor = zero.pop() if is_float else None
    for g in range(dequantized.shape[0] // group):
        within = slice(g * group, (g + 1) * group)
        weights = kernel[within].astype(dequantized.dtype)
        if is_float:  # the slope is 1 up to 4, 2 up to 6, and then 4
            weights = 4 * weights - jnp.clip(weights, -4, 4) - 2 * jnp.clip(weights, -6, 6)
        for z in zero:
            weights = weights - z[g : g + 1].astype(dequantized.dtype)
        dequantized[within] = weights * scale[g : g + 1].astype(dequantized.dtype)
    precision = lax.Precision.HIGHEST if dequantized.dtype == jnp.float32 else None
    product = jnp.dot(inputs[...], dequantized[...], precision=precision, preferred_element_type=jnp.float32)
    out[...] = (product if factor is None else product * factor[...]).astype(out.dtype)
