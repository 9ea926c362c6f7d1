"""Compiles a quantised product for a chip that is not here and prints what the compiler says, one JSON object a line.

Run in a process of its own: `python -m tests.model.network.compile_linear h200`, or `v6e:1x1` in place of `h200`.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from model.compiling.compiler_options import compiler_options
from model.network.linear import Linear
from model.network.packed import pack_for_tpu
from model.quantization.forms import EightBit, FourBit, Rounding, ScaleFormat, WeightForm
from pallas_kernels.chips import GpuChip, TpuChip
from scripts.lab.accounts.targets import target_named

SHAPE = (14336, 4096)  # of Llama 3.1 8B: half of gate_up
ROWS = (1, 64, 512)


def forms(chip: TpuChip | GpuChip) -> list[tuple[WeightForm | None, Rounding | None]]:
    """Those that the chip has a fast form for. Rounded inputs are compiled for any number of rows: a checkpoint may ask
    for them."""
    weights: list[WeightForm] = [form for form in EightBit if form in chip.reads]
    if "int4" in chip.reads:
        weights += [FourBit(group=128), FourBit(group=32, has_zeros=True)]
    if "nvfp4" in chip.reads:
        weights.append(FourBit(group=16, numbers=ScaleFormat.NVFP4))
    return [(None, None), *((form, None) for form in weights), *((EightBit(f), Rounding()) for f in chip.rounded_rows)]


def main(name: str) -> None:
    target = target_named(name)
    is_gpu = target.platform == "gpu"
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    everywhere = NamedSharding(mesh, P())
    for form, rounding in forms(target.chip):
        make = partial(Linear, SHAPE, ("mlp", "embed"), dtype=jnp.bfloat16, quantization=form, rounding=rounding)
        like = nnx.eval_shape(lambda make=make: make(rngs=nnx.Rngs(0)))
        if not is_gpu:
            pack_for_tpu(like, mesh)
        structure, state = nnx.split(like)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), state)
        for rows in ROWS:
            inputs = jax.ShapeDtypeStruct((rows, SHAPE[1]), jnp.bfloat16, sharding=everywhere)
            with target.compiling(mesh):
                program = jax.jit(lambda state, x, structure=structure: nnx.merge(structure, state)(x))
                lowered = program.trace(state, inputs).lower(lowering_platforms=("cuda" if is_gpu else "tpu",))
                compiled = lowered.compile(compiler_options=compiler_options(target.platform))
            memory = compiled.memory_analysis()
            result = {
                "form": form and str(form),
                "rounded": rounding is not None,
                "rows": rows,
                "argument_bytes": memory.argument_size_in_bytes,
                "temp_bytes": memory.temp_size_in_bytes,
            }
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
