"""What the quantised forms of checkpoints have in common: the tensors of a kernel, and how they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from model.quantization.forms import Activations, EightBit, FourBit

SCALES = ("F16", "BF16", "F32")


@dataclass(frozen=True)
class Part:
    """One of the tensors of a checkpoint."""

    shapes: tuple[tuple[int, ...], ...]  # the tensor has one of them
    types: tuple[str, ...]
    is_required: bool = True


class StoredForm:
    """The form in which a checkpoint stores the kernels of its projections.

    Attributes:
        form: the form in which they are loaded if no other one is asked for.
        activations: how the checkpoint wants inputs to be rounded.
    """

    form: EightBit
    activations: Activations

    @property
    def mark(self) -> str:
        """The name of a tensor that every quantised kernel has and no other one has."""
        raise NotImplementedError

    @property
    def name(self) -> str | None:
        """The form in messages, if the kernels are requantised to `form`; None: they keep it."""
        return None

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors of a kernel [rows, columns], by their names in the kernel's module."""
        raise NotImplementedError

    def kernel(self, name: str, parts: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        """A kernel [out, in] that is unpacked when it is read; None: it is the tensor `weight`.

        Args:
            name: of its module, for errors.
            parts: the tensors of `parts` that are there.
        """
        return None

    def in_four_bits(self, widths: Sequence[int]) -> tuple[FourBit | None, str | None]:
        """The 4-bit form of chips for kernels with these numbers of inputs, and why there is none, in words. Both are
        None if the kernels are not packed."""
        return None, None

    def in_exact_form(self, widths: Sequence[int], types: Mapping[str, Set[str]]) -> FourBit | None:
        """The form that keeps all numbers as they are stored; None: there is none.

        Args:
            types: the types of each part in the files.
        """
        return None
