"""The form of weights that the C products of a CPU read (`pallas_kernels.cpu.products`).

A model is packed once, after it is loaded. Kernels that have no packed form, such as those in bfloat16, stay as they
are, and XLA multiplies them.
"""

from __future__ import annotations

import jax
from flax import nnx

from model.network.eagle import EagleHead
from model.network.linear import Linear
from model.network.llama import Llama
from pallas_kernels.cpu import products


def pack[M: Llama | EagleHead](model: M) -> M:
    """Packs the kernels of the projections and of the head, in place and one by one; of an abstract model, their
    shapes. Returns the model. An embedding that is also the head is packed, too."""
    kernels = [module.kernel for _, module in nnx.iter_graph(model) if isinstance(module, Linear)]
    if isinstance(model, Llama) and model.head is None:
        kernels.append(model.embedding)
    for kernel in kernels:
        value = kernel.get_value()
        if products.can_pack(value):
            kernel.set_value(_packed(value))
    return model


def _packed(value: jax.Array | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
    if isinstance(value, jax.ShapeDtypeStruct):
        like = jax.eval_shape(products.pack, value)
        return jax.ShapeDtypeStruct(like.shape, like.dtype, sharding=value.sharding)
    return jax.block_until_ready(products.pack(value))  # one at a time: the memory of the other form is free again
