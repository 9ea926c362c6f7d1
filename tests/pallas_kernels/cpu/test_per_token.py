"""What C computes of each token, against float64, on this CPU's vectors and on narrower ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.cpu import per_token

pytestmark = pytest.mark.usefixtures("target")

# Of the largest number of a row: roundings of float32, and one or two to bfloat16.
TOLERANCE = {np.dtype(np.float32): 1e-6, np.dtype(jnp.bfloat16): 2.0**-7}
EPSILON = 1e-5
DTYPES = list(TOLERANCE)
SHAPES = {"rows": st.integers(1, 70), "half": st.integers(1, 600), "seed": st.integers(0, 99)}
Operation = Callable[..., tuple[jax.Array, ...]]


def drawn(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Numbers of very different sizes."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-6, 6, shape))).astype(dtype)


def turns(rows: int, half: int, seed: int = 0) -> np.ndarray:
    """cos and sin, f32[2, rows, 1, half]."""
    angles = np.random.default_rng(seed).uniform(-9, 9, (rows, 1, half))
    return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)


def norms(x: np.ndarray, added: np.ndarray, scale: np.ndarray) -> tuple[jax.Array, ...]:
    return (per_token.norm(x, scale, EPSILON), *per_token.norm_of_sum(x, added, scale, EPSILON))


def call(operation: Operation, *arguments: np.ndarray) -> list[np.ndarray]:
    # Traced anew: under another target the custom call has another name.
    return [np.asarray(x) for x in jax.tree.leaves(jax.jit(lambda *x: operation(*x))(*arguments))]


def check(found: np.ndarray, expected: np.ndarray, dtype: Any) -> None:
    assert found.dtype == dtype
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    assert (np.abs(found.astype(np.float64) - expected) <= TOLERANCE[np.dtype(dtype)] * largest).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(**SHAPES)
def test_norms(dtype, rows, half, seed):
    x, added = (drawn((rows, 2 * half), dtype, seed + i) for i in (0, 1))
    scale = drawn((2 * half,), dtype, seed)
    alone, sums, of_sums = call(norms, x, added, scale)
    total = (x.astype(np.float32) + added.astype(np.float32)).astype(dtype)
    np.testing.assert_array_equal(sums, total)
    for found, inputs in ((alone, x), (of_sums, total)):
        wide = inputs.astype(np.float64)
        normed = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + EPSILON)
        check(found, normed * scale.astype(np.float64), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(**SHAPES)
def test_gates(dtype, rows, half, seed):
    columns = drawn((rows, 2 * half), dtype, seed)
    (found,) = call(per_token.gate, columns)
    gate, up = np.split(columns.astype(np.float64), 2, axis=1)
    assert found.dtype == dtype
    error = np.abs(found.astype(np.float64) - gate / (1 + np.exp(-gate)) * up)
    assert (error <= TOLERANCE[dtype] * np.abs(gate * up)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(
    rows=st.integers(1, 40), half=st.integers(1, 70), heads=st.integers(1, 7), kv=st.integers(1, 3), seed=st.integers(0)
)
def test_rotations(dtype, rows, half, heads, kv, seed):
    columns, (cos, sin) = drawn((rows, (heads + 2 * kv) * 2 * half), dtype, seed % 100), turns(rows, half, seed % 100)
    found = call(lambda *x: per_token.rotate(*x, heads), columns, cos, sin)
    queries, keys, values = np.split(columns.reshape(rows, -1, 2 * half), [heads, heads + kv], axis=1)
    np.testing.assert_array_equal(found[2], values)
    for result, before in zip(found, (queries, keys), strict=False):
        first, second = np.split(before.astype(np.float64), 2, axis=-1)
        check(result, np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1), dtype)


@settings(max_examples=10)
@given(rows=st.integers(1, 20), width=st.integers(1, 20_000), shift=st.sampled_from([0, -300, 300]))
def test_sums_of_exponentials(rows, width, shift):
    logits = (drawn((rows, width), np.float64) + shift).astype(np.float32)
    (found,) = call(per_token.log_sum_exp, logits)
    wide = logits.astype(np.float64)
    greatest = wide.max(axis=1)
    expected = greatest + np.log(np.exp(wide - greatest[:, None]).sum(axis=1))
    assert (np.abs(found - expected) <= 2e-6 + 1e-7 * np.abs(expected)).all()


def test_sums_of_exponentials_of_which_most_are_zero():
    """Parts of a row, and a whole row, are negative infinity; what is not a number shows among them, too."""
    logits = np.full((4, 128_256), -np.inf, np.float32)
    logits[0, [70_000, 128_255]], logits[1, 3], logits[2, 9] = (2, 3), -40, np.nan
    (found,) = call(per_token.log_sum_exp, logits)
    np.testing.assert_allclose(found, [np.logaddexp(2, 3), -40, np.nan, -np.inf], rtol=1e-6)


@settings(max_examples=5)
@given(rows=st.integers(1, 40), width=st.integers(1, 5000), seed=st.integers(0, 99))
def test_tempered_weights(rows, width, seed):
    """Of the greatest logit 1; of a banned one, whose logit is negative infinity, 0."""
    logits = drawn((rows, width + 1), np.float32, seed)
    logits[:, 0] = -np.inf
    temperature = np.random.default_rng(seed).uniform(0.1, 2, rows).astype(np.float32)
    greatest = logits.max(axis=1)
    (found,) = call(per_token.temper, logits, greatest, temperature)
    exponent = (logits.astype(np.float64) - greatest[:, None]) / temperature[:, None]
    # an exponent is rounded twice, and then e^x to float32
    bound = np.exp(exponent) * (3e-7 + 2.0**-22 * np.where(np.isfinite(exponent), np.abs(exponent), 0)) + 2e-38
    assert (np.abs(found - np.exp(exponent)) <= bound).all()
    assert (found[:, 0] == 0).all() and (found.max(axis=1) == 1).all()


def adapters(
    dtype: Any, *, slots: int, rank: int, depth: int, widths: tuple[int, ...], seed: int = 0
) -> list[np.ndarray]:
    """A [P, slots * rank, depth], and B [slots * rank, width] of each projection."""
    shapes = [(len(widths), slots * rank, depth), *((slots * rank, width) for width in widths)]
    return [drawn(shape, dtype, seed + i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=5)
@given(
    rows=st.integers(1, 20), depth=st.integers(1, 300), widths=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    rank=st.integers(1, 19), num_slots=st.integers(1, 4), seed=st.integers(0, 99),
)  # fmt: skip
def test_adapters(dtype, rows, depth, widths, rank, num_slots, seed):
    x, y = drawn((rows, depth), dtype, seed), drawn((rows, sum(widths)), dtype, seed + 1)
    slots = np.random.default_rng(seed).integers(0, num_slots + 1, rows).astype(np.int32)
    a, *bs = adapters(dtype, slots=num_slots, rank=rank, depth=depth, widths=tuple(widths), seed=seed)
    (found,) = call(
        lambda x, y, *weights: per_token.add_adapters(x, y, slots, weights[0], weights[1:], rank), x, y, a, *bs
    )
    wide = [array.astype(np.float64) for array in (x, y, a, *bs)]
    expected, magnitude = wide[1].copy(), np.abs(wide[1])
    for row, slot in enumerate(slots):
        if slot:
            own = slice((slot - 1) * rank, slot * rank)
            reduced = [wide[0][row] @ part[own].T for part in wide[2]]
            expected[row] += np.concatenate([low @ b[own] for low, b in zip(reduced, wide[3:], strict=True)])
            sizes = [np.abs(wide[0][row]) @ np.abs(part[own]).T for part in wide[2]]
            magnitude[row] += np.concatenate([size @ np.abs(b[own]) for size, b in zip(sizes, wide[3:], strict=True)])
    assert found.dtype == dtype
    assert (np.abs(found.astype(np.float64) - expected) <= 4 * TOLERANCE[np.dtype(dtype)] * magnitude).all()
    assert (found[slots == 0] == y[slots == 0]).all()


def _weights(arrays: list[np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    return arrays[0], arrays[1:]


OPERATIONS: dict[str, tuple[Operation, Callable[[Any], list[np.ndarray]]]] = {
    "norm": (
        lambda x, added: norms(x, added, jnp.asarray(drawn((x.shape[1],), x.dtype))),
        lambda dtype: [drawn((300, 1000), dtype), drawn((300, 1000), dtype, 1)],
    ),
    "gate": (per_token.gate, lambda dtype: [drawn((300, 1400), dtype)]),
    "rotation": (
        lambda *x: per_token.rotate(*x, 6),
        lambda dtype: [drawn((300, 10 * 80), dtype), *turns(300, 40)],
    ),
    "adapters": (
        lambda x, y, slots: (
            per_token.add_adapters(
                x, y, slots, *_weights(adapters(x.dtype, slots=4, rank=2, depth=100, widths=(90, 60))), 2
            ),
        ),
        lambda dtype: [
            drawn((300, 100), dtype),
            drawn((300, 150), dtype, 1),
            np.arange(300, dtype=np.int32) % 5,
        ],
    ),
    "tempered weights": (
        lambda x: (per_token.temper(x, x.max(axis=1), abs(x[:, 0]) + 1),),
        lambda _: [drawn((300, 1001), np.float32)],
    ),
    "sum of exponentials": (per_token.log_sum_exp, lambda _: [drawn((300, 9001), np.float32)]),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_of_a_row_do_not_depend_on_the_others(name, dtype):
    operation, make = OPERATIONS[name]
    arguments = make(dtype)
    whole = call(operation, *arguments)
    for rows in (1, 2, 7, 8, 9, 16, 33, 64, 193):
        for part, of_all in zip(call(operation, *(x[-rows:] for x in arguments)), whole, strict=True):
            assert part.tobytes() == of_all[-rows:].tobytes()


def test_what_is_not_finite_shows_in_its_own_row():
    x = drawn((4, 40), np.float32)
    x[1, 3], x[2, 39] = np.nan, np.inf
    normed, _, of_sums = call(norms, x, np.ones_like(x), np.ones(40, np.float32))
    gated, exponentials = call(per_token.gate, x), call(per_token.log_sum_exp, x)
    for found in (normed, of_sums, *gated, exponentials[0][:, None]):
        assert [bool(np.isfinite(row).all()) for row in found] == [True, False, False, True]


def test_a_gate_far_from_zero_is_its_number_or_nothing():
    gates = np.array([[-3e38, -1e4, -100, -88, 88, 100, 1e4, 3e38]], np.float32)
    (found,) = call(per_token.gate, np.concatenate([gates, np.ones_like(gates)], axis=1))
    np.testing.assert_allclose(found, [[0, 0, 0, 0, 88, 100, 1e4, 3e38]], rtol=1e-6, atol=1e-30)
