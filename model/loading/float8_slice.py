"""Slices of FP8 tensors of a safetensors file. The safetensors library cannot return these as numpy arrays."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np

FLOAT8 = {"F8_E4M3": ml_dtypes.float8_e4m3fn}


class Float8Slice:
    """One memory-mapped tensor, with those methods of safetensors' slices that are used here.

    Args:
        path: a file that safetensors has opened without an error.
    """

    def __init__(self, path: Path, key: str):
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            entry = json.loads(file.read(header_bytes))[key]
        start, stop = entry["data_offsets"]
        self._dtype = entry["dtype"]
        raw = np.memmap(path, np.uint8, "r", offset=8 + header_bytes + start, shape=(stop - start,))
        self._values = raw.view(FLOAT8[self._dtype]).reshape(entry["shape"])

    def get_shape(self) -> list[int]:
        return list(self._values.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        return np.array(self._values[index])
