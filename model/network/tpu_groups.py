"""Products with 4-bit kernels on TPUs: a kernel of our own, on each chip's part of the weights.

XLA has no form that dequantises such a kernel inside a product on TPUs. It cannot split a Pallas kernel over chips,
either: the split is written here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P


@dataclass(frozen=True, kw_only=True)
class TpuGroups:
    """How a `Linear` multiplies a 4-bit kernel that is stored as [in, out], with scales and zeros [in / group, out].

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

    def multiply(
        self, inputs: jax.Array, kernel: jax.Array, scale: jax.Array, zero: jax.Array | None, out_dtype: Any
    ) -> jax.Array:
        """inputs [T, in] times the kernel: [T, out] of `out_dtype`. Chips' products are summed in that type."""
        from pallas_kernels.tpu import int4_product  # which a GPU or a CPU need not import

        weights = (kernel, scale) if zero is None else (kernel, scale, zero)

        def on_one(inputs: jax.Array, *weights: jax.Array) -> jax.Array:
            product = int4_product.multiply(inputs, *weights, out_dtype=out_dtype, interpret=self.interpret)
            return product if self.in_axis is None else lax.psum(product, self.in_axis)

        if self.mesh is None:
            return on_one(inputs, *weights)
        return jax.shard_map(
            on_one,
            mesh=self.mesh,
            in_specs=(P(None, self.in_axis), *(P(self.in_axis, self.out_axis) for _ in weights)),
            out_specs=P(None, self.out_axis),
            check_vma=False,
        )(inputs, *weights)
