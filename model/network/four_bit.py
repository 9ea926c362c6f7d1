"""The 4-bit form of a kernel: an int4 number for each weight, and for each output and group of inputs a bfloat16 scale.

A weight is `(kernel - zero) * scale`; without zeros, `kernel * scale`. Kernels are `jnp.int4`: two weights in a byte of
a chip's memory, and one in a byte of the host's.

XLA's GPU compiler dequantises inside the product, if the kernel is multiplied with its scales in bfloat16, and if the
option for sub-channel dequantisation is set (`compiler_options`). It has no such form for zeros that are subtracted
from the weights. Their part is subtracted afterwards: it is a product of the sums of each group's inputs.

For TPUs, XLA has no form that dequantises inside a product. A kernel of our own does it on each chip's part of the
weights (`pallas_kernels.tpu.int4_product`). XLA cannot split a Pallas kernel over chips, so the split is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from model.network.linear_method import Axes, LinearMethod, Weights
from model.quantization.forms import FourBit

LEAST = -8  # of -8 to 7
_LAST = (((1,), (1,)), ((), ()))


@dataclass(frozen=True)
class FourBitMethod(LinearMethod):
    """An int4 kernel with scales bf16[out, in / group] and perhaps zeros, which are split over chips as the kernel is.
    The C code of CPUs has no product with it: XLA multiplies."""

    form: FourBit

    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        """As `LinearMethod.quantize`. Zeros are 0: only a checkpoint has others."""
        kernel, scale = quantize_groups(kernel, self.form.group)
        zero = {"zero": jnp.zeros_like(scale)} if self.form.has_zeros else {}
        return {"kernel": kernel, "scale": scale} | zero

    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        return {name: (value, axes) for name, value in self.quantize(kernel).items()}

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        return multiply_groups(inputs, weights["kernel"], weights["scale"], weights.get("zero")).astype(out_dtype)

    def on_tpu(
        self, mesh: Mesh | AbstractMesh | None, axes: tuple[str | None, str | None], *, interpret: bool
    ) -> FourBitTpuMethod | None:
        out_axis, in_axis = axes
        return FourBitTpuMethod(self.form, mesh=mesh, out_axis=out_axis, in_axis=in_axis, interpret=interpret)

    def shapes(self, kernel: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """As `LinearMethod.shapes`: whole, and cut into groups."""
        num_out, width = kernel
        return kernel, (num_out, width // self.form.group, self.form.group)


@dataclass(frozen=True)
class FourBitTpuMethod(FourBitMethod):
    """For a kernel that is stored as [in, out], with scales and zeros [in / group, out].

    Args:
        mesh: the chips; None: one.
        out_axis: the axis of the mesh over which the outputs are split; None: each chip has all.
        in_axis: likewise of the inputs. The chips' products are then summed.
        interpret: runs the kernel on a CPU.
    """

    mesh: Mesh | AbstractMesh | None
    out_axis: str | None
    in_axis: str | None
    interpret: bool = False
    is_turned = True

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        """As `LinearMethod.apply`. Chips' products are summed in `out_dtype`."""
        from pallas_kernels.tpu import int4_product  # which a GPU or a CPU need not import

        def on_one(inputs: jax.Array, *values: jax.Array) -> jax.Array:
            product = int4_product.multiply(inputs, *values, out_dtype=out_dtype, interpret=self.interpret)
            return product if self.in_axis is None else lax.psum(product, self.in_axis)

        values = [weights[name] for name in ("kernel", "scale", "zero") if name in weights]
        if self.mesh is None:
            return on_one(inputs, *values)
        return jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=(P(None, self.in_axis), *(P(self.in_axis, self.out_axis) for _ in values)),
            out_specs=P(None, self.out_axis),
            check_vma=False,
        )(inputs, *values)

    def on_tpu(self, *_: Any, **__: Any) -> None:
        """As `LinearMethod.on_tpu`: this is the one for TPUs."""

    def shapes(self, kernel: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        return super().shapes(kernel[::-1])


def quantize_groups(weights: jax.Array, group: int) -> tuple[jax.Array, jax.Array]:
    """weights [out, in] of any float type -> kernel int4[out, in], scale bf16[out, in / group]. Each weight is rounded
    to the nearest multiple of its scale.

    The weight of the largest magnitude in a group becomes -8 (of two, the positive one), so a scale may be negative.
    The other sign has one step less, and its weights beyond that are clipped to 7. A group with a non-finite weight
    gets a non-finite scale.
    """
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, group)
    high, low = (extreme(grouped, axis=2, keepdims=True) for extreme in (jnp.max, jnp.min))
    scale = (jnp.where(high >= -low, high, low) * (1 / LEAST)).astype(jnp.bfloat16)
    divisor = jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))  # a group of zeros
    steps = jnp.clip(jnp.round(grouped / divisor), LEAST, -LEAST - 1)
    return steps.astype(jnp.int4).reshape(weights.shape), scale[:, :, 0]


def multiply_groups(inputs: jax.Array, kernel: jax.Array, scale: jax.Array, zero: jax.Array | None) -> jax.Array:
    """inputs [T, in] times the transpose of a kernel int4[out, in]: f32[T, out].

    Weights are rounded to the inputs' type, as are weights that are not quantised.

    Args:
        scale: bf16[out, in / group].
        zero: bf16[out, in / group], in units of the scale; None: there are none.
    """
    num_out, groups = scale.shape
    precision = lax.Precision.HIGHEST if inputs.dtype == jnp.float32 else None
    scale = scale.astype(inputs.dtype)
    dequantized = kernel.astype(inputs.dtype).reshape(num_out, groups, -1) * scale[:, :, None]
    product = lax.dot_general(
        inputs, dequantized.reshape(num_out, -1), _LAST, precision=precision, preferred_element_type=jnp.float32
    )
    if zero is None:
        return product
    sums = jnp.sum(inputs.astype(jnp.float32).reshape(-1, groups, inputs.shape[1] // groups), axis=2)
    offset = zero.astype(jnp.float32) * scale.astype(jnp.float32)
    return product - lax.dot_general(sums, offset, _LAST, precision=precision)
