"""How a `Linear` stores its kernel and multiplies with it: one method for each form of weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from model.network.cpu_products import multiply_few
from model.quantization.forms import WeightForm
from pallas_kernels.cpu import products

Weights = Mapping[str, jax.Array]  # the parameters of a `Linear`, by name
Axes = tuple[str, ...]  # the logical names of an array's dimensions


class LinearMethod(ABC):
    """How one form of weights is stored and multiplied. A method is a value: modules with equal methods trace the same
    program, and its `repr` is part of a program's identity."""

    form: WeightForm | None  # None: the kernel is not quantised
    is_turned = False  # all parameters are transposed

    @abstractmethod
    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        """The parameters, by name, that are computed from a kernel [out, in] of any float type."""

    @abstractmethod
    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        """All parameters for a kernel [out, in] with the logical `axes`, each with its own axes."""

    @abstractmethod
    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        """inputs [T, in] times the transpose of the kernel: [T, out]. The kernel may be packed (`packed.pack`)."""

    def can_pack(self, kernel: jax.Array | jax.ShapeDtypeStruct) -> bool:
        """Whether the C code of CPUs reads a kernel [out, in]. Raises ValueError if it has no such product at all."""
        return products.can_pack(kernel)

    def pack(self, name: str, value: jax.Array) -> jax.Array:
        """A parameter in the layout that the C code reads. A packed parameter has three dimensions; others are
        unchanged."""
        return products.pack(value) if name == "kernel" else value

    def on_tpu(
        self, mesh: Mesh | AbstractMesh | None, axes: tuple[str | None, str | None], *, interpret: bool
    ) -> LinearMethod | None:
        """The method by which a TPU multiplies; all of its parameters are transposed. None: a TPU uses this method.

        Args:
            mesh: the chips; None: one chip.
            axes: the axes of the mesh over which outputs and inputs are split; None: each chip has all.
            interpret: a CPU computes what the TPU would.
        """
        return None


@dataclass(frozen=True)
class Unquantized(LinearMethod):
    """A kernel in the dtype of the computation.

    Args:
        for_cpu: uses the forms of `cpu_products` where they are faster (`packed.use_cpu_products`).
    """

    for_cpu: bool = False
    form = None

    def quantize(self, kernel: jax.Array) -> dict[str, jax.Array]:
        return {"kernel": kernel}

    def create(self, kernel: jax.Array, axes: Axes) -> dict[str, tuple[jax.Array, Axes]]:
        return {"kernel": (kernel, axes)}

    def apply(self, inputs: jax.Array, weights: Weights, out_dtype: Any) -> jax.Array:
        return multiply(inputs, weights["kernel"], for_cpu=self.for_cpu, out_dtype=out_dtype)


def multiply(inputs: jax.Array, kernel: jax.Array, *, for_cpu: bool = False, out_dtype: Any = None) -> jax.Array:
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
