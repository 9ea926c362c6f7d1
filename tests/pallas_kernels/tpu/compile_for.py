"""Compiles the operation for one TPU target with the real compiler and prints what it says, one JSON object a line.

Run in a process of its own: `python -m tests.pallas_kernels.tpu.compile_for v6e:1x1`.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.api import AttentionSpec, Backend, PagedAttention, RaggedBatch
from pallas_kernels.targets import tpu_target

# name: query heads, KV heads, head dim, as one chip sees them
MODELS = {
    "llama-3.2-1b": (32, 8, 64),
    "llama-3.2-3b": (24, 8, 128),
    "llama-3.1-8b": (32, 8, 128),
    "llama-3.1-70b/8": (8, 1, 128),
}
NUM_PAGES, PAGES_PER_SEQ, NUM_ROWS = 2048, 64, 64


def main(target: str) -> None:
    mesh = Mesh(np.array(tpu_target(target).devices()[:1]), ("tensor",))
    for model, (num_query_heads, num_kv_heads, head_dim) in MODELS.items():
        spec = AttentionSpec(
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=128,
            dtype=jnp.bfloat16,
            kv_dtype=jnp.bfloat16,
        )
        for num_tokens in (NUM_ROWS, 1024):
            print(json.dumps({"model": model, **compile_one(spec, mesh, num_tokens)}), flush=True)


def compile_one(spec: AttentionSpec, mesh: Mesh, num_tokens: int) -> dict[str, object]:
    attention = PagedAttention(spec, Backend.TPU, mesh)
    decode_only = num_tokens == NUM_ROWS

    def layer(batch: RaggedBatch, queries: jax.Array, keys: jax.Array, values: jax.Array, kv: jax.Array) -> object:
        schedule = attention.make_schedule(batch, num_tokens=num_tokens, decode_only=decode_only)
        return attention(queries, keys, values, kv, schedule, jnp.int32(0))

    def abstract(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def scalars(*shape: int) -> jax.ShapeDtypeStruct:
        return abstract(*shape, dtype=jnp.int32)

    batch = RaggedBatch(
        page_table=scalars(NUM_ROWS, PAGES_PER_SEQ),
        kv_lens=scalars(NUM_ROWS),
        query_starts=scalars(NUM_ROWS + 1),
        num_decodes=scalars(),
        num_rows=scalars(),
    )
    kv = attention.kv_pages(NUM_PAGES)
    heads = abstract(num_tokens, spec.num_kv_heads, spec.head_dim)
    begin = time.perf_counter()
    compiled = (
        jax.jit(layer, donate_argnums=4)
        .lower(batch, abstract(num_tokens, spec.num_query_heads, spec.head_dim), heads, heads, kv)
        .compile()
    )
    memory = compiled.memory_analysis()
    return {
        "decode_only": decode_only,
        "compile_s": round(time.perf_counter() - begin, 2),
        "kv_bytes": kv.size * kv.dtype.itemsize,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
    }


if __name__ == "__main__":
    main(sys.argv[1])
