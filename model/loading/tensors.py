"""What checkpoints that are not converted have in common: folders of safetensors, GGUF files, arrays of a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, Self

import numpy as np

from model.config import LlamaConfig
from model.quantization.forms import Activations, EightBit, FourBit, MixedForms, SixBit

Reader = Callable[[tuple[slice, ...]], np.ndarray]


class Tensors(Protocol):
    """Tensors by name."""

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def reader(self, key: str, rows: slice) -> Reader:
        """Reads the parts of a tensor at the indices that it is called with. They are within `rows`."""


class Checkpoint(Tensors):
    """Tensors under their Hugging Face names. On entering, all of them have been checked against the config.

    The defaults are those of a checkpoint that is not quantised.
    """

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None: ...

    def with_own_head(self) -> LlamaConfig:
        """The config, but untied if the head differs from the embedding."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raises ValueError if another checkpoint has taken this one's place since it was opened."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The stored types of the tensors, quantised kernels excluded, each type once."""
        raise NotImplementedError

    @property
    def form(self) -> EightBit | None:
        """The form in which the projections are kept unless another one is asked for; None: not quantised."""
        return None

    def in_four_bits(self) -> tuple[FourBit | None, str | None]:
        """The 4-bit form of chips that holds the projections without quantising them again, and why packed projections
        have none, in words. Both are None if the projections are not packed."""
        return None, None

    def in_exact_form(self) -> FourBit | SixBit | MixedForms | None:
        """The form that holds all numbers of projections in 4 and 6 bits as they are stored; None: there is none."""
        return None

    @property
    def activations(self) -> Activations | None:
        """What the checkpoint says of the inputs of its projections; None: it is not quantised."""
        return None

    @property
    def packing(self) -> str | None:
        """The stored form of projections that are requantised, in words."""
        return None

    @property
    def columns_of_a_scale(self) -> int | None:
        """How many neighbouring weights of a row share a scale; None: the whole row does."""
        return None

    def has_scale(self, key: str) -> bool:
        """Whether the tensor is an 8-bit kernel with scales of its own."""
        return False

    def row_scales(self, key: str) -> np.ndarray:
        """f32[out, n]: the scales of the kernel at `key`, one for each of n parts of a row. The last may be shorter."""
        raise NotImplementedError

    def input_scale(self, key: str) -> np.float32:
        """The stored scale of the inputs of the kernel at `key`. ValueError if it is not positive."""
        raise NotImplementedError

    def kept_reader(self, name: str, key: str, form: FourBit | SixBit) -> Reader:
        """Reads as `PackedKernel.part`, for one of the forms above."""
        raise NotImplementedError
