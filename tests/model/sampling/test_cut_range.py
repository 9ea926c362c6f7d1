"""The search for a threshold cuts its range into parts without losing either end."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling.threshold import ONE, _cut_range


@pytest.mark.parametrize("num_parts", [2, 16])
def test_parts_cover_the_range_and_are_as_even_as_integers_allow(num_parts):
    low = np.array([0, 0, 5, ONE - 40, 7], np.int32)
    high = np.array([ONE + 1, 17, 36, ONE + 1, 8], np.int32)
    bits = np.asarray(_cut_range(jnp.array(low), jnp.array(high), num_parts))
    np.testing.assert_array_equal(bits[:, [0, -1]], np.stack([low, high], axis=1))
    widths = np.diff(bits, axis=1)
    assert (widths.max(axis=1) - widths.min(axis=1) <= 1).all()
