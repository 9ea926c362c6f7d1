"""Packs the weights of a model for the products of one platform: the C code of a CPU (`products` and `four_bit` of
`pallas_kernels.cpu`), or the int4 product of TPUs (`pallas_kernels.tpu.int4_product`).

A model is packed once, after it is loaded. Checkpoints and the code that loads them know the unpacked layout only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from model.network.eagle import EagleHead
from model.network.eight_bit import EightBitMethod
from model.network.layers import Attention, Mlp, RMSNorm
from model.network.linear import Linear
from model.network.linear_method import LinearMethod, Unquantized
from model.network.llama import Llama
from model.network.row_ops import RowOps, RowOpsInC
from model.network.sharding import RULES, sharding_of
from pallas_kernels.cpu import huge_pages

_EMBEDDED = Unquantized(for_cpu=True)  # the method for an embedding that is also the head


def use_cpu_products[M: nnx.Module](model: M, ops: RowOps | None = None) -> M:
    """Changes the model in place so that it uses products and operations for a CPU. Products of a few rows are written
    in forms that XLA's CPU backend runs well (`cpu_products`). Returns the model.

    Args:
        ops: the operations of the model; None: XLA computes them.

    Raises:
        ValueError: the model is divided over several devices. Its products split the rows of kernels in another way.
    """
    ops = ops or RowOps(gates_in_float32=True)
    for _, module in nnx.iter_graph(model):
        if isinstance(module, Attention | Mlp) and module.num_shards > 1:
            raise ValueError(f"products for a CPU are for one device: {module.num_shards=}")
        if isinstance(module, Linear) and isinstance(module.method, Unquantized | EightBitMethod):
            module.method = replace(module.method, for_cpu=True)
        if isinstance(module, Attention | Mlp | RMSNorm | Llama):
            module.ops = ops
        if isinstance(module, Llama):
            module.embedding_method = _EMBEDDED
    return model


def pack_for_cpu[M: Llama | EagleHead](model: M) -> M:
    """Packs the kernels of the projections and of the head for C, in place and one by one. Returns the model.

    An embedding that is also the head is packed, too. In an abstract model, the shapes change. Kernels that have no
    packed form stay as they are, and XLA multiplies them: for example, kernels whose outputs are not whole panels. The
    operations between the products are then also computed in C, so the bits of a token do not depend on other tokens.

    Raises:
        ValueError: the model is divided over several devices, or inputs are rounded in some steps only. All steps
            multiply with the same packed kernels.
    """
    use_cpu_products(model, RowOpsInC())
    for linear in [x for _, x in nnx.iter_graph(model) if isinstance(x, Linear)]:
        if linear.method.can_pack(linear.kernel.get_value()):
            for name, param in linear.parameters().items():
                param.set_value(_packed(linear.method, name, param.get_value()))
    if isinstance(model, Llama) and model.head is None and _EMBEDDED.can_pack(model.embedding.get_value()):
        model.embedding.set_value(_packed(_EMBEDDED, "kernel", model.embedding.get_value()))
    huge_pages.use(x for x in jax.tree.leaves(nnx.state(model)) if isinstance(x, jax.Array))
    return model


def pack_for_tpu[M: nnx.Module](model: M, mesh: Mesh | AbstractMesh | None, *, interpret: bool = False) -> M:
    """Transposes the parameters of each `Linear` for which TPUs have another method (`LinearMethod.on_tpu`), in place
    and one by one. In an abstract model, the shapes change. Returns the model.

    Args:
        mesh: the chips that hold the model; None: one chip.
        interpret: a CPU computes what the TPU would.
    """
    for module in [module for _, module in nnx.iter_graph(model) if isinstance(module, Linear)]:
        out_axis, in_axis = (None if mesh is None else RULES[axis] for axis in module.kernel.get_metadata("axes"))
        method = module.method.on_tpu(mesh, (out_axis, in_axis), interpret=interpret)
        if method is None:
            continue
        for name, param in module.parameters().items():
            axes = param.get_metadata("axes")[::-1]
            setattr(module, name, nnx.Param(_turned(param.get_value(), axes, mesh), axes=axes))
        module.method = method
    return model


def packer(planned: nnx.Module) -> Callable[[str, Mapping[str, jax.Array]], dict[str, jax.Array]]:
    """A function that packs the parameters of one module. It takes the module's path and its parameters, and returns
    them in the layout that they have in `planned`, a packed model. Modules can then be replaced one by one."""
    modules = {".".join(map(str, path)): module for path, module in nnx.iter_graph(planned)}
    return lambda path, values: {name: _as_in(modules[path], name, value) for name, value in values.items()}


def _as_in(module: Any, name: str, value: jax.Array) -> jax.Array:
    like, method = getattr(module, name).get_value(), module.method if isinstance(module, Linear) else None
    if like.ndim == 3:
        return _packed(_EMBEDDED, "kernel", value) if method is None else _packed(method, name, value)
    if method is not None and method.is_turned:
        return jax.block_until_ready(_transpose(value, sharding=like.sharding))
    return value


def _packed(method: LinearMethod, name: str, value: Any) -> Any:
    """The packed parameter; for a ShapeDtypeStruct, the shape of the packed parameter."""
    if isinstance(value, jax.ShapeDtypeStruct):
        like = jax.eval_shape(partial(method.pack, name), value)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=value.sharding)
    # Waiting frees the memory of the unpacked parameter before the next one is packed.
    return jax.block_until_ready(method.pack(name, value))


def _turned(value: Any, axes: tuple[str, ...], mesh: Mesh | AbstractMesh | None) -> Any:
    """The transposed matrix, or its shape. `axes`: the logical names of the dimensions after the transposition."""
    sharding = value.sharding if mesh is None else sharding_of(axes, mesh)
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape[::-1], value.dtype, sharding=sharding)
    return jax.block_until_ready(_transpose(value, sharding=sharding))


@partial(jax.jit, static_argnames="sharding")
def _transpose(value: jax.Array, *, sharding: Any) -> jax.Array:
    return jax.lax.with_sharding_constraint(value.T, sharding)
