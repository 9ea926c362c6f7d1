"""How the arrays of the stored form are cut into parts, and which parts each chip takes.

The rows keep the order of one chip: those of queries, keys and values, or of gate and up, one tensor after the other,
and no head of keys or values is repeated. An array is stored as a stack of parts of one size, which is fine enough for
any number of chips that the model divides over. A chip of any mesh then needs whole parts: one run of them for each
tensor. Chips that share a head of keys and values take the same parts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from model.config import LlamaConfig
from model.network.sharding import TENSOR_AXIS, partition


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The cut of one array."""

    axis: int | None  # that is cut; None: the array is one part, and every chip has it
    tensors: tuple[int, ...]  # the number of parts of each tensor of the array
    shape: tuple[int, ...]  # of a part

    @classmethod
    def of(cls, name: str, axes: Sequence[str], shape: tuple[int, ...], config: LlamaConfig) -> Self:
        """Of a parameter of a Llama.

        Args:
            name: its path, such as "layers.3.mlp.gate_up.kernel".
            axes: its logical axes.
            shape: on one chip.
            config: the checkpoint's own.
        """
        names = tuple(partition(axes))
        if TENSOR_AXIS not in names:
            return cls(axis=None, tensors=(1,), shape=shape)
        axis = names.index(TENSOR_AXIS)
        # A number of chips over which the model divides is a divisor of this.
        finest = math.gcd(config.num_heads, config.intermediate_size, config.vocab_size)
        module = name.rpartition(".")[0]
        if axis == 0 and module.endswith("attention.qkv"):
            tensors: tuple[int, ...] = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        elif axis == 0 and module.endswith(("k_proj", "v_proj")):
            tensors = (config.num_kv_heads,)
        elif axis == 0 and module.endswith("mlp.gate_up"):
            tensors = (finest, finest)
        else:
            tensors = (math.gcd(finest, shape[axis]),)  # scales of groups have fewer columns than kernels
        size = shape[axis] // sum(tensors)
        return cls(axis=axis, tensors=tensors, shape=(*shape[:axis], size, *shape[axis + 1 :]))

    @property
    def count(self) -> int:
        """Of the parts in the stack."""
        return sum(self.tensors)

    def of_chip(self, chip: int, chips: int) -> list[range]:
        """The parts that a chip takes, in the order in which it joins them: a range of each tensor. Ranges with no gap
        between them are one: what one chip holds alone is read in one piece, and not joined."""
        ranges: list[range] = []
        begin = 0
        for count in self.tensors:
            if self.axis is None:
                of_tensor = range(begin, begin + count)
            elif count % chips == 0:
                each = count // chips
                of_tensor = range(begin + chip * each, begin + (chip + 1) * each)
            else:  # fewer heads of keys and values than chips
                assert chips % count == 0, "the model does not divide over the chips"
                head = begin + chip // (chips // count)
                of_tensor = range(head, head + 1)
            if ranges and ranges[-1].stop == of_tensor.start:
                of_tensor = range(ranges.pop().start, of_tensor.stop)
            ranges.append(of_tensor)
            begin += count
        return ranges

    def stacked(self, array: np.ndarray) -> np.ndarray:
        """An array of one chip as its parts [count, ...]."""
        if self.axis is None:
            return array[None]
        before, after = self.shape[: self.axis], self.shape[self.axis :]
        return np.moveaxis(array.reshape(*before, self.count, *after), self.axis, 0)

    def joined(self, stacks: Sequence[np.ndarray]) -> np.ndarray:
        """A chip's array, from the parts of its ranges."""
        stack = stacks[0] if len(stacks) == 1 else np.concatenate(stacks)
        if self.axis is None:
            return stack[0]
        whole = [*self.shape]
        whole[self.axis] *= len(stack)
        return np.moveaxis(stack, 0, self.axis).reshape(whole)
