"""The forms of weights that one platform's own products read: the C code of a CPU (`pallas_kernels.cpu.products`), and
the int4 product of TPUs (`pallas_kernels.tpu.int4_product`).

A model is packed once, after it is loaded: checkpoints and the code that loads them know one form only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from model.network.eagle import EagleHead
from model.network.layers import Attention, Mlp, RMSNorm
from model.network.linear import Linear
from model.network.llama import Llama
from model.network.sharding import RULES, sharding_of
from model.network.tpu_groups import TpuGroups
from pallas_kernels.cpu import products


def pack[M: Llama | EagleHead](model: M) -> M:
    """Packs the kernels of the projections and of the head for C, in place and one by one; of an abstract model, their
    shapes. Kernels that have no packed form, such as those whose outputs are not whole panels, stay as they are, and
    XLA multiplies them. Returns the model. An embedding that is also the head is packed, too. What is between the
    products is then also computed in C, so that the bits of a token do not depend on the others.

    Raises:
        ValueError: inputs are rounded in some steps only. The packed kernels are for all steps or for none.
    """
    kernels = [(x.kernel, _together(x)) for _, x in nnx.iter_graph(model) if isinstance(x, Linear)]
    if isinstance(model, Llama) and model.head is None:
        kernels.append((model.embedding, None))
    for kernel, together in kernels:
        value = kernel.get_value()
        if products.can_pack(value, together):
            kernel.set_value(_packed(value, together))
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Attention | Mlp | RMSNorm):
            module.in_c = True
    return model


def _together(linear: Linear) -> int | None:
    """As for `products.pack`."""
    if linear.rounding is None or linear.kernel.get_value().dtype != jnp.int8:
        return None
    if linear.rounding.min_rows > 1:
        raise ValueError(f"a CPU rounds inputs in all steps or in none, not from {linear.rounding.min_rows} rows on")
    return products.TOGETHER_ROUNDED


def pack_for_tpu[M: nnx.Module](model: M, mesh: Mesh | AbstractMesh | None, *, interpret: bool = False) -> M:
    """Stores the 4-bit kernels of a model or a `Linear` as [in, out], with scales and zeros [in / group, out], in place
    and one by one; of an abstract model, their shapes. Returns the model.

    Args:
        mesh: on which the model is; None: on one chip.
        interpret: a CPU computes what the TPU would.
    """
    linears = [module for _, module in nnx.iter_graph(model) if isinstance(module, Linear)]
    for module in linears:
        if module.kernel.get_value().dtype != jnp.int4 or module.on_tpu is not None:
            continue
        axes = module.kernel.get_metadata("axes")
        out_axis, in_axis = (None if mesh is None else RULES[axis] for axis in axes)
        for name in ("kernel", "scale", "zero"):
            if (param := getattr(module, name)) is not None:
                turned = _turned(param.get_value(), axes[::-1], mesh)
                setattr(module, name, nnx.Param(turned, axes=axes[::-1]))
        module.on_tpu = TpuGroups(mesh=mesh, out_axis=out_axis, in_axis=in_axis, interpret=interpret)
    return model


def _packed(value: jax.Array | jax.ShapeDtypeStruct, together: int | None) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(value, jax.ShapeDtypeStruct):
        like = jax.eval_shape(partial(products.pack, together=together), value)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=value.sharding)
    # One at a time: the memory of the other form is then free again.
    return jax.block_until_ready(products.pack(value, together))


def _turned(value: Any, axes: tuple[str, ...], mesh: Mesh | AbstractMesh | None) -> Any:
    """A matrix, transposed. `axes`: the logical names of its dimensions afterwards."""
    sharding = value.sharding if mesh is None else sharding_of(axes, mesh)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape[::-1], value.dtype, sharding=sharding)
    return jax.block_until_ready(_transpose(value, sharding=sharding))


@partial(jax.jit, static_argnames="sharding")
def _transpose(value: jax.Array, *, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(value.T, sharding)
