"""A checkpoint with a LoRA adapter merged into it: the weights of a fine-tune, without files of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np

from model.loading.adapter_targets import layer_of
from model.loading.stored_weights import StoredWeights
from model.loading.tensors import Checkpoint, Contents, Reader
from model.network.lora import LoraWeights

_WEIGHT = ".weight"


@dataclass(frozen=True, kw_only=True)
class MergedWeights(StoredWeights):
    """Stored weights that are not quantised, with an adapter added to them as they are read.

    Args:
        adapter: the adapter. `identity` is its identity, by which two merged checkpoints differ.
    """

    identity: int
    adapter: LoraWeights = field(repr=False, compare=False)

    @classmethod
    def of(cls, stored: StoredWeights, adapter: LoraWeights) -> Self:
        """Raises ValueError if an adapter cannot be added to these weights."""
        if stored.quantization is not None or stored.packing is not None or stored.is_converted:
            raise ValueError(
                "a LoRA adapter is merged into a checkpoint that is neither quantised nor converted, and "
                f"{stored.path} is: load the adapter with --lora-modules"
            )
        return cls(**vars(stored), identity=adapter.identity, adapter=adapter)

    def _open(self) -> Checkpoint:
        return MergedCheckpoint(super()._open(), self.adapter)


class MergedCheckpoint(Checkpoint):
    """The tensors of `files`, and of `adapter` in the projections that it changes."""

    def __init__(self, files: Checkpoint, adapter: LoraWeights) -> None:
        self._files = files
        self._adapter = adapter

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.__exit__(*exc)

    def contents(self) -> Contents:
        return self._files.contents()

    def check_unchanged(self) -> None:
        self._files.check_unchanged()

    def kv_ranges(self) -> np.ndarray | None:
        return self._files.kv_ranges()

    def shape(self, key: str) -> tuple[int, ...]:
        return self._files.shape(key)

    def reader(self, key: str, rows: slice) -> Reader:
        read, pair = self._files.reader(key, rows), self._pair(key)
        if pair is None:
            return read
        a, b = pair

        def merged(index: tuple[slice, ...]) -> np.ndarray:
            of_rows, *of_inputs = index
            return np.asarray(read(index), np.float32) + b[of_rows] @ a[:, of_inputs[0] if of_inputs else slice(None)]

        return merged

    def _pair(self, key: str) -> Any:
        """(A, B) of a projection; None: the adapter does not change the tensor."""
        module = key.removesuffix(_WEIGHT)
        if module == key or ".layers." not in key:
            return None
        return self._adapter.layers[layer_of(module)].get(module.rpartition(".")[2])
