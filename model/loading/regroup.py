"""Makes a chip's part of a stored parameter from the parts that it was cut into for more chips."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from model.config import LlamaConfig
from model.network.sharding import TENSOR_AXIS, partition, stored_config

Index = tuple[slice, ...]


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows of a stored piece that come from one tensor of the checkpoint."""

    rows: int
    head_dim: int = 1  # rows that stay together
    keep: int = 1  # of so many copies of a head in a row, one is kept


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """How a parameter was cut, and which of its pieces a chip takes."""

    stored: int  # pieces
    per_chip: int
    axis: int | None  # that was cut; None: every chip has all
    parts: tuple[Part, ...] = ()  # of each piece, if it has the rows of several tensors

    @classmethod
    def of(cls, name: str, axes: Sequence[str], config: LlamaConfig, stored: int, chips: int) -> Self:
        """Of a parameter of a Llama.

        Args:
            name: its path, such as "layers.3.mlp.gate_up.kernel".
            axes: its logical axes.
            config: the checkpoint's own.
            stored: the number of chips that the parameter was stored for; a multiple of `chips`.
        """
        names = tuple(partition(axes))
        if TENSOR_AXIS not in names:
            return cls(stored=1, per_chip=1, axis=None)
        parts: tuple[Part, ...] = ()
        module = name.rpartition(".")[0]
        if names[0] == TENSOR_AXIS and module.endswith("attention.qkv"):
            before, after = stored_config(config, stored), stored_config(config, chips)
            kv = Part(
                rows=before.num_kv_heads * config.head_dim // stored,
                head_dim=config.head_dim,
                keep=before.num_kv_heads // after.num_kv_heads,
            )
            parts = (Part(rows=config.num_heads * config.head_dim // stored), kv, kv)
        elif names[0] == TENSOR_AXIS and module.endswith("mlp.gate_up"):
            parts = (Part(rows=config.intermediate_size // stored),) * 2
        return cls(stored=stored, per_chip=stored // chips, axis=names.index(TENSOR_AXIS), parts=parts)

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the stored array, from the shape of the parameter."""
        if not self.parts:
            return shape
        return (self.stored * sum(part.rows for part in self.parts), *shape[1:])

    def numbers(self, index: Index, shape: tuple[int, ...]) -> range:
        """The pieces that make `index` of the parameter, a chip's part."""
        if self.axis is None:
            return range(1)
        start, stop, _ = index[self.axis].indices(shape[self.axis])
        chip = start // (stop - start)
        return range(chip * self.per_chip, (chip + 1) * self.per_chip)

    def index(self, number: int, stored_shape: tuple[int, ...]) -> Index:
        """Where a piece is in the stored array."""
        whole: list[slice] = [slice(0, size) for size in stored_shape]
        if self.axis is not None:
            size = stored_shape[self.axis] // self.stored
            whole[self.axis] = slice(number * size, (number + 1) * size)
        return tuple(whole)

    def joined(self, pieces: Sequence[np.ndarray]) -> np.ndarray:
        """A chip's part of its pieces: the rows of each tensor together, and each head once."""
        if len(pieces) == 1:
            return pieces[0]
        assert self.axis is not None
        if not self.parts:
            return np.concatenate(pieces, axis=self.axis)
        joined, begin = [], 0
        for part in self.parts:
            rows = np.concatenate([piece[begin : begin + part.rows] for piece in pieces])
            heads = rows.reshape(-1, part.head_dim, *rows.shape[1:])[:: part.keep]
            joined.append(heads.reshape(-1, *rows.shape[1:]))
            begin += part.rows
        return np.concatenate(joined)
