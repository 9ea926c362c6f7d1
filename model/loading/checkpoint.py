"""Opens the weights of a checkpoint that is not converted: a folder of safetensors files, or a GGUF file."""

from __future__ import annotations

from typing import Protocol, Self

import numpy as np

from model.config import LlamaConfig
from model.inputs.gguf import is_gguf
from model.inputs.paths import Place
from model.inputs.remote import RemotePath
from model.loading.tensor_files import Reader, TensorFiles
from model.quantization.forms import Activations, EightBit, FourBit, Mixed, SixBit


class Tensors(Protocol):
    """Tensors by name."""

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""

    def reader(self, key: str, rows: slice) -> Reader:
        """Reads the parts of a tensor at the indices that it is called with. They are within `rows`."""


class Checkpoint(Tensors, Protocol):
    """Tensors under their Hugging Face names. On entering, all of them have been checked against the config."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc: object) -> None: ...

    @property
    def form(self) -> EightBit | None:
        """The form in which the projections are kept unless another one is asked for; None: not quantised."""

    def in_four_bits(self) -> tuple[FourBit | None, str | None]:
        """The 4-bit form of chips that holds the projections without quantising them again, and why packed projections
        have none, in words. Both are None if the projections are not packed."""

    def in_exact_form(self) -> FourBit | SixBit | Mixed | None:
        """The form that holds all numbers of projections in 4 and 6 bits as they are stored; None: there is none."""

    @property
    def activations(self) -> Activations | None:
        """What the checkpoint says of the inputs of its projections; None: it is not quantised."""

    @property
    def packing(self) -> str | None:
        """The stored form of projections that are requantised, in words."""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The stored types of the tensors, quantised kernels excluded, each type once."""

    @property
    def columns_of_a_scale(self) -> int | None:
        """How many neighbouring weights of a row share a scale; None: the whole row does."""

    def with_own_head(self) -> LlamaConfig:
        """The config, but untied if the head differs from the embedding."""

    def check_unchanged(self) -> None:
        """Raises ValueError if another checkpoint has taken this one's place since it was opened."""

    def kept_reader(self, name: str, key: str, form: FourBit | SixBit) -> Reader:
        """Reads as `PackedKernel.part`, for one of the forms above."""

    def has_scale(self, key: str) -> bool:
        """Whether the tensor is an 8-bit kernel with scales of its own."""

    def row_scales(self, key: str) -> np.ndarray:
        """f32[out, n]: the scales of the kernel at `key`."""

    def input_scale(self, key: str) -> np.float32:
        """The stored scale of the inputs of the kernel at `key`."""


def open_checkpoint(path: Place, config: LlamaConfig) -> Checkpoint:
    """The weights at `path`. ValueError, on entering, if they are not those of `config`."""
    if isinstance(path, RemotePath) or not is_gguf(path):
        return TensorFiles(path, config)
    from model.loading.gguf_tensors import GgufTensors

    return GgufTensors(path, config)
