"""Arrays from another process: what arrives is what was given, and what cannot arrive is said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from model.loading.received_arrays import DTYPES, places, received


@dataclass(frozen=True)
class Named:
    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Block:
    block: str
    arrays: Sequence[Named]


NAMED = (
    Named("a", "float32", (3, 5)),
    Named("b", "bfloat16", (7,)),
    Named("d", "float16", (1, 9)),
    Named("scalar", "float16", ()),
    Named("c", "bfloat16", (2, 2, 2)),
)


def drawn() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.standard_normal(named.shape).astype(DTYPES[named.dtype]) for named in NAMED]


@contextlib.contextmanager
def block_of(arrays: Sequence[np.ndarray]) -> Iterator[SharedMemory]:
    starts, size = places(NAMED)
    block = SharedMemory(create=True, size=size)
    try:
        for array, start in zip(arrays, starts, strict=True):
            data = array.tobytes()
            block.buf[start : start + len(data)] = data
        yield block
    finally:
        block.close()
        block.unlink()


def check(found: dict[str, np.ndarray], arrays: Sequence[np.ndarray]) -> None:
    assert list(found) == [named.name for named in NAMED]
    for one, array in zip(found.values(), arrays, strict=True):
        assert (one.dtype, one.shape) == (array.dtype, array.shape)
        assert one.tobytes() == array.tobytes()


def test_arrays_lie_one_after_the_other_each_aligned():
    assert places(NAMED) == ([0, 64, 128, 192, 256], 272)
    assert places(()) == ([], 0)


def test_a_block_is_copied_and_stays_its_makers():
    arrays = drawn()
    with block_of(arrays) as block:
        found = received(Block(block.name, NAMED))
        block.buf[:] = bytes(block.size)  # the maker's to use again
        check(found, arrays)
        again = SharedMemory(block.name, track=False)
        again.close()


def test_what_is_wrong_with_a_block_is_said():
    with pytest.raises(ValueError, match="no block 'nowhere' of shared memory on this machine"):
        received(Block("nowhere", NAMED))
    with block_of(drawn()) as block:
        large = (*NAMED, Named("large", "float32", (1 << 40,)))
        with pytest.raises(ValueError, match="and the arrays take 439"):
            received(Block(block.name, large))
        odd = (Named("odd", "object", (1,)), Named("int", "int64", (1,)), Named("empty", "float32", (0, 4)))
        with pytest.raises(ValueError, match="float16: odd has type object, int has type int64, empty has no numbers"):
            received(Block(block.name, odd))
