"""Weights as the programs of a CPU read them, in a file that later starts map: nothing is read, cast, quantised, packed
or copied then.

The file holds the parameters one after the other, each from the beginning of a page of memory. Their shapes and types
are those of the model that it is for, so nothing else is in it. As with safetensors, the numbers are not checked.
"""

from __future__ import annotations

import logging
import mmap  # noqa: TID251, of files that this program alone writes, whole, under names of their own
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from model.inputs.private_folders import delete_unused, make_folder, writing_whole
from model.loading.received_arrays import places_of

logger = logging.getLogger(__name__)

SUFFIX = ".weights"
_ALIGNED = 4096  # bytes; XLA copies an array that does not begin at a multiple of 64
_KEPT_FILES = 3
_FREE_SHARE = 3  # the disk must have room for so many files of the size


def mapped[M: nnx.Module](planned: M, file: Path) -> M | None:
    """The model over the file's arrays, which cannot be written to; None if there is no such file, or if it cannot be
    used, which is a warning.

    Args:
        planned: abstract, in the form of the model that was kept, on one CPU device.
    """
    structure, state = nnx.split(planned)
    parameters = nnx.to_flat_state(state)
    places, size = _places([variable.get_value() for _, variable in parameters])
    try:
        with file.open("rb") as opened:
            if (there := os.fstat(opened.fileno()).st_size) != size:
                logger.warning("%s has %d bytes in place of %d: the weights are prepared again", file, there, size)
                return None
            memory = mmap.mmap(opened.fileno(), size, prot=mmap.PROT_READ)
        os.utime(file)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("%s cannot be read, and the weights are prepared again: %s", file, error)
        return None

    def value(place: int, like: Any) -> jax.Array:
        array = np.frombuffer(memory, like.dtype, like.size, place).reshape(like.shape)
        return jax.device_put(array, like.sharding)

    filled = [
        (path, variable.replace(value(place, variable.get_value())))
        for (path, variable), place in zip(parameters, places, strict=True)
    ]
    return nnx.merge(structure, nnx.from_flat_state(filled))


def keep(model: nnx.Module, file: Path) -> bool:
    """Writes the file for `mapped`, whole or not at all. Whether it is there: a disk with little room is left alone,
    and an error is a warning."""
    arrays = [variable.get_value() for _, variable in nnx.to_flat_state(nnx.state(model))]
    places, size = _places(arrays)
    try:
        make_folder(file.parent)
        delete_unused(file.parent.glob(f"*{SUFFIX}*"), max_files=_KEPT_FILES - 1)  # and room for this one
        if shutil.disk_usage(file.parent).free < _FREE_SHARE * size:
            return False
        with writing_whole(file) as opened:
            for place, array in zip(places, arrays, strict=True):
                opened.seek(place)
                opened.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    except OSError as error:
        logger.warning("prepared weights cannot be kept: %s", error)
        return False
    return True


def _places(arrays: Sequence[Any]) -> tuple[list[int], int]:
    """Where each array begins, and the size of the file, in bytes."""
    return places_of((array.size * array.dtype.itemsize for array in arrays), _ALIGNED)
