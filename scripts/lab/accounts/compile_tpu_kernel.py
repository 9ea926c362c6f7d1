"""Compiles attention kernels for a TPU target: ours and the kernel of jax. It is a child process of `tpu_static`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.spec import AttentionSpec
from pallas_kernels.tpu import append, decode, decode_memory, layout, mixed, mixed_memory
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks
from scripts.lab.accounts.bundles import bundle_dumps, read_loops, read_vmem
from scripts.lab.accounts.specs import make_spec
from scripts.lab.accounts.targets import tpu_target

NUM_ROWS, NUM_PAGES, PAGE, PAGES_PER_SEQ, CHUNK_TOKENS = 64, 2048, 128, 32, 2048
TABLE = (NUM_ROWS, 1, 128)  # a window of the page table for each row


def our_decode(g: layout.Geometry, sizes: list[int]) -> tuple[Callable, list[tuple]]:
    """The decode kernel with these block sizes, and the shapes of its operands."""
    blocks = DecodeBlocks(kv_block=sizes[0], items_per_turn=sizes[1])

    def kernel(columns: jax.Array, rotation: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = decode_memory.Operands(columns, columns, rotation, *_scales(g), *operands)
        return decode.attend(given, g=g, kv_column=g.query_columns, blocks=blocks, interpret=False)

    return kernel, [
        *projection(g, NUM_ROWS),
        ((NUM_PAGES, g.num_planes, g.page_words, 128), jnp.uint32),
        ((NUM_ROWS,), jnp.int32),
        ((NUM_ROWS,), jnp.int32),
        (TABLE, jnp.int32),
        ((3,), jnp.int32),
    ]


def projection(g: layout.Geometry, num_tokens: int) -> list[tuple]:
    """The shapes of a step's tokens as the kernels read them, of their rotation, and of the scales of 8-bit pages."""
    scales = [] if g.kv_dtype == g.dtype else [((2 * g.num_k_planes * g.heads_per_plane,), jnp.float32)]
    return [((num_tokens, g.query_columns + g.kv_columns), g.dtype), ((num_tokens, 256), jnp.float32), *scales]


def _scales(g: layout.Geometry) -> list[Any]:
    """The values in place of the scales of K and V, where `projection` has none."""
    return [None] if g.kv_dtype == g.dtype else []


def our_mixed(g: layout.Geometry, blocks: MixedBlocks | FewBlocks) -> tuple[Callable, list[tuple]]:
    """The kernel of mixed steps with these block sizes, and the shapes of its operands."""

    def kernel(columns: jax.Array, rotation: jax.Array, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        given = mixed_memory.Operands(columns, columns, rotation, *_scales(g), *operands)
        return mixed.attend(given, g=g, kv_column=g.query_columns, blocks=blocks, interpret=False)

    return kernel, [
        *projection(g, CHUNK_TOKENS),
        ((CHUNK_TOKENS, g.query_columns), g.dtype),
        ((NUM_PAGES, g.num_planes, g.page_words, 128), jnp.uint32),
        ((NUM_ROWS,), jnp.int32),
        ((NUM_ROWS + 1,), jnp.int32),
        ((append.num_page_slots(CHUNK_TOKENS, NUM_ROWS, g.page_size),), jnp.int32),
        (TABLE, jnp.int32),
        ((3,), jnp.int32),
    ]


def shipped(spec: AttentionSpec, sizes: list[int]) -> tuple[Callable, list[tuple]]:
    """The kernel of jax with these block sizes, and the shapes of its operands."""
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    def kernel(*operands: jax.Array) -> jax.Array:
        return ragged_paged_attention(
            *operands,
            sm_scale=spec.scale,
            num_kv_pages_per_block=sizes[0],
            num_queries_per_block=sizes[1],
            vmem_limit_bytes=64 << 20,
        )

    head_dim = 128  # it stores every head dim in 128 lanes
    return kernel, [
        ((CHUNK_TOKENS, spec.num_query_heads, head_dim), jnp.bfloat16),
        ((NUM_PAGES, PAGE, 2 * spec.num_kv_heads, head_dim), jnp.bfloat16),
        ((NUM_ROWS,), jnp.int32),
        ((NUM_ROWS, PAGES_PER_SEQ), jnp.int32),
        ((NUM_ROWS + 1,), jnp.int32),
        ((1,), jnp.int32),
    ]


def compile_one(target: str, kernel: str, sizes: list[int], heads: list[int], kv_dtype: str) -> None:
    """Compiles a kernel, which dumps its bundles. Errors of the compiler are raised."""
    spec = make_spec((heads[0], heads[1], heads[2]), PAGE, kv_dtype=kv_dtype)
    g = layout.geometry(spec)
    builders = {
        "decode": lambda: our_decode(g, sizes),
        "mixed": lambda: our_mixed(g, MixedBlocks(**dict(zip(MixedBlocks.__dataclass_fields__, sizes, strict=True)))),
        "few": lambda: our_mixed(g, FewBlocks(**dict(zip(FewBlocks.__dataclass_fields__, sizes, strict=True)))),
        "shipped": lambda: shipped(spec, sizes),
    }
    tpu_target(target).compile_kernel(*builders[kernel]())


def main(target: str, folder: Path, jobs: list[tuple[str, list[int], list[int], str]]) -> None:
    """Prints the loops and the VMEM of each job, or its compile error: see `tpu_static.compile_kernels`."""
    for job in jobs:
        for old in folder.iterdir():
            old.unlink()
        try:
            compile_one(target, *job)
        except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            print(json.dumps({"error": " ".join(str(error).split())[:300]}), flush=True)
            continue
        (dump,) = bundle_dumps(folder, "attention")
        vmem = next(vmem for name, vmem in read_vmem(folder).items() if "attention" in name)
        print(json.dumps({"loops": [vars(loop) for loop in read_loops(dump)], "vmem": vars(vmem)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
