"""Times the call of a program with as many arguments as a model's step has, on arrays of a few bytes.

The call's cost is the host's work for every argument: it does not depend on the arrays' sizes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from model.network.sharding import abstract_model, make_mesh
from model.presets import preset

REPEATS = 300
NUM_PACKED = 1024  # i32, what the host sends
NUM_OUTPUT = 64  # i32, what it reads
SHAPE = (8, 8)  # of the arrays in place of weights and pages


@dataclass(frozen=True, slots=True)
class Dispatch:
    """One call; medians in microseconds."""

    num_devices: int
    num_layers: int
    num_arguments: int
    wall_us: float
    cpu_us: float  # of the calling thread


def time_dispatch(name: str, num_devices: int) -> Dispatch:
    """Times calls of a program with the arguments of the preset's step, on the first devices. The program adds one to
    its state, which is donated."""
    config = preset(name)
    mesh = make_mesh(num_devices)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P(mesh.axis_names[-1]))
    num_weights = len(jax.tree.leaves(nnx.state(abstract_model(config, dtype=jnp.bfloat16))))
    weights = [jnp.zeros(SHAPE, device=split) for _ in range(num_weights)]
    state = {
        "slots": jnp.zeros(SHAPE, jnp.int32, device=whole),
        "history": jnp.zeros(SHAPE, jnp.int32, device=split),
        "masks": jnp.zeros(SHAPE, jnp.int32, device=whole),
        "kv": [jnp.zeros(SHAPE, device=split) for _ in range(config.num_layers)],
    }
    packed = np.zeros(NUM_PACKED, np.int32)

    def step(weights: Any, state: Any, packed: jax.Array) -> tuple[Any, jax.Array]:
        return jax.tree.map(lambda x: x + 1, state), packed[:NUM_OUTPUT]

    kept = jax.tree.map(lambda x: x.sharding, state)
    options: dict[str, Any] = {"donate_argnums": 1, "out_shardings": (kept, whole), "keep_unused": True}
    sent = jax.ShapeDtypeStruct(packed.shape, packed.dtype, sharding=whole)
    program = jax.jit(step, **options).lower(weights, state, sent).compile()
    wall, cpu = [], []
    for _ in range(REPEATS):
        before, cpu_before = time.perf_counter(), time.thread_time()
        state, output = program(weights, state, packed)
        cpu.append(time.thread_time() - cpu_before)
        wall.append(time.perf_counter() - before)
        np.asarray(output)
        jax.block_until_ready(state)
    return Dispatch(
        num_devices=num_devices,
        num_layers=config.num_layers,
        num_arguments=len(jax.tree.leaves((weights, state))) + 1,
        wall_us=float(np.median(wall)) * 1e6,
        cpu_us=float(np.median(cpu)) * 1e6,
    )
