"""The 4-bit forms of a kernel: an int4 number for each weight, and for each output and group of inputs a scale.

A weight is `(kernel - zero) * scale`; without zeros, `kernel * scale`. Kernels are `jnp.int4`: two weights in a byte of
a device's memory, and one in a byte of NumPy's. Scales and zeros are bfloat16.

CPUs also read the scales and zeros of GGUF, GPTQ and similar formats as they are stored (`forms.Numbers`). Zeros are
then uint8, with 8 added to them. A group may have an offset in place of a zero: a weight is then
`(kernel + 8) * scale - offset`. The C code of `pallas_kernels.cpu.four_bit` multiplies with all of these.

In NVFP4 a kernel holds codes of e2m1, -7 to 7, in `jnp.int4`: the sign and the place of the magnitude among 0, 0.5, 1,
1.5, 2, 3, 4 and 6. Each output has a float32 factor, `row_scale`, which is half the scale of all scales of its tensor:
the codes are decoded in halves, to small integers (`halves_of`). These times the scale of a group have at most six
significant bits, so the weights of a product are exact in bfloat16. The product is multiplied with the factor in
float32, as that of an 8-bit kernel is.

XLA's GPU compiler dequantises inside the product if the kernel is multiplied with its scales in bfloat16, and if the
option for sub-channel dequantisation is set (`compiler_options`). It cannot do this for zeros that are subtracted from
the weights. The part of the zeros is subtracted afterwards: it is a product with the sums of each group's inputs.

XLA's TPU compiler cannot dequantise int4 inside a product. A Pallas kernel does it on each chip's part of the weights
(`pallas_kernels.tpu.int4_product`). XLA cannot split a Pallas kernel over chips, so this module splits it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from model.network.eight_bit import round_rows
from model.network.linear_method import Axes, LinearMethod, Weights
from model.quantization.forms import GROUPS_OF_A_UNIT, EightBit, FourBit, Rounding, ScaleFormat
from pallas_kernels.cpu import four_bit

LEAST = -8  # the least int4; the largest is 7
STEPS = 15  # from the least value to the largest
_LARGEST_OF_6_BITS = 63
_BETWEEN_HALVES = (0.5, 1.5, 2.5, 3.5, 5, 7, 10)  # between the magnitudes of e2m1, in halves
_LAST = (((1,), (1,)), ((), ()))


@dataclass(frozen=True)
class FourBitMethod(LinearMethod):
    """An int4 kernel with scales [out, in / group] and perhaps zeros or offsets, all split as the kernel is. In NVFP4
    there is also a `row_scale` [out, 1], split as the outputs are.

    Args:
        rounding: if given, inputs are rounded (`round_blocks`); None: they keep their type.
    """

    form: FourBit
    rounding: Rounding | None = field(default=None, kw_only=True)

    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        """The parameters for a kernel [out, in], by name. All zeros are 0: only a checkpoint has others."""
        numbers = self.form.numbers
        if self.form.is_float:
            return quantize_to_nvfp4(kernel, self.form.group)
        if numbers.has_offsets:
            return quantize_with_offsets(kernel, self.form)
        kernel, scale = quantize_groups(kernel, self.form.group, numbers.scale_dtype)
        if not self.form.has_zeros:
            return {"kernel": kernel, "scale": scale}
        zero, dtype = (0, jnp.bfloat16) if numbers is ScaleFormat.CHIP else (four_bit.MIDDLE, jnp.uint8)
        return {"kernel": kernel, "scale": scale, "zero": jnp.full(scale.shape, zero, dtype)}

    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        made = self.quantize(kernel)
        return {name: (value, (axes[0], "rows") if name == "row_scale" else axes) for name, value in made.items()}

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        numbers = self.form.numbers
        if weights["kernel"].ndim == 3:
            return self._in_c(inputs, weights, out_dtype)
        kernel, scale, zero = weights["kernel"], weights["scale"], weights.get("zero")
        if self.form.is_float:
            product = multiply_groups(inputs, halves_of(kernel, inputs.dtype), scale)
            return (product * weights["row_scale"][:, 0]).astype(out_dtype)
        if self.rounding is not None:
            inputs = round_blocks(inputs)
        elif numbers is not ScaleFormat.CHIP:
            inputs = inputs.astype(jnp.float32)
        if numbers.has_offsets:
            return multiply_with_offsets(inputs, kernel, *scale_and_offset(weights)).astype(out_dtype)
        if zero is not None and zero.dtype == jnp.uint8:
            zero = zero.astype(jnp.float32) - four_bit.MIDDLE
        return multiply_groups(inputs, kernel, scale, zero).astype(out_dtype)

    def _in_c(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        """The product [T, out] with packed weights, by the C code."""
        kernel, scale, zero = weights["kernel"], weights["scale"], weights.get("zero")
        if zero is not None and zero.dtype != jnp.uint8:
            zero = (four_bit.MIDDLE + zero.astype(jnp.float32)) * scale.astype(jnp.float32)
        offset, units = weights.get("offset", zero), (weights.get("scale_unit"), weights.get("offset_unit"))
        rounds = self.rounding is not None
        return four_bit.multiply(inputs, kernel, scale, offset, *units, round_inputs=rounds, out_dtype=out_dtype)

    def can_pack(self, kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
        return four_bit.can_pack(kernel.shape, self.form.group)

    def pack(self, name: str, value: jax.Array) -> jax.Array:
        return four_bit.pack(value) if name == "kernel" else four_bit.pack_groups(value)

    def on_tpu(
        self, mesh: Mesh | AbstractMesh | None, axes: tuple[str | None, str | None], *, interpret: bool
    ) -> FourBitTpuMethod | None:
        out_axis, in_axis = axes
        return FourBitTpuMethod(self.form, mesh=mesh, out_axis=out_axis, in_axis=in_axis, interpret=interpret)


@dataclass(frozen=True)
class FourBitTpuMethod(FourBitMethod):
    """An int4 kernel that is stored as [in, out], with scales and zeros [in / group, out] and a `row_scale` [1, out].

    Args:
        mesh: the chips; None: one chip.
        out_axis: the axis of the mesh over which the outputs are split; None: each chip has all.
        in_axis: the axis over which the inputs are split; the products of the chips are then summed.
        interpret: runs the kernel on a CPU.
    """

    mesh: Mesh | AbstractMesh | None
    out_axis: str | None
    in_axis: str | None
    interpret: bool = False
    is_turned = True

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        """inputs [T, in] times the kernel [in, out]: [T, out]. The products of the chips are summed in `out_dtype`."""
        from pallas_kernels.tpu import int4_product  # only TPUs import it

        def on_one(inputs: jax.Array, values: Weights) -> jax.Array:
            product = int4_product.multiply(inputs, **values, out_dtype=out_dtype, interpret=self.interpret)
            return product if self.in_axis is None else lax.psum(product, self.in_axis)

        if self.mesh is None:
            return on_one(inputs, weights)
        specs = {name: P(None if name == "row_scale" else self.in_axis, self.out_axis) for name in weights}
        return jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=(P(None, self.in_axis), specs),
            out_specs=P(None, self.out_axis),
            check_vma=False,
        )(inputs, dict(weights))

    def on_tpu(self, *_: Any, **__: Any) -> None:
        """None: this method is already the one for TPUs."""


def quantize_groups(weights: jax.Array, group: int, scale_dtype: Any = jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    """weights [out, in] of any float type -> kernel int4[out, in], scale [out, in / group]. Each weight is rounded to
    the nearest multiple of its scale.

    The weight of the largest magnitude in a group becomes -8, so a scale may be negative. If two weights have this
    magnitude, the positive one becomes -8. Values above 7 are clipped to 7. A group with a non-finite weight gets a
    non-finite scale.
    """
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, group)
    high, low = (extreme(grouped, axis=2, keepdims=True) for extreme in (jnp.max, jnp.min))
    scale = (jnp.where(high >= -low, high, low) * (1 / LEAST)).astype(scale_dtype)
    divisor = jnp.where(scale == 0, 1.0, scale.astype(jnp.float32))  # a group of zeros
    steps = jnp.clip(jnp.round(grouped / divisor), LEAST, -LEAST - 1)
    return steps.astype(jnp.int4).reshape(weights.shape), scale[:, :, 0]


def quantize_to_nvfp4(weights: jax.Array, group: int) -> dict[str, jax.Array]:
    """weights [out, in] of any float type -> the parameters of NVFP4. Each weight is rounded to the nearest e2m1 times
    its scale, and each scale to e4m3. A group with a non-finite weight gets a non-finite scale."""
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, group)
    scale = jnp.max(jnp.abs(grouped), axis=2) * np.float32(1 / 12)  # 12 halves
    row_scale = jnp.max(scale, axis=1, keepdims=True) * np.float32(1 / EightBit.FP8.largest)
    row_scale = jnp.where(row_scale == 0, 1.0, row_scale)
    scale = jnp.minimum(scale / row_scale, EightBit.FP8.largest).astype(EightBit.FP8.dtype).astype(jnp.bfloat16)
    halves = grouped / (jnp.where(scale == 0, 1.0, scale.astype(jnp.float32)) * row_scale)[:, :, None]
    code = sum((jnp.abs(halves) > bound).astype(jnp.int8) for bound in _BETWEEN_HALVES)
    kernel = jnp.where(halves < 0, -code, code).astype(jnp.int4).reshape(weights.shape)
    return {"kernel": kernel, "scale": scale, "row_scale": row_scale}


def halves_of(kernel: jax.Array, dtype: Any) -> jax.Array:
    """The codes of e2m1, from -7 to 7, as the halves that they stand for: 0, 1, 2, 3, 4, 6, 8 or 12, with the sign.

    A cubic function of the code, rounded, gives the same numbers in bfloat16 and in float32. Its steps have one array
    and constants, or multiply two conversions: XLA's GPU compiler does not fuse sums or choices of several arrays
    ("Weights in NVFP4" in `scripts/lab/results/decisions.md`).
    """
    code = kernel.astype(jnp.int8)
    return jnp.floor(code.astype(dtype) * (code * code + 34).astype(dtype) * 0.02 + 0.5)


def quantize_with_offsets(weights: jax.Array, form: FourBit) -> dict[str, jax.Array]:
    """weights [out, in] of any float type -> the parameters of a form with offsets.

    Each weight is rounded to the nearest of 16 equal steps. They go from the least weight of the group, or 0 if that is
    less, to the largest weight, or 0 if that is larger. In `Q4_K`, scales and offsets are rounded to 6 bits first. A
    group with a non-finite weight gets numbers that are not finite.
    """
    grouped = weights.astype(jnp.float32).reshape(weights.shape[0], -1, form.group)
    offset = -jnp.minimum(jnp.min(grouped, axis=2), 0)
    scale = (jnp.maximum(jnp.max(grouped, axis=2), 0) + offset) * np.float32(1 / STEPS)
    if form.numbers is ScaleFormat.Q4_K:
        numbers = _in_6_bits("scale", scale) | _in_6_bits("offset", offset)
    else:
        numbers = {"scale": scale.astype(jnp.float16), "offset": offset.astype(jnp.float16)}
    scale, offset = scale_and_offset(numbers)
    steps = jnp.round((grouped + offset[:, :, None]) / jnp.where(scale == 0, 1.0, scale)[:, :, None])
    kernel = jnp.clip(steps, 0, STEPS) + LEAST
    return {"kernel": kernel.astype(jnp.int4).reshape(weights.shape)} | numbers


def _in_6_bits(name: str, values: jax.Array) -> dict[str, jax.Array]:
    """f32[out, groups] -> u8[out, groups], 0 to 63, and their float16 units [out, groups / 8]."""
    blocks = values.reshape(values.shape[0], -1, GROUPS_OF_A_UNIT)
    unit = (jnp.max(blocks, axis=2, keepdims=True) * np.float32(1 / _LARGEST_OF_6_BITS)).astype(jnp.float16)
    steps = jnp.round(blocks / jnp.where(unit == 0, 1.0, unit.astype(jnp.float32)))
    whole = jnp.clip(steps, 0, _LARGEST_OF_6_BITS).astype(jnp.uint8).reshape(values.shape)
    return {name: whole, f"{name}_unit": unit[:, :, 0]}


def scale_and_offset(weights: Weights) -> tuple[jax.Array, jax.Array]:
    """The exact scales and offsets, f32[out, in / group] each, of a form with offsets."""
    scale, offset = (weights[name].astype(jnp.float32) for name in ("scale", "offset"))
    if "scale_unit" not in weights:
        return scale, offset
    units = [weights[name].astype(jnp.float32) for name in ("scale_unit", "offset_unit")]
    of_scale, of_offset = (jnp.repeat(unit, GROUPS_OF_A_UNIT, axis=1) for unit in units)
    return scale * of_scale, offset * of_offset


def round_blocks(inputs: jax.Array) -> jax.Array:
    """Rounds each block of 256 neighbouring inputs of inputs [T, in] to int8 with its own scale, and widens the result:
    f32[T, in]. The last block may have fewer inputs."""
    rows, width = inputs.shape
    whole = jnp.pad(inputs.astype(jnp.float32), ((0, 0), (0, -width % four_bit.PART)))
    rounded, scale = round_rows(whole.reshape(-1, four_bit.PART), EightBit.INT8)
    return (rounded.astype(jnp.float32) * scale).reshape(rows, -1)[:, :width]


def multiply_with_offsets(inputs: jax.Array, kernel: jax.Array, scale: jax.Array, offset: jax.Array) -> jax.Array:
    """inputs [T, in] times the transpose of a kernel int4[out, in] with offsets: f32[T, out].

    Args:
        scale, offset: the exact values, f32[out, in / group] each.
    """
    values = (kernel.astype(jnp.float32) - LEAST).reshape(*scale.shape, -1)
    weights = (values * scale[:, :, None] - offset[:, :, None]).reshape(kernel.shape)
    return lax.dot_general(inputs.astype(jnp.float32), weights, _LAST, precision=lax.Precision.HIGHEST)


def multiply_groups(inputs: jax.Array, kernel: jax.Array, scale: jax.Array, zero: jax.Array | None = None) -> jax.Array:
    """inputs [T, in] times the transpose of a kernel of small integers [out, in]: f32[T, out].

    The dequantised weights are rounded to the inputs' type.

    Args:
        scale: [out, in / group]; the inputs' type holds its values exactly.
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
