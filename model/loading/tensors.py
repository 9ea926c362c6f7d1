"""What checkpoints have in common: folders of safetensors, GGUF files, converted weights, arrays of a trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from model.config import LlamaConfig
from model.loading.remote_tensors import File
from model.quantization.forms import Activations, WeightForm

Reader = Callable[[tuple[slice, ...]], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What a checkpoint holds. The defaults are those of one that is not quantised."""

    config: LlamaConfig  # matches the weights: not tied if they have their own head
    dtypes: tuple[str, ...]  # the stored types, each once; those of quantised kernels are left out
    quantization: WeightForm | None = None  # the form of the projections; if converted, also that of the head
    activations: Activations | None = None  # how a quantised checkpoint wants inputs to be rounded
    packing: str | None = None  # the stored form, such as "GPTQ int4", if loading requantises it to `quantization`
    four_bit: WeightForm | None = None  # the form by which chips hold packed projections without requantising them
    exact_form: WeightForm | None = None  # the form of groups with all numbers as they are stored
    four_bit_fault: str | None = None  # why `four_bit` is None for packed projections


class Checkpoint:
    """Tensors by name, for a model under their Hugging Face names. All of them have been checked against the config.

    The defaults are those of a checkpoint that is not quantised.
    """

    versions: Mapping[File, str] = MappingProxyType({})  # of its files, from before anything was read

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        raise NotImplementedError

    def reader(self, key: str, rows: slice) -> Reader:
        """Reads the parts of a tensor at the indices that it is called with. They are within `rows`."""
        raise NotImplementedError

    def contents(self) -> Contents:
        """What the checkpoint holds. It may read the head, to compare it with the embedding."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """Raises ValueError if a file was replaced since it was opened: what was read may be of two checkpoints."""
        for file, version in self.versions.items():
            if file.version() != version:
                raise ValueError(f"{file} changed while it was read: start again")

    def scales(self, key: str) -> tuple[np.ndarray, int | None] | None:
        """The scales f32[out, n] of an 8-bit kernel, one for each of n parts of a row, and the weights of a part. The
        last part may be shorter; None: it is the whole row. Without a result the tensor has no scales of its own."""
        return None

    def input_scale(self, key: str) -> np.float32:
        """The stored scale of the inputs of the kernel at `key`. ValueError if it is not positive."""
        raise NotImplementedError

    def kv_ranges(self) -> np.ndarray | None:
        """The ranges of keys and values, f32[L, 2, K]; None: they are not known."""
        return None

    def kept_reader(self, name: str, key: str, form: WeightForm) -> Reader:
        """Reads as `PackedKernel.part`, for a kernel of one of the forms of `contents`."""
        raise NotImplementedError
