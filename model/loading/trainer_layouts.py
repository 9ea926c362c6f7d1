"""How trainers lay out the weights of a Llama, and how a tensor in Hugging Face's form is made out of their arrays."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import jax
import numpy as np
from flax import nnx

from model.config import LlamaConfig
from model.loading.hf_format import EMBEDDING, HEAD, expected_shapes, sources
from model.network.sharding import abstract_model

Array = jax.Array | np.ndarray


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What makes a tensor, such as a kernel [out, in], of a trainer's array, in this order."""

    rows: tuple[int, int] | None = None  # the tensor is these rows; None: all
    scan_axis: int | None = None  # the tensor is one layer of this axis; None: there is no such axis
    factor: float = 1.0  # by which the tensor is larger
    has_pairs: bool = False  # the last axis is a head's, whose pairs for the rotation are neighbours and no halves
    turned: tuple[int, ...] | None = None  # the shape of the tensor, whose inputs come first; None: it has its shape

    def of(self, array: Any, layer: Any = 0) -> Any:
        """The tensor. The array is one of JAX or of NumPy."""
        if self.rows is not None:
            array = array[slice(*self.rows)]
        if self.scan_axis is not None:
            array = array[(slice(None),) * self.scan_axis + (layer,)]
        if self.factor != 1:
            array = (array.astype(np.float32) * np.float32(self.factor)).astype(array.dtype)
        if self.has_pairs:
            array = array.reshape(*array.shape[:-1], -1, 2).swapaxes(-1, -2).reshape(array.shape)
        return array if self.turned is None else array.reshape(self.turned[::-1]).T


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Where a trainer has a tensor."""

    path: str  # of the array
    cut: Cut = Cut()
    layer: int = 0  # of the axis of layers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A trainer's arrays for a model. They have a head of their own, unless there is none in this layout."""

    shapes: Mapping[str, tuple[int, ...]]  # by their paths
    pieces: Mapping[str, Piece]  # Hugging Face's name -> where it is


def hugging_face(config: LlamaConfig) -> Layout:
    """Of the tensors of a checkpoint."""
    shapes = expected_shapes(replace(config, tie_word_embeddings=False))
    return Layout(shapes=shapes, pieces={key: Piece(path=key) for key in shapes})


def own(config: LlamaConfig) -> Layout:
    """Of the state of a `Llama` on one chip that is not quantised."""
    tensors = expected_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, Piece] = {}
    for names, parameter in nnx.to_flat_state(nnx.state(abstract_model(config, dtype="float32"))):
        path = ".".join(map(str, names))
        shapes[path] = parameter.get_value().shape
        parts, start = sources(path), 0
        for part in parts:
            stop = start + tensors[part.key][0]
            pieces[part.key] = Piece(path=path, cut=Cut(rows=(start, stop) if len(parts) > 1 else None))
            start = stop
    return Layout(shapes=shapes, pieces=pieces)


# The names in a layer, by Hugging Face's.
_TUNIX = {
    "input_layernorm": "input_layernorm.w",
    "self_attn.q_proj": "attn.q_proj.w",
    "self_attn.k_proj": "attn.k_proj.w",
    "self_attn.v_proj": "attn.v_proj.w",
    "self_attn.o_proj": "attn.o_proj.w",
    "post_attention_layernorm": "post_attention_layernorm.w",
    "mlp.gate_proj": "mlp.gate_proj.kernel",
    "mlp.up_proj": "mlp.up_proj.kernel",
    "mlp.down_proj": "mlp.down_proj.kernel",
}
_MAXTEXT = {
    "input_layernorm": "pre_self_attention_layer_norm.scale",
    "self_attn.q_proj": "self_attention.query.kernel",
    "self_attn.k_proj": "self_attention.key.kernel",
    "self_attn.v_proj": "self_attention.value.kernel",
    "self_attn.o_proj": "self_attention.out.kernel",
    "post_attention_layernorm": "post_self_attention_layer_norm.scale",
    "mlp.gate_proj": "mlp.wi_0.kernel",
    "mlp.up_proj": "mlp.wi_1.kernel",
    "mlp.down_proj": "mlp.wo.kernel",
}
_SCAN_AXIS = 1  # MaxText's `param_scan_axis`


def tunix(config: LlamaConfig) -> Layout:
    """Of Tunix's `models/llama3`. Kernels have their inputs first, and heads have an axis."""
    top = {
        EMBEDDING.key: "embedder.input_embedding",
        "model.norm.weight": "final_norm.w",
        HEAD.key: "lm_head.w",
    }
    return _inputs_first(config, top, _TUNIX, "layers.{}.{}")


def maxtext(config: LlamaConfig, paths: Collection[str]) -> Layout:
    """Of MaxText's Llama, with its layers in one array (`scan_layers`) or in one each. Kernels have their inputs first,
    and heads have an axis. The scores' factor is in the queries, and rotated pairs are neighbours.

    Args:
        paths: of the arrays that are given.
    """
    top = {
        EMBEDDING.key: "token_embedder.embedding",
        "model.norm.weight": "decoder.decoder_norm.scale",
        HEAD.key: "decoder.logits_dense.kernel",
    }
    is_scanned = any(path.startswith("decoder.layers.") for path in paths)
    cuts = {
        "self_attn.q_proj": Cut(factor=config.head_dim**0.5, has_pairs=True),
        "self_attn.k_proj": Cut(has_pairs=True),
    }
    where = "decoder.layers.{1}" if is_scanned else "decoder.layers_{0}.{1}"
    return _inputs_first(config, top, _MAXTEXT, where, cuts, _SCAN_AXIS if is_scanned else None)


def _inputs_first(
    config: LlamaConfig,
    top: Mapping[str, str],
    of_layer: Mapping[str, str],
    where: str,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    scan_axis: int | None = None,
) -> Layout:
    """A layout in which every kernel has its inputs first.

    Args:
        top: the paths of what is in no layer, by Hugging Face's names.
        of_layer: the paths of what is in a layer, by Hugging Face's names there.
        where: the path, from the number of a layer and a path in it.
        cuts: of the kernels that are kept in another way, by Hugging Face's names in a layer.
        scan_axis: of the layers in an array; None: each layer has arrays of its own.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, Piece] = {}
    for key, shape in expected_shapes(replace(config, tie_word_embeddings=False)).items():
        if key in top:
            turned = shape if key == HEAD.key else None
            shapes[top[key]] = shape[::-1] if turned else shape
            pieces[key] = Piece(path=top[key], cut=Cut(turned=turned))
            continue
        _, _, number, name = key.removesuffix(".weight").split(".", 3)
        path = where.format(number, of_layer[name])
        stored = shape if len(shape) == 1 else _with_heads(name, shape, config.head_dim)
        if scan_axis is not None:
            stored = (*stored[:scan_axis], config.num_layers, *stored[scan_axis:])
        cut = replace(cuts.get(name, Cut()), scan_axis=scan_axis, turned=shape if len(shape) == 2 else None)
        shapes[path], pieces[key] = stored, Piece(path=path, cut=cut, layer=int(number))
    return Layout(shapes=shapes, pieces=pieces)


def _with_heads(name: str, shape: tuple[int, ...], head_dim: int) -> tuple[int, ...]:
    """The shape of a kernel [out, in] that has its inputs first, and an axis for heads of either."""
    num_out, num_in = shape
    if name == "self_attn.o_proj":
        return num_in // head_dim, head_dim, num_out
    return (num_in, num_out // head_dim, head_dim) if name.startswith("self_attn.") else (num_in, num_out)
