"""The generator against the known answers of its authors and against JAX's own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.sampling.threefry import gumbel, threefry2x32

# "threefry2x32 20" of kat_vectors in Random123, the authors' own distribution: key, counter, output.
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
]


@pytest.mark.parametrize(("key", "counter", "output"), KNOWN_ANSWERS)
def test_known_answers(key, counter, output):
    words = threefry2x32(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
    assert tuple(int(word) for word in words) == output


def test_gumbel_noise_follows_its_distribution():
    from scipy import stats  # takes a second, which every process would spend that collects tests

    bits = jax.random.bits(jax.random.key(0), (50_000,))
    assert stats.kstest(np.asarray(gumbel(bits)), stats.gumbel_r.cdf).pvalue > 1e-3
