"""Memory of arrays in Linux's pages of 2 MiB. A step of few rows reads all weights from memory, in about two thirds of
the time: with pages of 4 KiB a core waits for the addresses of pages, too."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import jax

SIZE = 2 << 20  # bytes
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise


def use(arrays: Iterable[jax.Array]) -> int:
    """Moves the memory of a CPU's arrays into huge pages, as far as Linux has them: it copies 2 MiB at a time. Returns
    how many bytes are there now.

    It is 0 on other systems and before Linux 6.1, and if the machine's owner has turned huge pages off. Memory that is
    mapped from a file, and what is not a whole page, stays as it is.
    """
    if sys.platform != "linux" or not _are_allowed():
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for array in arrays:
        for shard in array.addressable_shards:
            first = -(-shard.data.unsafe_buffer_pointer() // SIZE) * SIZE
            end = (shard.data.unsafe_buffer_pointer() + shard.data.nbytes) // SIZE * SIZE
            for page in range(first, end, SIZE):
                if madvise(page, SIZE, _HUGEPAGE) or madvise(page, SIZE, _COLLAPSE):
                    break  # it is not anonymous memory, or there are no more
                moved += SIZE
    return moved


def _are_allowed() -> bool:
    with suppress(OSError):
        return "[never]" not in SETTING.read_text()
    return False
