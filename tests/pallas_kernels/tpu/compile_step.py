"""Compiles whole steps of a model for a TPU target, as the runner would, and prints what the compiler says.

Run in a process of its own: `python -m tests.pallas_kernels.tpu.compile_step v6e:2x4 llama-3.1-8b 64 512`; the numbers
are tokens a step: 64 is the decode-only step of 64 rows, others are mixed steps of as many rows.
"""

from __future__ import annotations

import json
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, Variant
from model.execution.step import DeviceState, make_step
from model.network.sharding import TENSOR_AXIS, abstract_model, make_mesh
from model.presets import PRESETS
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.benchmarks.accounts.targets import tpu_target

NUM_ROWS, PAGES_PER_SEQ, PAGE_SIZE = 64, 64, 128
NUM_PAGES = 512


def main(target: str, preset: str, sizes: list[int]) -> None:
    devices = tpu_target(target).devices()
    mesh = make_mesh(len(devices), devices)
    model = abstract_model(PRESETS[preset], dtype=jnp.bfloat16, mesh=mesh)
    structure, weights = nnx.split(model)
    leaves, tree = jax.tree.flatten(weights)
    stored = model.config
    spec = AttentionSpec(
        num_query_heads=stored.num_heads,
        num_kv_heads=stored.num_kv_heads,
        head_dim=stored.head_dim,
        page_size=PAGE_SIZE,
        dtype=jnp.bfloat16,
        kv_dtype=jnp.bfloat16,
    )
    attention = PagedAttention(spec, Backend.TPU, mesh, TENSOR_AXIS)
    everywhere = NamedSharding(mesh, P())

    def scalars(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    state = DeviceState(
        slots=scalars(NUM_ROWS, SlotLayout.width(PAGES_PER_SEQ)),
        history=scalars(NUM_ROWS, stored.vocab_size),
        masks=scalars(NUM_ROWS, num_mask_words(stored.vocab_size)),
        kv=[attention.kv_pages(NUM_PAGES)] * stored.num_layers,
    )
    kept = jax.tree.map(lambda x: x.sharding, state)
    for num_tokens in sizes:
        bucket = Bucket(num_tokens=num_tokens, num_rows=NUM_ROWS, variant=Variant.GREEDY)
        step = make_step(bucket, lambda leaves: nnx.merge(structure, jax.tree.unflatten(tree, leaves)), attention)
        begin, begin_cpu = time.perf_counter(), time.process_time()
        lowered = jax.jit(step, donate_argnums=1, out_shardings=(kept, everywhere)).lower(
            leaves, state, scalars(PackedLayout(bucket).size)
        )
        traced = time.perf_counter()
        memory = lowered.compile().memory_analysis()
        result = {
            "num_tokens": num_tokens,
            "trace_s": round(traced - begin, 1),
            "compile_s": round(time.perf_counter() - traced, 1),
            "cpu_s": round(time.process_time() - begin_cpu, 1),  # of both; what the machine's other work leaves alone
            "kv_bytes": attention.page_bytes() * NUM_PAGES * stored.num_layers,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            "argument_bytes": memory.argument_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]])
