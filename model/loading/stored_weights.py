"""Finds and checks a checkpoint's weights before memory is planned and before any of them is placed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.config import LlamaConfig
from model.inputs.gguf import is_gguf
from model.inputs.paths import Place
from model.loading.checkpoint import open_checkpoint
from model.loading.hf_format import HEAD
from model.loading.source import CONVERTED
from model.loading.tensors import Checkpoint, Contents
from model.loading.weights import load
from model.network.llama import Llama


@dataclass(frozen=True, kw_only=True)
class StoredWeights(Contents):
    """Weights on a disk or in a bucket that are checked against the model's configuration but not loaded yet."""

    path: Place  # a folder, or a GGUF file
    is_converted: bool  # in the form of `model.loading.orbax_format`; otherwise safetensors or GGUF
    remark: str | None  # how the weights differ from `config.json`
    merged_files: tuple[Place, ...] = ()  # those of an adapter that is merged into them

    @property
    def exact_dtype(self) -> str:
        """The narrower of bfloat16 and float32 that holds every stored value exactly."""
        return "bfloat16" if self.dtypes == ("bfloat16",) else "float32"

    def kv_ranges(self) -> np.ndarray | None:
        """The ranges of keys and values, f32[L, 2, K], from the K/V scales of the checkpoint. None if it has no such
        scales, or if all are 1. A converted checkpoint has the ranges of its source."""
        return self._open().kv_ranges()

    def load(self, **form: Any) -> Llama:
        """Loads the model. `form`: the arguments of `abstract_model`.

        Raises:
            ValueError: the weights are damaged, or converted to another form than `quantization` asks for.
        """
        asked = form.get("quantization")
        if self.is_converted and asked != self.quantization:
            held = self.quantization or "weights that are not quantised"
            raise ValueError(
                f"{self.path} holds {held}, and {asked or 'none'} is asked for: convert again with --quantization, "
                f"or load the safetensors"
            )
        return load(self._open(), **form)

    def _open(self) -> Checkpoint:
        return open_checkpoint(self.path, self.config, is_converted=self.is_converted)


def has_weights(path: Place) -> bool:
    """Whether there are weights of any form at `path`, or only the files that describe a model."""
    return is_gguf(path) or (path / CONVERTED).is_dir() or any(path.glob("*.safetensors"))


def find_weights(path: Place, config: LlamaConfig, load_format: str = "auto") -> StoredWeights:
    """The weights of the checkpoint at `path`, a folder or a GGUF file.

    Args:
        config: from its `config.json`, or from the file's metadata.
        load_format: "orbax", "safetensors" for the form that is not converted, or "auto" for the converted form if
            there is one.

    Raises:
        ValueError: there are no weights, files are incomplete, or they are those of another model.
    """
    if is_gguf(path) and load_format == "orbax":
        raise ValueError(f"{path} is a GGUF file: only a folder can hold converted weights")
    is_converted = load_format == "orbax" or (load_format == "auto" and (path / CONVERTED).is_dir())
    path = path / CONVERTED if is_converted else path
    found = open_checkpoint(path, config, is_converted=is_converted).contents()
    remark = None
    if found.config.tie_word_embeddings != config.tie_word_embeddings:
        remark = f"{HEAD.key} differs from the embedding and is used, although config.json ties them"
    # The dtype of config.json comes before that of the tensors, as in Hugging Face's implementation.
    stated = found.config.checkpoint_dtype or (found.dtypes[0] if len(found.dtypes) == 1 else None)
    found = replace(found, config=replace(found.config, checkpoint_dtype=stated))
    return StoredWeights(path=path, is_converted=is_converted, remark=remark, **vars(found))
