"""Computes a step's rows in blocks, and only the blocks with rows in use.

A TPU's compiler takes longer for more rows. With a vocabulary of 128,256 tokens, the most likely tokens alone take 4.9
CPU seconds for 64 rows, and 0.6 for 16 rows. In blocks, a step with few rows costs the same in a program with many rows
as in a program with few, so prompts need no programs with few rows (`scripts/lab/results/2026-11-26-ladder.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 16  # rows of a block: with fewer, a full step costs more; with more, a step of a few rows costs more


def in_blocks[Rows, Kept](
    function: Callable[[Rows, Kept], tuple[Any, Kept]], rows: Rows, kept: Kept, num_used: jax.Array
) -> tuple[Any, Kept]:
    """`function(rows, kept)` -> (results, kept), called for one block of rows after the other.

    Args:
        function: the computation. Its results for a row must not depend on the other rows. Rows of zeros must not
            change `kept`, because they may pad the last block.
        rows: a tree of arrays [S, ...].
        kept: the value that a block passes to the next one.
        num_used: i32, the number of rows up to the last row whose results are used.

    Returns:
        The results [S, ...], and the `kept` of the last block. Rows after the used blocks have zeros.
    """
    num_rows = jax.tree.leaves(rows)[0].shape[0]
    if num_rows <= ROWS:
        return function(rows, kept)
    missing = -num_rows % ROWS
    if missing:
        rows = jax.tree.map(lambda x: jnp.pad(x, ((0, missing), *[(0, 0)] * (x.ndim - 1))), rows)

    def block(number: jax.Array | int) -> Rows:
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, number * ROWS, ROWS), rows)

    def run(number: jax.Array, carry: tuple[Any, Kept]) -> tuple[Any, Kept]:
        results, kept = carry
        of_block, kept = function(block(number), kept)
        put = jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, number * ROWS, 0), results, of_block)
        return put, kept

    like, _ = jax.eval_shape(function, block(0), kept)
    zeros = jax.tree.map(lambda x: jnp.zeros((num_rows + missing, *x.shape[1:]), x.dtype), like)
    results, kept = lax.fori_loop(0, (num_used + ROWS - 1) // ROWS, run, (zeros, kept))
    return jax.tree.map(lambda x: x[:num_rows], results), kept
