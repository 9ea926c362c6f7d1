"""The tensors in the folder of a LoRA adapter, as PEFT names them. A start reads them before it imports jax."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from model.config import LlamaConfig
from model.inputs.limits import MAX_JSON_BYTES, MAX_VOCAB_SIZE
from model.inputs.paths import Place
from model.loading.copies import local_file
from model.loading.hf_format import ADAPTER_FILE, ADAPTER_TORCH_FILE, EMBEDDING
from model.loading.remote_tensors import RemoteTensors
from model.loading.torch_file import read_torch_file

PREFIX = "base_model.model."  # some trainers leave it out
_KEY = re.compile(r"(?:base_model\.model\.)?(.+\.lora_[AB])(?:\.default)?\.weight")
_EMBEDDING_KEY = re.compile(r"(?:base_model\.model\.)?(.+\.lora)_embedding_([AB])(?:\.default)?")
_WHOLE_KEY = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.modules_to_save(?:\.default)?|\.base_layer)?(\.weight)")


@dataclass(frozen=True)
class _Transposed:
    """A slice with rows and columns exchanged."""

    slice: Any

    def get_shape(self) -> list[int]:
        return [*reversed(self.slice.get_shape())]

    def __getitem__(self, index: Any) -> Any:
        return self.slice[...].T[index]


def slices_of(folder: Place) -> Mapping[str, Any]:
    """The tensors by their names in the file."""
    safetensors, torch_file = folder / ADAPTER_FILE, folder / ADAPTER_TORCH_FILE
    if safetensors.exists():
        return RemoteTensors(safetensors, max_header=MAX_JSON_BYTES).slices()
    if torch_file.exists():
        return read_torch_file(local_file(torch_file))
    raise ValueError(f"{folder} has neither {ADAPTER_FILE} nor {ADAPTER_TORCH_FILE}")


def named(stored: str, value: Any) -> tuple[str, Any]:
    """The name in the model of a tensor of the file, and the tensor with outputs as the rows of B."""
    if match := _EMBEDDING_KEY.fullmatch(stored):  # a token's row of the weight is a column of A, times B
        return f"{match[1]}_{'B' if match[2] == 'A' else 'A'}", _Transposed(value)
    if match := _KEY.fullmatch(stored):
        return match[1], value
    match = _WHOLE_KEY.fullmatch(stored)
    return "".join(match.groups()) if match else stored.removeprefix(PREFIX), value


def resized_for(folder: Place, config: LlamaConfig) -> LlamaConfig:
    """The config with the vocabulary's size of the adapter's own embedding, if it has one. Raises as `read_adapter`."""
    for name, value in slices_of(folder).items():
        if named(name, value)[0] == EMBEDDING.key and len(shape := value.get_shape()) == 2:
            return replace(config, vocab_size=shape[0]) if 0 < shape[0] <= MAX_VOCAB_SIZE else config
    return config
