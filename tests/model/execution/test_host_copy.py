"""Arrays that come back from the host as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.execution.host_copy import HostCopy


@pytest.mark.parametrize(
    ("spec", "num_parts"),
    [((None, None), 1), (("x", None), 4), ((None, "y"), 2), (("x", "y"), 8), ((("x", "y"), None), 8)],
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4])
def test_an_array_comes_back_as_it_was(spec, num_parts, dtype):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = np.arange(-64, 64).reshape(16, 8) % 8
    array = jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, PartitionSpec(*spec)))
    expected = np.asarray(array).copy()
    copy = HostCopy.of(array)
    array.delete()
    assert len(copy.parts) == num_parts, "what several devices hold is kept once"
    again = copy.on_devices()
    assert (again.sharding, again.dtype) == (NamedSharding(mesh, PartitionSpec(*spec)), dtype)
    np.testing.assert_array_equal(np.asarray(again), expected)
