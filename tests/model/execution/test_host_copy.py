"""Arrays that come back from the host as they were."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from model.execution.host_copy import DEVICE, HOST, copied


def addresses(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("spec", [(None, None), ("x", None), (None, "y"), ("x", "y"), (("x", "y"), None)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int4, jnp.int8, jnp.uint8, jnp.float8_e4m3fn, jnp.float4_e2m1fn])
def test_an_array_comes_back_as_it_was(spec, dtype):
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    values = np.arange(-64, 64).reshape(16, 8) % 8
    array = jax.device_put(jnp.asarray(values, dtype), NamedSharding(mesh, PartitionSpec(*spec)))
    expected = np.asarray(array).copy()
    places = addresses(array)
    copy = copied(array, HOST, shares=True)
    array.delete()
    own = copied(copy, DEVICE)
    assert not {*addresses(own)} & {*addresses(copy)}
    again = copied(copy, DEVICE, shares=True)
    assert copy.sharding == NamedSharding(mesh, PartitionSpec(*spec), memory_kind="pinned_host")
    copy.delete()
    assert addresses(again) == places or dtype in (jnp.int4, jnp.float4_e2m1fn), "a CPU copies nothing"
    assert (again.sharding, again.dtype) == (NamedSharding(mesh, PartitionSpec(*spec)), dtype)
    for each in (again, own):
        np.testing.assert_array_equal(np.asarray(each), expected)
