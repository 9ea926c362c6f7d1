"""Zeros that take no memory: all are zero, also where other numbers were before."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.cpu import library
from pallas_kernels.cpu.zeros import zeros
from tests.c_compiler import NATIVE, compiler

PAGE = os.sysconf("SC_PAGESIZE")
# In bytes: parts of a page of memory, whole ones, and some with a rest.
SIZES = (0, 4, 60, PAGE - 4, PAGE, PAGE + 4, 2 * PAGE, 3 * PAGE + 64, 100 * PAGE, 10_000 * PAGE + 4)


@pytest.fixture(autouse=True, scope="module")
def in_c() -> None:
    compiler()
    library.load(NATIVE)


def likes(dtype: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((size // jnp.dtype(dtype).itemsize,), dtype) for size in SIZES]


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "int32"])
def test_all_are_zero_where_other_numbers_were(dtype):
    make = jax.jit(lambda: zeros(likes(dtype)))
    fill = jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)
    for _ in range(3):
        made = make()
        assert not any(np.asarray(x).any() for x in made)
        for x in fill(made):  # the memory is then free for the next
            assert (np.asarray(x) == 1).all()
            x.delete()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def test_memory_is_taken_by_what_is_used():
    size = 1 << 29
    make = jax.jit(lambda: zeros([jax.ShapeDtypeStruct((size,), jnp.int8)]))
    make()[0].delete()  # compiles it
    before = resident_bytes()
    (made,) = jax.block_until_ready(make())
    assert resident_bytes() - before < size // 8
    made.delete()


def test_a_type_without_zeros_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="there are no zeros of this type"):
        jax.block_until_ready(jax.jit(lambda: zeros([jax.ShapeDtypeStruct((3,), jnp.float16)]))())
