"""Sums that do not depend on the order, against Python's whole numbers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from model.sampling.exact_sum import BITS, MAX_TERMS, as_float, cut, exact_sum
from tests.examples import examples

NUM = 96
UNIT = 2 ** (3 * BITS)
LARGEST = MAX_TERMS * UNIT
weights_of_rows = hnp.arrays(np.float32, (3, NUM), elements=st.floats(0, 1, width=32, allow_subnormal=False))
_sum, _float = jax.jit(exact_sum), jax.jit(as_float)


def whole_number(sums):
    """The sum in units of 2**-39, of u32[3]."""
    high, middle, low = (int(x) for x in sums)
    return (high << 2 * BITS) + (middle << BITS) + low


@settings(max_examples=examples(60), derandomize=True)
@given(weights_of_rows)
def test_the_sum_is_of_whole_numbers(weights):
    sums = np.asarray(_sum(weights))
    for i in range(len(weights)):
        assert whole_number(sums[:, i]) == sum(int(float(w) * UNIT) for w in weights[i])


@settings(max_examples=examples(40), derandomize=True)
@given(weights_of_rows, st.permutations(range(NUM)), st.sampled_from([2, 3, 4, 8]))
def test_neither_order_nor_parts_change_it(weights, order, num_parts):
    sums = np.asarray(_sum(weights))
    parts = np.split(weights[:, np.array(order)], num_parts, axis=1)
    added = sum(np.asarray(jax.jit(exact_sum)(part)) for part in parts)
    np.testing.assert_array_equal(_float(added), _float(sums))
    assert [whole_number(added[:, i]) for i in range(3)] == [whole_number(sums[:, i]) for i in range(3)]


@settings(max_examples=examples(200), derandomize=True)
@given(st.integers(0, LARGEST), st.one_of(st.integers(0, 4), st.integers(0, LARGEST)))
def test_a_greater_sum_is_no_smaller_float(one, more):
    def parts(number):
        return np.array([number >> 2 * BITS, number >> BITS & 2**BITS - 1, number & 2**BITS - 1], np.uint32)

    less, greater = sorted((one, min(one + more, LARGEST)))
    small, large = float(_float(parts(less))), float(_float(parts(greater)))
    assert small <= large
    assert small == pytest.approx(less / UNIT, rel=2**-22)


def test_a_vocabulary_of_equals_does_not_overflow():
    sums = _sum(np.ones((1, 2**19 - 1), np.float32))
    assert float(as_float(sums)[0]) == 2**19 - 1
    with pytest.raises(ValueError, match="at most 524287 terms"):
        jax.eval_shape(exact_sum, jax.ShapeDtypeStruct((1, 2**19), jnp.float32))


def test_what_is_too_small_to_count_is_cut_off():
    assert [int(x) for x in cut(jnp.float32(2.0**-39 * 3.75))] == [0, 0, 3]
    assert [int(x) for x in cut(jnp.float32(1))] == [2**BITS, 0, 0]
