"""A checkpoint with a LoRA adapter merged into it: the weights of a fine-tune, without files of their own."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from model.inputs.paths import Place
from model.loading.adapter import MergeableAdapter, read_to_merge
from model.loading.remote_tensors import readable
from model.loading.source import ModelSource
from model.loading.stored_weights import StoredWeights, find_weights
from model.loading.tensors import Checkpoint, Contents, Reader


@dataclass(frozen=True, kw_only=True)
class MergedWeights(StoredWeights):
    """Stored weights that are not quantised, with an adapter added to them as they are read.

    Args:
        base: the weights without the adapter.
        identity: that of the adapter, by which two merged checkpoints differ.
    """

    base: StoredWeights
    identity: int
    adapter: MergeableAdapter = field(repr=False, compare=False)

    @classmethod
    def of(cls, base: StoredWeights, folder: Place) -> Self:
        """The weights with the adapter of this folder. Raises ValueError if it cannot be added to them, OSError if a
        file cannot be read."""
        if base.quantization is not None or base.packing is not None or base.is_converted:
            raise ValueError(
                "a LoRA adapter is merged into a checkpoint that is neither quantised nor converted, and "
                f"{base.path} is: load the adapter with --lora-modules"
            )
        adapter = read_to_merge(folder, base.config)
        merged: dict[str, Any] = {"config": adapter.config, "remark": f"merged into {base.path}"}
        merged |= {"base": base, "identity": adapter.identity, "adapter": adapter}
        return cls(**vars(base) | merged | {"merged_files": tuple(adapter.versions)})

    def _open(self) -> Checkpoint:
        return MergedCheckpoint(self.base._open(), self.adapter)


def weights_of(source: ModelSource, load_format: str = "auto") -> StoredWeights:
    """The weights of a model, with the adapter that is merged into them. ValueError as from `find_weights`, also if it
    has no weights or they take no adapter; OSError if a file cannot be read."""
    base = source.base or source
    if base.weights is None:
        raise ValueError(f"--model {source.name} has no weights: add --load-format dummy for random ones")
    found = find_weights(base.weights, base.config, load_format)
    return found if source.base is None or source.weights is None else MergedWeights.of(found, source.weights)


class MergedCheckpoint(Checkpoint):
    """The tensors of `files` with the changes of `adapter`. A tied head that has changes of its own, or stays when the
    embedding changes, is the files' embedding with its changes."""

    def __init__(self, files: Checkpoint, adapter: MergeableAdapter) -> None:
        self._files = files
        self._adapter = adapter
        self.versions = {**files.versions, **{readable(file): version for file, version in adapter.versions.items()}}

    def contents(self) -> Contents:
        return replace(self._files.contents(), config=self._adapter.config)

    def kv_ranges(self) -> np.ndarray | None:
        return self._files.kv_ranges()

    def shape(self, key: str) -> tuple[int, ...]:
        whole = self._adapter.tensors.get(key)
        return self._files.shape(key) if whole is None else tuple(whole.get_shape())

    def reader(self, key: str, rows: slice) -> Reader:
        whole, pair = self._adapter.tensors.get(key), self._adapter.pairs.get(key.removesuffix(".weight"))
        read = self._files.reader(key, rows) if whole is None else whole.reader(rows)
        if pair is None:
            return read
        a, b = pair

        def merged(index: tuple[slice, ...]) -> np.ndarray:
            of_rows, *of_inputs = index
            found = np.array(read(index), np.float32)
            found += b[of_rows] @ a[:, of_inputs[0] if of_inputs else slice(None)]
            return found

        return merged
