"""Runs the C code with the compiler's sanitizers: `python sanitized.py LIBRARY`, with their libraries preloaded.

It prints every kind of pages that has passed, the products, what is computed of each token, weights, and zeros. Then
it runs a library whose check of page ids is gone, over a page that does not exist, in a process of its own: the
sanitizer must end it, or this test sees nothing.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import PagedAttention
from pallas_kernels.cpu import four_bit, library, per_token, products
from pallas_kernels.cpu.zeros import zeros
from pallas_kernels.self_test import Program, SelfTest
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch

SANITIZERS = ("-fsanitize=address,undefined", "-O1")
FOUND = 99  # the exit code that the test asks of the sanitizers
PROGRAMS = [Program(num_tokens=64, num_rows=4), Program(num_tokens=4, num_rows=4)]
FAULTS = {
    # one pass, several, more than one block of rows and of inputs, and rows that are copied with gaps
    "products": partial(products.fault, [(1, 2, 32), (5, 34, 96), (110, 1026, 64), (13, 4096, 32)]),
    "four-bit": partial(four_bit.fault, [(1, 32, 32), (5, 352, 64), (70, 1056, 96)]),
    # widths with and without a rest, several parts, and more than one chunk of logits
    "tokens": partial(per_token.fault, [(1, 2), (5, 34), (70, 1026), (2, 9002)]),
}
KINDS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "float32"}


def attention(kind: str) -> PagedAttention:
    dtypes = {"kv_dtype": jnp.dtype(kind), "dtype": jnp.dtype(KINDS[kind])}
    return PagedAttention(
        AttentionSpec(num_query_heads=6, num_kv_heads=2, head_dim=80, page_size=16, **dtypes), Backend.CPU
    )


def register(path: Path, names: Sequence[str] = library.NAMES) -> None:
    functions = ctypes.CDLL(str(path))
    library._loaded.update(dict.fromkeys((False, True), functions))
    for name in names:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(functions[name]), platform="cpu")


def overrun(path: Path) -> None:
    """Attends over a page far behind the last one."""
    sources = path.parent / "unchecked"
    sources.mkdir()
    for source in (*library.SOURCES.glob("*.h"), library.SOURCES / "attention.c"):
        text = source.read_text().replace("if (page < 0 || page >= a->num_pages)", "if (0)")
        (sources / source.name).write_text(text)
    library.compile_library(library.find_compiler(), path, *SANITIZERS, sources=[sources / "attention.c"])
    register(path, [library.ATTEND])
    batch = RaggedBatch(
        page_table=np.full((1, 4), 3, np.int32),
        kv_lens=np.array([20], np.int32),
        query_starts=np.array([0, 1], np.int32),
        num_singles=np.int32(1),
        num_rows=np.int32(1),
    )
    of = attention("float32")
    x = np.zeros((1, 6, 80), np.float32)
    pages = jnp.zeros(of.kv_pages(2).shape)

    def step(x: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        return of(x, x[:, :2], x[:, :2], pages, of.make_metadata(batch, num_tokens=1, decode_only=True))

    jax.jit(step, donate_argnums=1)(x, pages)[0].block_until_ready()


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if sys.argv[2:] == ["overrun"]:
        overrun(path)
        sys.exit("nothing was noticed")
    library.compile_library(library.find_compiler(), path, *SANITIZERS)
    register(path)
    for kind in KINDS:
        SelfTest(attention(kind), pages_per_seq=44).run(PROGRAMS)
        print(kind, flush=True)
    for name, fault in FAULTS.items():
        print(fault() or name, flush=True)
    far = np.full((3, 17), -1000, np.float32)  # the numbers behind a row's end are far above its greatest
    print("weights" if (per_token.temper(far, far[:, 0], np.full(3, 0.1, np.float32)) == 1).all() else "wrong weights")
    ends = zeros([jax.ShapeDtypeStruct((size,), jnp.int8) for size in (1, 4095, 4096, 100_001)])
    print("wrong zeros" if any(np.asarray(x).any() for x in ends) else "zeros", flush=True)
    code = os.spawnv(
        os.P_WAIT, sys.executable, [sys.executable, __file__, str(path.with_name("overrun.so")), "overrun"]
    )
    print("overrun" if code == FOUND else f"unnoticed: {code}")
