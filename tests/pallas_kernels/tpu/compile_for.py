"""Compiles the operation for one TPU target with the real compiler and prints what it says, one JSON object a line.

Run in a process of its own, with the compiler's dumps asked for when libtpu loads (`bundles.dump_flags`):
`python -m tests.pallas_kernels.tpu.compile_for v6e:1x1 FOLDER_OF_DUMPS`.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.api import PagedAttention
from pallas_kernels.backends import default_page_size
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch
from pallas_kernels.tpu import blocks, layout
from scripts.lab.accounts.bundles import bundle_dumps, read_loops, read_vmem
from scripts.lab.accounts.specs import MODELS, make_spec
from scripts.lab.accounts.targets import tpu_target
from scripts.lab.accounts.tpu_static import BATCHES, KERNELS, Compiled
from tests.pallas_kernels.tpu.bundle_facts import offsets_not_in_granules, runs_on_the_first_core


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One layer's attention as one chip sees it."""

    heads: tuple[int, int, int]  # query heads, KV heads, head dim
    decode_only: bool
    page_size: int | None = None  # the generation's own
    num_rows: int = 64
    num_tokens: int = 1024  # of a mixed step
    max_context: int = 8192
    num_pages: int = 2048
    kv_dtype: str = "bfloat16"
    spec_decode: bool = False


ODD_GROUP = "3b"  # three query heads for each KV head: on one target only
SHAPES = {
    f"{model}, mixed": Shape(heads=heads, decode_only=False) for model, heads in MODELS.items() if model != ODD_GROUP
} | {
    # The mixed program has the decode kernel in it: alone it is compiled once.
    "8b, decode": Shape(heads=MODELS["8b"], decode_only=True)
}
DRAFTS = {"8b, drafts": Shape(heads=MODELS["8b"], decode_only=False, num_tokens=256, spec_decode=True)}
# The largest that is asked of the kernels: the page table alone is 16 MiB. On one target only: this takes the longest.
LARGEST = {
    "512 x 128k, page 16": Shape(
        heads=MODELS["8b"],
        decode_only=False,
        page_size=16,
        num_rows=512,
        num_tokens=8192,
        max_context=128 << 10,
        num_pages=2048 * 128 // 16,
    )
}


# What is accounted for in which shape: the kernel's form, and batches of `tpu_static`.
ACCOUNTS = {
    "8b, mixed": ("mixed", ("prefill 2k", "chunk of 64 on 32k")),
    "8b, drafts": ("few", ("drafts 64 x 2k, 4 each",)),
}
ACCOUNTED = ("v6e:1x1", "tpu7x:1x1x1")
MIXED_3B = {f"{ODD_GROUP}, mixed": Shape(heads=MODELS[ODD_GROUP], decode_only=False)}
# A mixed step has the decode kernel in it. The smaller head dim is compiled for one target.
INT8 = {"8b, int8": Shape(heads=MODELS["8b"], decode_only=False, kv_dtype="int8")}
SMALL_HEADS_INT8 = {"1b, int8": Shape(heads=MODELS["1b"], decode_only=False, kv_dtype="int8")}


def shapes(target: str) -> dict[str, Shape]:
    """Other chips than a v6e have each kernel once: both head dims, drafts, and 8 bits."""
    if target.startswith("v6e"):
        return SHAPES | DRAFTS | INT8 | MIXED_3B | SMALL_HEADS_INT8 | LARGEST
    return {name: SHAPES[name] for name in ("1b, mixed", "8b, mixed")} | DRAFTS | INT8


def main(target: str, folder: Path) -> None:
    mesh = Mesh(np.array(tpu_target(target).devices()[:1]), ("tensor",))
    for name, shape in shapes(target).items():
        for old in folder.iterdir():
            old.unlink()
        page_size = shape.page_size or default_page_size(Backend.TPU, shape.max_context, tpu_target(target).chip.name)
        result = compile_one(replace(shape, page_size=page_size), mesh)
        batches = accounts(target, name, replace(shape, page_size=page_size), folder)
        print(json.dumps({"shape": name, **result, "kernels": kernels(folder), "batches": batches}), flush=True)


def accounts(target: str, name: str, shape: Shape, folder: Path) -> dict[str, dict[str, float]]:
    """Of each batch: bundles for each query and 1,024 of its causal tokens, and cycles by the floor, which is reading K
    and V once."""
    kind, batches = ACCOUNTS.get(name, ("", ()))
    if not batches or target not in ACCOUNTED:
        return {}
    (dump,) = bundle_dumps(folder, "paged_attention_mixed")
    vmem = next(vmem for kernel, vmem in read_vmem(folder).items() if kernel.startswith("paged_attention_mixed"))
    g, each = layout.geometry(spec_of(shape)), shape.num_tokens // shape.num_rows if shape.spec_decode else 0
    chip, pages = tpu_target(target).chip.name, shape.max_context // shape.page_size
    sizes = tuple(vars(blocks.choose(g, pages, chip, spec_decode=each).mixed).values())
    kernel = KERNELS[kind](tpu_target(target), "8b", sizes, Compiled(loops=read_loops(dump), vmem=vmem))
    found = {}
    for batch in batches:
        rows, estimate = BATCHES[batch], kernel.estimate(BATCHES[batch])
        causal = sum(row.query_len * (2 * row.kv_len - row.query_len + 1) / 2 for row in rows)
        floor = kernel.dma_cycles(sum(row.kv_len for row in rows) * kernel.token_bytes)
        found[batch] = {"per_pair": estimate.bundles * 1024 / causal, "of_the_floor": estimate.cycles / floor}
    return found


def spec_of(shape: Shape) -> AttentionSpec:
    assert shape.page_size is not None
    return make_spec(shape.heads, shape.page_size, kv_dtype=shape.kv_dtype)


def compile_one(shape: Shape, mesh: Mesh) -> dict[str, object]:
    num_query_heads, num_kv_heads, head_dim = shape.heads
    spec = spec_of(shape)
    attention = PagedAttention(spec, Backend.TPU, mesh)
    num_tokens = shape.num_rows if shape.decode_only else shape.num_tokens

    def layer(
        batch: RaggedBatch, q: jax.Array, k: jax.Array, v: jax.Array, kv: jax.Array, *scales: jax.Array
    ) -> object:
        metadata = attention.make_metadata(
            batch, num_tokens=num_tokens, decode_only=shape.decode_only, spec_decode=shape.spec_decode
        )
        return attention(q, k, v, kv, metadata, jnp.int32(0), *scales)

    def abstract(*dims: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))

    def scalars(*dims: int) -> jax.ShapeDtypeStruct:
        return abstract(*dims, dtype=jnp.int32)

    batch = RaggedBatch(
        page_table=scalars(shape.num_rows, shape.max_context // shape.page_size),
        kv_lens=scalars(shape.num_rows),
        query_starts=scalars(shape.num_rows + 1),
        num_singles=scalars(),
        num_rows=scalars(),
    )
    kv = attention.kv_pages(shape.num_pages)
    heads = abstract(num_tokens, num_kv_heads, head_dim)
    scales = [abstract(2, num_kv_heads, dtype=jnp.float32)] if spec.has_kv_scales else []
    begin = time.perf_counter()
    compiled = (
        jax.jit(layer, donate_argnums=4)
        .lower(batch, abstract(num_tokens, num_query_heads, head_dim), heads, heads, kv, *scales)
        .compile()
    )
    memory = compiled.memory_analysis()
    return {
        "page_size": shape.page_size,
        "compile_s": round(time.perf_counter() - begin, 2),
        "kv_bytes": kv.size * kv.dtype.itemsize,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "operand_bytes": memory.argument_size_in_bytes - kv.size * kv.dtype.itemsize,
    }


def kernels(folder: Path) -> dict[str, dict[str, object]]:
    """What the compiler says of each attention kernel's VMEM, spills, offsets and cores."""
    found: dict[str, dict[str, object]] = {}
    for name, vmem in read_vmem(folder).items():
        if name.startswith("paged_attention"):
            (dump,) = bundle_dumps(folder, name)
            spills = sum(loop.spills for loop in read_loops(dump) if loop.matmuls and loop.depth > 1)
            bundles = dump.read_text(errors="replace")
            found[name.split(".")[0]] = {
                **vars(vmem),
                "spills_in_inner_loop": spills,
                "offsets_not_in_granules": offsets_not_in_granules(bundles),
                "on_the_first_core": runs_on_the_first_core(bundles),
            }
    return found


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
