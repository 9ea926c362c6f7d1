"""Compiles one layer's append and attention for a GPU that is not here: a child process of `static_gpu`.

    python -m scripts.lab.accounts.compile_gpu_layer h200 '[32, 8, 128]' bfloat16 CUDA_ROOT

The dtype is that of the pages. It prints a JSON object for each kernel, as `gpu_report.Kernel`, with the SASS by
nvdisasm in CUDA_ROOT/bin and without the PTX.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as _mosaic  # noqa: F401, sets MOSAIC_GPU_CUDA_ROOT: ours must come after
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch
from scripts.lab.accounts import gpu_report
from scripts.lab.accounts.specs import make_spec
from scripts.lab.accounts.targets import gpu_target


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """The static sizes of a mixed step's attention, which has all kernels."""

    num_rows: int = 64
    num_tokens: int = 2048
    pages_per_seq: int = 128
    num_pages: int = 8192


def lower_layer(
    mesh: Mesh, spec: AttentionSpec, shape: StepShape, backend: Backend = Backend.GPU
) -> tuple[jax.stages.Lowered, jax.ShapeDtypeStruct]:
    """The layer, and the shape of its pages, which are donated. `mesh` has the devices of the target that is compiled
    for (`GpuTarget.compiling`)."""
    attention = PagedAttention(spec, backend, mesh)

    def layer(
        batch: RaggedBatch, queries: jax.Array, keys: jax.Array, values: jax.Array, kv: jax.Array, *scales: jax.Array
    ) -> object:
        metadata = attention.make_metadata(batch, num_tokens=shape.num_tokens, decode_only=False)
        return attention(queries, keys, values, kv, metadata, jnp.int32(0), *scales)

    def abstract(*sizes: int, dtype: object = jnp.int32) -> Any:  # which stands for an array
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P()))

    batch = RaggedBatch(
        page_table=abstract(shape.num_rows, shape.pages_per_seq),
        kv_lens=abstract(shape.num_rows),
        query_starts=abstract(shape.num_rows + 1),
        num_singles=abstract(),
        num_rows=abstract(),
    )
    kv = attention.kv_pages(shape.num_pages)
    queries, keys = (
        abstract(shape.num_tokens, heads, spec.head_dim, dtype=spec.dtype)
        for heads in (spec.num_query_heads, spec.num_kv_heads)
    )
    scales = [abstract(2, spec.num_kv_heads, dtype=jnp.float32)] if spec.has_kv_scales else []
    return jax.jit(layer, donate_argnums=4).lower(batch, queries, keys, keys, kv, *scales), kv


def main(target_name: str, heads: str, kv_dtype: str, cuda_root: str) -> None:
    """Compiles the layer of a mixed step."""
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = cuda_root
    target = gpu_target(target_name)
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    spec = make_spec(tuple(json.loads(heads)), kv_dtype=kv_dtype)
    with target.compiling(mesh):
        _, _, kernels = gpu_report.collected(partial(lower_layer, mesh, spec, StepShape()), with_sass=True)
    for kernel in kernels:
        print(json.dumps(vars(kernel) | {"ptx": ""}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
