"""Products with weights: every projection of a layer and the head are a `Linear`.

Within the network, only this file knows how weights are stored, split over chips, and multiplied on each platform.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.network.cpu_products import multiply_few, multiply_int8
from model.network.group_products import multiply_groups
from model.network.narrow_products import multiply_narrow
from model.quantization.eight_bit import quantize
from model.quantization.forms import FourBit, Rounding, WeightForm
from model.quantization.four_bit import quantize_groups
from pallas_kernels.cpu import products

if TYPE_CHECKING:
    from model.network.tpu_groups import TpuGroups

INIT_STDDEV = 0.02


def normal_param(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]
) -> nnx.Param[jax.Array]:
    """Normally distributed weights, or zeros without `rngs`. `axes`: the logical names of their dimensions."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype), axes=axes)
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


class Linear(nnx.Module):
    """Inputs [T, in] times the transpose of a kernel [out, in]: [T, out].

    Args:
        shape: of the kernel, (out, in).
        axes: the logical names of both dimensions; `sharding.RULES` maps them to the mesh.
        dtype: of the kernel if it is not quantised.
        quantization: stores the kernel in 8 bits, with a scale f32[out] that is split in the same way as the outputs;
            or in 4 bits, with scales bf16[out, in / group] and perhaps zeros, which are split as the kernel is.
        rounding: of the inputs of an 8-bit kernel; None: they keep their type.
        for_cpu: uses the forms of `cpu_products` where they are faster, unless the kernel is packed (`packed`).

    Attributes:
        on_tpu: if it is set (`packed.pack_for_tpu`), a 4-bit kernel and its scales and zeros are stored as [in, ..].
    """

    def __init__(
        self,
        shape: tuple[int, int],
        axes: tuple[str, str],
        *,
        dtype: Any,
        rngs: nnx.Rngs | None,
        quantization: WeightForm | None = None,
        rounding: Rounding | None = None,
        for_cpu: bool = False,
    ):
        self.for_cpu = for_cpu
        self.rounding = rounding
        self.on_tpu: TpuGroups | None = None
        is_static = quantization is not None and rounding is not None and rounding.is_static
        self.input_scale = nnx.Param(jnp.ones((), jnp.float32), axes=()) if is_static else None
        kernel = normal_param(rngs, shape, dtype, axes)
        has_zeros = isinstance(quantization, FourBit) and quantization.has_zeros
        if quantization is None:
            self.kernel, self.scale = kernel, None
        elif isinstance(quantization, FourBit):
            narrow, scale = quantize_groups(kernel[...], quantization.group)
            self.kernel, self.scale = nnx.Param(narrow, axes=axes), nnx.Param(scale, axes=axes)
        else:
            narrow, scale = quantize(kernel[...], quantization)
            self.kernel, self.scale = nnx.Param(narrow, axes=axes), nnx.Param(scale, axes=axes[:1])
        self.zero = nnx.Param(jnp.zeros_like(scale), axes=axes) if has_zeros else None

    def __call__(self, inputs: jax.Array, out_dtype: Any = None) -> jax.Array:
        kernel, out_dtype = self.kernel[...], out_dtype or inputs.dtype
        if self.scale is None:
            return multiply(inputs, kernel, for_cpu=self.for_cpu, out_dtype=out_dtype)
        if kernel.dtype == jnp.int4:
            zero = None if self.zero is None else self.zero[...]
            if self.on_tpu is not None:
                return self.on_tpu.multiply(inputs, kernel, self.scale[...], zero, out_dtype)
            return multiply_groups(inputs, kernel, self.scale[...], zero).astype(out_dtype)
        input_scale = None if self.input_scale is None else self.input_scale[...]
        if kernel.ndim == 3 and self.rounding is not None:
            return products.multiply_rounded(inputs, kernel, self.scale[...], input_scale, out_dtype)
        if kernel.ndim == 3:
            return products.multiply(inputs, kernel, out_dtype, self.scale[...])
        if self.rounding is not None and inputs.shape[0] >= self.rounding.min_rows:
            product = multiply_narrow(inputs, kernel, input_scale)
        elif self.for_cpu and kernel.dtype == jnp.int8:
            product = multiply_int8(inputs, kernel)
        else:
            # XLA converts the kernel inside the product: no converted copy of it is written.
            product = multiply(inputs, kernel.astype(inputs.dtype), for_cpu=False, out_dtype=jnp.float32)
        return (product * self.scale[...]).astype(out_dtype)


def multiply(inputs: jax.Array, kernel: jax.Array, *, for_cpu: bool, out_dtype: Any = None) -> jax.Array:
    """inputs [T, in] times the transpose of kernel [out, in], which may be packed: [T, out]. Float32 products have full
    precision on every chip, instead of a chip's fast mode."""
    out_dtype = out_dtype or inputs.dtype
    if kernel.ndim == 3:
        return products.multiply(inputs, kernel, out_dtype)
    if for_cpu and (product := multiply_few(inputs, kernel, out_dtype)) is not None:
        return product
    return jax.lax.dot_general(
        inputs,
        kernel,
        (((1,), (1,)), ((), ())),
        precision=jax.lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None,
        preferred_element_type=out_dtype,
    )


def rows_of(kernel: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows [T, in] of a kernel [out, in], which may be packed. Numbers past its end give any row."""
    return products.rows_of(kernel, rows) if kernel.ndim == 3 else kernel.at[rows].get(mode="clip")
