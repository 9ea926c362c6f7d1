"""The tensors of a LoRA adapter in llama.cpp's form: a GGUF file that its convert_lora_to_gguf.py has written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from model.config import LlamaConfig
from model.inputs.gguf import GgufFile, GgufTensor
from model.inputs.words import shown
from model.loading.gguf_tensors import check_places, faults_of, name_of, stored_rows, values_of

_INVOCATION = "adapter.alora.invocation_tokens"


@dataclass(frozen=True)
class _Slice:
    """One tensor, with those methods of safetensors' slices that are used here."""

    tensor: GgufTensor
    key: str  # of the kernel whose outputs are its rows; "": they are ranks
    config: LlamaConfig

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index: Any) -> np.ndarray:
        num_rows, num_columns = self.tensor.shape
        rows = stored_rows(self.key, self.config, np.arange(num_rows))
        return values_of(self.tensor, rows, 0, num_columns)[index]


def open_gguf_adapter(path: Path, config: LlamaConfig) -> tuple[dict[str, Any], float, list[str]]:
    """The tensors by their names in the Hugging Face form, the alpha, and what is wrong with the file. ValueError if it
    cannot be read."""
    file = GgufFile.read(path)
    expected = {"general.type": "adapter", "general.architecture": config.family.gguf, "adapter.type": "lora"}
    problems = [
        f"{name}={shown(file.metadata.get(name))} is not {shown(value)}"
        for name, value in expected.items()
        if file.metadata.get(name) != value
    ]
    if file.metadata.get(_INVOCATION):
        problems.append(f"{_INVOCATION} is not supported")
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, float):
        problems.append(f"adapter.lora.alpha={shown(alpha)} is not a float")
    faults = {name: fault for name, tensor in file.tensors.items() for fault in faults_of(tensor, tensor.shape)}
    problems += [f"{shown(name)} {fault}" for name, fault in faults.items()]
    if problems:
        return {}, 0.0, problems
    check_places(file)
    modules = {name_of(f"{module}.weight", config.family): module for module in config.projections}
    tensors = {}
    for name, tensor in file.tensors.items():
        base, _, part = name.rpartition(".lora_")
        if base not in modules or part not in ("a", "b"):
            problems.append(f"{shown(name)} is not an adapter of one of the model's projections")
            continue
        # The rows of A are ranks, which are in order.
        key = f"{modules[base]}.weight" if part == "b" else ""
        tensors[f"{modules[base]}.lora_{part.upper()}"] = _Slice(tensor, key, config)
    return tensors, float(alpha), problems
