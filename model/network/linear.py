"""Products with weights: every projection of a layer and the head are a `Linear`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from model.network.eight_bit import EightBitMethod
from model.network.four_bit import FourBitMethod
from model.network.linear_method import LinearMethod, Unquantized
from model.network.six_bit import SixBitMethod
from model.quantization.forms import EightBit, FourBit, Plain, Rounding, SixBit, WeightForm
from pallas_kernels.cpu import products

INIT_STDDEV = 0.02


def normal_param(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], dtype: Any, axes: tuple[str, ...]
) -> nnx.Param[jax.Array]:
    """Normally distributed weights, or zeros without `rngs`. `axes`: the logical names of their dimensions."""
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype), axes=axes)
    return nnx.Param(INIT_STDDEV * jax.random.normal(rngs.params(), shape, dtype), axes=axes)


_METHODS: dict[type[WeightForm], Callable[..., LinearMethod]] = {
    EightBit: EightBitMethod,
    FourBit: FourBitMethod,
    SixBit: SixBitMethod,
}


def linear_method(form: WeightForm | None, rounding: Rounding | None = None) -> LinearMethod:
    """The method for one kernel of this form. `None` and `Plain` are kernels that are not quantised."""
    return Unquantized() if form is None or form == Plain() else _METHODS[type(form)](form, rounding=rounding)


class Linear(nnx.Module):
    """Inputs [T, in] times the transpose of a kernel [out, in]: [T, out].

    Args:
        shape: the shape (out, in) of the kernel.
        axes: the logical names of both dimensions; `sharding.RULES` maps them to the mesh.
        dtype: the dtype of a kernel that is not quantised.
        quantization: the form of the kernel; None: it is not quantised.
        rounding: how the inputs of a quantised kernel are rounded; None: they keep their type.

    Attributes:
        method: decides which parameters there are (`kernel` is always one), and multiplies with them.
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
    ):
        self.method = linear_method(quantization, rounding)
        kernel = normal_param(rngs, shape, dtype, axes)
        self.kernel: nnx.Param[jax.Array]
        for name, (value, of_value) in self.method.create(kernel[...], axes).items():
            setattr(self, name, nnx.Param(value, axes=of_value))

    def __call__(self, inputs: jax.Array, out_dtype: Any = None) -> jax.Array:
        weights = {name: param[...] for name, param in self.parameters().items()}
        return self.method.apply(inputs, weights, out_dtype or inputs.dtype)

    def parameters(self) -> dict[str, nnx.Param[jax.Array]]:
        """The kernel and the other parameters of the form, by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, nnx.Param)}


class SplitLinear(nnx.Module):
    """A fused projection whose tensors have several forms. Each tensor is a `Linear`, and the attribute that holds it
    has the tensor's name.

    Args:
        parts: the projection of each tensor, by its name, in the order of the outputs.
        num_shards: the number of groups into which the outputs are divided (`layers.Attention`).
    """

    def __init__(self, parts: Mapping[str, Linear], num_shards: int):
        self.names = tuple(parts)
        self.num_shards = num_shards
        for name, part in parts.items():
            setattr(self, name, part)

    def __call__(self, inputs: jax.Array, out_dtype: Any = None) -> jax.Array:
        parts: list[jax.Array] = [getattr(self, name)(inputs, out_dtype) for name in self.names]
        groups = [part.reshape(part.shape[0], self.num_shards, -1) for part in parts]
        return jnp.concatenate(groups, axis=2).reshape(inputs.shape[0], -1)


def methods_of(model: nnx.Module) -> dict[str, LinearMethod]:
    """The method of each `Linear` of a model, by the module's path, such as "layers.3.mlp.down"."""
    modules = ((".".join(map(str, path)), module) for path, module in nnx.iter_graph(model))
    return {path: module.method for path, module in modules if isinstance(module, Linear)}


def rows_of(kernel: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows [T, in] of a kernel [out, in], which may be packed. A number out of range gives an arbitrary row."""
    return products.rows_of(kernel, rows) if kernel.ndim == 3 else kernel.at[rows].get(mode="clip")
