"""Works on a step's rows a block at a time, as many blocks as there are rows in use.

A TPU's compiler takes longer for more rows: of 64 rows and a vocabulary of 128,256 tokens, 4.9 CPU seconds for the
most likely tokens alone, and 0.6 for 16 rows. In blocks, a step with few rows also costs as much in a program with many
rows as in one with few, so prompts need no programs with few rows
(`scripts/lab/results/2026-11-26-ladder.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

ROWS = 16  # of a block: with fewer, a full step costs more; with more, a step of a few rows does


def in_blocks[Rows, Kept](
    function: Callable[[Rows, Kept], tuple[Any, Kept]], rows: Rows, kept: Kept, num_used: jax.Array
) -> tuple[Any, Kept]:
    """`function(rows, kept)` -> (results, kept), called for one block of rows after the other.

    Args:
        function: its results of a row do not depend on the other rows. Rows of zeros must leave `kept` as it is: the
            last block may be filled up with them.
        rows: a tree of arrays [S, ...].
        kept: what a block leaves to the next one.
        num_used: i32, the rows up to the last one whose results are used.

    Returns:
        The results [S, ...], and what the last block leaves. Rows behind the used blocks have zeros.
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
