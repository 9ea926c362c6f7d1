"""Compiles the operation for one GPU target with the real compilers and prints what they say, one JSON object a line.

Run in a process of its own: `python -m tests.pallas_kernels.gpu.compile_for h200`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.api import AttentionSpec, Backend, PagedAttention, RaggedBatch
from pallas_kernels.gpu import report
from pallas_kernels.targets import GpuTarget, gpu_target

# name: query heads, KV heads, head dim (as one chip sees them), page size
SHAPES = {
    "llama-3.1-8b": (32, 8, 128, 64),
    "llama-3.2-1b": (32, 8, 64, 64),
    "llama-3.2-3b": (24, 8, 128, 32),
    "llama-3.1-70b/8": (8, 1, 128, 128),
    "one head each": (8, 8, 64, 16),
    "sixteen in a group": (16, 1, 128, 16),
}
# The mixed program has the decode kernels in it: alone they are compiled for two head dims only.
PROGRAMS = [
    (name, decode_only)
    for name in SHAPES
    for decode_only in (True, False)
    if not decode_only or name in ("llama-3.1-8b", "llama-3.2-1b")
]
NUM_PAGES, PAGES_PER_SEQ, NUM_ROWS, NUM_TOKENS = 8192, 64, 64, 1024


def main(target_name: str) -> None:
    target = gpu_target(target_name)
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MOSAIC_GPU_DUMP_TO"] = folder
        for name, decode_only in PROGRAMS:
            num_query_heads, num_kv_heads, head_dim, page_size = SHAPES[name]
            spec = AttentionSpec(
                num_query_heads=num_query_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=page_size,
                dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16,
            )  # fmt: skip
            result = compile_one(target, mesh, spec, decode_only, Path(folder))
            print(json.dumps({"shape": name, "decode_only": decode_only, **result}), flush=True)


def compile_one(
    target: GpuTarget, mesh: Mesh, spec: AttentionSpec, decode_only: bool, folder: Path
) -> dict[str, object]:
    for file in folder.iterdir():
        file.unlink()
    attention = PagedAttention(spec, Backend.GPU, mesh)
    num_tokens = NUM_ROWS if decode_only else NUM_TOKENS

    def layer(batch: RaggedBatch, queries: jax.Array, keys: jax.Array, values: jax.Array, kv: jax.Array) -> object:
        schedule = attention.make_schedule(batch, num_tokens=num_tokens, decode_only=decode_only)
        return attention(queries, keys, values, kv, schedule, jnp.int32(0))

    def abstract(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return abstract(*shape, dtype=jnp.int32)

    batch = RaggedBatch(
        page_table=integers(NUM_ROWS, PAGES_PER_SEQ),
        kv_lens=integers(NUM_ROWS),
        query_starts=integers(NUM_ROWS + 1),
        num_decodes=integers(),
        num_rows=integers(),
    )
    kv = attention.kv_pages(NUM_PAGES)
    heads = abstract(num_tokens, spec.num_kv_heads, spec.head_dim)
    queries = abstract(num_tokens, spec.num_query_heads, spec.head_dim)
    with target.compiling(mesh):
        compiled = jax.jit(layer, donate_argnums=4).lower(batch, queries, heads, heads, kv).compile()
    memory = compiled.memory_analysis()
    return {
        "kv_bytes": kv.size * kv.dtype.itemsize,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "kernels": [vars(kernel) | {"ctas": kernel.ctas(target)} for kernel in report.kernels(folder)],
    }


if __name__ == "__main__":
    main(sys.argv[1])
