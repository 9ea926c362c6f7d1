"""How trainers lay out the weights of a Llama, and how their arrays become tensors in Hugging Face's form."""

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
    """The operations, in order, that turn a trainer's array into a tensor, such as a kernel [out, in]."""

    rows: tuple[int, int] | None = None  # takes these rows; None: all
    scan_axis: int | None = None  # takes one layer of this axis; None: there is no such axis
    factor: float = 1.0  # multiplies the values
    has_pairs: bool = False  # the pairs that are rotated are neighbours in the last axis; they become halves of it
    turned: tuple[int, ...] | None = None  # the array has its inputs first: reshape it to this shape; None: keep it

    def of(self, array: Any, layer: Any = 0) -> Any:
        """The tensor that is made of the array, which is one of JAX or of NumPy. `layer` is an index of `scan_axis`."""
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
    """Where a tensor is in a trainer's arrays."""

    path: str  # the path of the array
    cut: Cut = Cut()
    layer: int = 0  # index of the axis of layers


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A trainer's arrays for a model. They include a separate head, except in a layout that has none."""

    shapes: Mapping[str, tuple[int, ...]]  # path of an array -> its shape
    pieces: Mapping[str, Piece]  # Hugging Face's name of a tensor -> where it is


def hugging_face(config: LlamaConfig) -> Layout:
    """The layout of a Hugging Face checkpoint: names and shapes are those of its tensors."""
    shapes = expected_shapes(replace(config, tie_word_embeddings=False))
    return Layout(shapes=shapes, pieces={key: Piece(path=key) for key in shapes})


def own(config: LlamaConfig) -> Layout:
    """The layout of the state of our `Llama`, on one chip and not quantised."""
    tensors = expected_shapes(config)
    shapes: dict[str, tuple[int, ...]] = {}
    pieces: dict[str, Piece] = {}
    for names, parameter in nnx.to_flat_state(nnx.state(abstract_model(config, dtype="float32"))):
        path = ".".join(map(str, names))
        shapes[path] = parameter.get_value().shape
        parts, start = sources(path, config.family), 0
        for part in parts:
            stop = start + tensors[part.key][0]
            pieces[part.key] = Piece(path=path, cut=Cut(rows=(start, stop) if len(parts) > 1 else None))
            start = stop
    return Layout(shapes=shapes, pieces=pieces)


_SCAN_AXIS = 1  # MaxText's `param_scan_axis`


def tunix(config: LlamaConfig) -> Layout:
    """The layout of Tunix's `models/llama3`. The first axis of a kernel is its inputs. Heads have an axis."""
    top = {
        EMBEDDING.key: "embedder.input_embedding",
        "model.norm.weight": "final_norm.w",
        HEAD.key: "lm_head.w",
    }
    return _inputs_first(config, "tunix", top, "layers.{}.{}")


def maxtext(config: LlamaConfig, paths: Collection[str]) -> Layout:
    """The layout of MaxText's Llama. With `scan_layers` an array holds all layers; otherwise each layer has its own.

    The first axis of a kernel is its inputs. Heads have an axis. The queries' kernels contain the factor of the scores,
    and the pairs that are rotated are neighbours.

    Args:
        paths: the paths of the given arrays. They decide whether an array holds all layers.
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
    return _inputs_first(config, "maxtext", top, where, cuts, _SCAN_AXIS if is_scanned else None)


def _inputs_first(
    config: LlamaConfig,
    trainer: str,
    top: Mapping[str, str],
    where: str,
    cuts: Mapping[str, Cut] = MappingProxyType({}),
    scan_axis: int | None = None,
) -> Layout:
    """A layout in which the first axis of every kernel is its inputs.

    Args:
        trainer: the field of `LayerTensor` with the path of an array in a layer.
        top: Hugging Face's name of a tensor outside the layers -> the path of its array.
        where: the format of a whole path. Its arguments are the number of a layer and a path in the layer.
        cuts: Hugging Face's name of a tensor in a layer -> further operations on its array.
        scan_axis: the axis of layers in an array; None: each layer has its own arrays.

    Raises:
        ValueError: this trainer's names of the family are not known.
    """
    of_layer = {tensor.name: getattr(tensor, trainer) for tensor in config.family.tensors}
    if not all(of_layer.values()):
        raise ValueError(f"names={trainer!r} is not supported for {config.model_type!r}: give names='hf' or 'own'")
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
    """The shape of the trainer's array for a kernel [out, in]: inputs first, with heads in an axis of their own."""
    num_out, num_in = shape
    if name == "self_attn.o_proj":
        return num_in // head_dim, head_dim, num_out
    return (num_in, num_out // head_dim, head_dim) if name.startswith("self_attn.") else (num_in, num_out)
