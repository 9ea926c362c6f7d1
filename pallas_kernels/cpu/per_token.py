"""The operations of a step on each token other than products and attention, in C. The bits of a token do not depend on
the number of tokens. The bits of XLA's sums, exponentials and roots do.

Shape legend: `T` tokens, `D` embed, `F` mlp, `N` query heads, `K` KV heads, `H` head dim, `S` rows, `V` vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library
from pallas_kernels.cpu.library import ADD_ADAPTERS, GATE, LOG_SUM_EXP, NORM, ROTATE, TEMPER

LOGITS_OF_CHUNK = 4096  # per_token.c
TESTED = ((3, 40),)  # tokens and width of the self-test's rows
TOLERANCE = {jnp.dtype(jnp.float32): 2e-6, jnp.dtype(jnp.bfloat16): 2e-2}  # of the self-test, of the largest number


def norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """The root-mean-square norm of x [T, D], rounded to its type and multiplied with scale [D] of that type, float32 or
    bfloat16. Statistics are in float32."""
    return library.function(NORM, _like(x.shape, x))(x, scale.astype(x.dtype), epsilon=np.float32(epsilon))


def norm_of_sum(x: jax.Array, added: jax.Array, scale: jax.Array, epsilon: float) -> tuple[jax.Array, jax.Array]:
    """x + added, and the `norm` of the sum, [T, D] each."""
    call = library.function(NORM, (_like(x.shape, x), _like(x.shape, x)))
    normed, sums = call(x, scale.astype(x.dtype), added.astype(x.dtype), epsilon=np.float32(epsilon))
    return sums, normed


def gate(columns: jax.Array) -> jax.Array:
    """silu of the first half of each row of [T, 2 F], times the second half: [T, F] of the same type, float32 or
    bfloat16, computed in float32."""
    return library.function(GATE, _like((columns.shape[0], columns.shape[1] // 2), columns))(columns)


def rotate(
    columns: jax.Array, cos: jax.Array, sin: jax.Array, num_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Splits columns [T, (N + 2 K) * H], float32 or bfloat16, into queries [T, N, H], keys and values [T, K, H]. Each
    pair (i, i + H / 2) of queries and keys is rotated in float32.

    Args:
        cos, sin: f32[T, 1, H / 2].
        num_heads: N, the number of query heads.
    """
    dim, rows = 2 * cos.shape[-1], columns.shape[0]
    num_kv_heads = (columns.shape[1] // dim - num_heads) // 2
    keys = _like((rows, num_kv_heads, dim), columns)
    call = library.function(ROTATE, (_like((rows, num_heads, dim), columns), keys, keys))
    queries, keys, values = call(columns, cos, sin)
    return queries, keys, values


def add_adapters(
    inputs: jax.Array, outputs: jax.Array, slots: jax.Array, a: jax.Array, bs: Sequence[jax.Array], rank: int
) -> jax.Array:
    """The outputs [T, E] of products of inputs [T, D], with what LoRA adapters add: for each of the fused projections,
    inputs times the rows of its A, times those of its B, of the token's adapter. All are float32 or bfloat16, and sums
    are in float32.

    Args:
        slots: i32[T], of each token's adapter, from 1; 0: it has none, and its outputs stay as they are.
        a: [P, S * rank, D], of S slots and P projections.
        bs: for each projection [S * rank, n]; the n of all are E.
        rank: at most 512.
    """
    groups = jax.ShapeDtypeStruct((2, len(inputs) + 1), jnp.int32)  # what the C code works in
    call = library.function(ADD_ADAPTERS, (_like(outputs.shape, outputs), groups), input_output_aliases={1: 0})
    added, _ = call(inputs.astype(outputs.dtype), outputs, slots, a, *bs, rank=np.int32(rank))
    return added


def log_sum_exp(logits: jax.Array) -> jax.Array:
    """The logarithm f32[S] of the sum of e^logit over logits f32[S, V]."""
    rows, chunks = logits.shape[0], -(-logits.shape[1] // LOGITS_OF_CHUNK)
    of_chunks = _like((rows, chunks), logits)  # what the C code works in
    found, *_ = library.function(LOG_SUM_EXP, (_like((rows,), logits), of_chunks, of_chunks))(logits)
    return found


def temper(logits: jax.Array, greatest: jax.Array, temperature: jax.Array) -> jax.Array:
    """exp((logit - greatest) / temperature), f32[S, V]; `greatest` and `temperature` are f32[S]. Below e^-87 it is
    0."""
    return library.function(TEMPER, _like(logits.shape, logits))(logits, greatest, temperature)


def fault(shapes: Sequence[tuple[int, int]] = TESTED) -> str | None:
    """The first wrong result of this machine's C code, in words; None: all agree with float64.

    Args:
        shapes: tokens and width of each test; the widths are even.
    """
    rng = np.random.default_rng(0)
    for rows, width in shapes:
        half = width // 2
        turn = np.exp(1j * rng.standard_normal((rows, 1, half)))
        for dtype, tolerance in TOLERANCE.items():
            x, added, scale = rng.standard_normal((3, rows, width)).astype(dtype)
            wide, total, scale64 = (y.astype(np.float64) for y in (x, x + added, scale[0]))
            turned = (wide[:, :half] + 1j * wide[:, half:]) * turn[:, 0]
            expected = {
                "norm": total * scale64 / np.sqrt((total**2).mean(axis=1)[:, None]),
                "gate": wide[:, :half] / (1 + np.exp(-wide[:, :half])) * wide[:, half:],
                "rotation": np.concatenate([turned.real, turned.imag], axis=1)[:, None],
                "sum of exponentials": np.log(np.exp(wide).sum(axis=1)),
                "weights": np.exp(wide - wide.max(axis=1, keepdims=True)),
                "adapters": wide + wide @ total.T @ total,
            }
            cos, sin, columns = turn.real.astype(np.float32), turn.imag.astype(np.float32), np.tile(x, 3)
            found = _tested(x, added, scale[0], columns, cos, sin)
            for name, result in zip(expected, found, strict=True):
                error = np.abs(np.asarray(result, np.float64) - expected[name]).max()
                if not error <= tolerance * np.abs(expected[name]).max():
                    return f"the {name} of {rows} rows of {width} numbers in {dtype} is wrong"
    return None


def _tested(x: Any, added: Any, scale: Any, columns: Any, cos: Any, sin: Any) -> tuple[jax.Array, ...]:
    """What `fault` compares, compiled as one program."""

    def compute(x: jax.Array, added: jax.Array, scale: jax.Array, columns: jax.Array) -> tuple[jax.Array, ...]:
        keys, logits = rotate(columns, jnp.asarray(cos), jnp.asarray(sin), 1)[1], x.astype(jnp.float32)
        weights = temper(logits, logits.max(axis=1), jnp.ones(logits.shape[0], jnp.float32))
        low = x + added  # A and B of one slot
        adapted = add_adapters(x, x, jnp.ones(len(x), jnp.int32), low[None], [low], len(low))
        return norm_of_sum(x, added, scale, 0)[1], gate(x), keys, log_sum_exp(logits), weights, adapted

    return jax.jit(compute)(x, added, scale, columns)


def _like(shape: tuple[int, ...], x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)
