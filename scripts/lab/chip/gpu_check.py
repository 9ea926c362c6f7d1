"""Compares the GPU kernels on the attached device with attention in float32, before the timings.

Inputs are random in every run (the seed is in the report). Page slots without a token are NaN. Before each call, so is
the memory of outputs and partial results. A kernel that omits a write, or reads past a sequence's end, therefore gives
a wrong result.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import dense
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import Backend
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip.gpu_operands import Operands, Rows, make_operands

TOLERANCE = 0.03  # inputs of 16 bits, float32 inside, probabilities rounded to 16 bits
POISON_BYTES = 1 << 30

# (query heads, KV heads, head dim), page size, dtype: all forms of the kernels in the compile-only tests.
VARIANTS = [
    ((32, 8, 128), 64, "bfloat16"),
    ((32, 8, 64), 64, "bfloat16"),
    ((24, 8, 128), 32, "bfloat16"),
    ((8, 1, 128), 128, "bfloat16"),
    ((8, 8, 64), 16, "bfloat16"),
    ((16, 1, 128), 16, "bfloat16"),
    ((32, 8, 128), 64, "float16"),
]
BATCHES: list[Rows] = [
    [(1, 1), (1, 700), (1, 4097), (1, 64)],  # decodes: short, split, with a ragged end, with whole blocks only
    [(1, 300), (40, 300), (200, 200)],  # mixed
    [(1, 64), (513, 2000), (7, 7), (1000, 1001)],
]


def check_all(backend: Backend, variants: list[Any], batches: list[Rows], seed: int) -> Iterator[dict[str, Any]]:
    """One figure for each variant and batch. Raises SystemExit at the first wrong one."""
    for heads, page_size, dtype in variants:
        spec = make_spec(heads, page_size, jnp.dtype(dtype))
        for index, rows in enumerate(batches):
            error = check(backend, make_operands(spec, rows, seed + index))
            yield {"heads": list(heads), "page_size": page_size, "dtype": dtype, "rows": rows, "error": error}


def check(backend: Backend, operands: Operands) -> float:
    """The largest error of the output. Raises SystemExit if it exceeds TOLERANCE, or if the pages are wrong."""
    spec, rows = operands.spec, operands.rows
    attention = PagedAttention(spec, backend)

    @jax.jit
    def step(q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> tuple[jax.Array, jax.Array]:
        metadata = attention.make_metadata(
            operands.batch, num_tokens=operands.num_tokens, decode_only=operands.decode_only
        )
        return attention(q, k, v, pages, metadata)

    new = [operands.new(whole) for whole in (operands.keys, operands.values)]
    arrays = (operands.queries, *new, operands.pages(fill=np.nan))
    compiled = step.lower(*arrays).compile()
    poison(jax.devices()[0])
    output, pages = compiled(*arrays)
    error = float(np.abs(np.asarray(output, np.float32) - expected(operands)).max())
    if not error <= TOLERANCE:  # also true for NaN
        raise SystemExit(f"WRONG: {spec} {rows=} is off by {error} (tolerance {TOLERANCE})")
    wanted = np.asarray(operands.pages(fill=np.nan, with_new=True))
    if not np.array_equal(np.asarray(pages).view(np.uint16), wanted.view(np.uint16)):
        raise SystemExit(f"WRONG: {spec} {rows=}: something else than the step's keys and values changed in the pages")
    return error


def expected(operands: Operands) -> np.ndarray:
    """f32[T, N, H]: dense causal attention in numpy, row by row."""
    begin, query_begin, outputs = 0, 0, []
    queries, keys, values = (
        np.asarray(x.astype(jnp.float32)) for x in (operands.queries, operands.keys, operands.values)
    )
    for query_len, kv_len in operands.rows:
        rows, own = slice(begin, begin + kv_len), slice(query_begin, query_begin + query_len)
        outputs.append(dense.attend(queries[own], keys[rows], values[rows], scale=operands.spec.scale))
        begin, query_begin = begin + kv_len, query_begin + query_len
    return np.concatenate(outputs)


def poison(device: jax.Device) -> None:
    """Fills most of the device's free memory with NaN and frees it: the next outputs then begin as NaN.

    On a device that does not report its memory, such as a CPU, one array is filled.
    """
    stats = device.memory_stats() or {}
    free = stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)
    arrays = []
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the free memory is fragmented: fill what can be allocated
        for _ in range(max(1, free * 9 // 10 // POISON_BYTES)):
            size = (POISON_BYTES if free else 1 << 20) // 4
            arrays.append(jax.block_until_ready(jnp.full(size, np.nan, jnp.float32)))
    for array in arrays:
        array.delete()
