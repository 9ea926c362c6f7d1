"""Compiles the whole step of a model for a GPU that is not here, and says what became of it, as one JSON object.

    JAX_PLATFORMS=cpu python -m scripts.benchmarks.compile_gpu_step --target h200 --preset llama-3.1-8b --rows 64

`command_buffers` are CUDA graphs; `calls_inside` and `calls_outside` count the attention kernels in and out of them.
Matrix products are not autotuned without the chip: this says nothing about their speed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batcher.step import Bucket, PackedLayout, SlotLayout, Variant
from model.llama import Llama
from model.presets import preset
from model.sharding import abstract_model
from model.step import DeviceState, make_step
from pallas_kernels.api import AttentionSpec, Backend, PagedAttention
from pallas_kernels.targets import gpu_target

PAGE_SIZE = 64
MAX_MODEL_LEN = 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--chips", type=int, default=1, help="over which the model is split")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, help="of a mixed step; without it, a decode step")
    parser.add_argument("--layers", type=int, help="compile this many only")
    parser.add_argument("--num-pages", type=int, default=8192)
    parser.add_argument("--options", type=json.loads, default={}, help="XLA's compiler options, as JSON")
    args = parser.parse_args()
    print(json.dumps(compile_step(args)))


def compile_step(args: argparse.Namespace) -> dict[str, Any]:
    target = gpu_target(args.target)
    mesh = Mesh(np.array(target.devices(args.chips)), ("tensor",))
    config = preset(args.preset)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    model = abstract_model(config, dtype=jnp.bfloat16, mesh=mesh)
    spec = AttentionSpec(
        num_query_heads=model.config.num_heads, num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim, page_size=PAGE_SIZE, dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16,
    )  # fmt: skip
    attention = PagedAttention(spec, Backend.GPU, mesh)
    structure, weights = nnx.split(model)
    leaves, tree = jax.tree.flatten(weights)

    def rebuild(leaves: Any) -> Llama:
        return nnx.merge(structure, jax.tree.unflatten(tree, leaves))

    everywhere = NamedSharding(mesh, P())

    def integers(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    state = DeviceState(
        slots=integers(args.rows, SlotLayout.width(MAX_MODEL_LEN // PAGE_SIZE)),
        history=integers(args.rows, config.vocab_size),
        kv=[attention.kv_pages(args.num_pages) for _ in range(config.num_layers)],
    )
    bucket = Bucket(args.tokens or args.rows, args.rows, Variant.GREEDY)
    kept = jax.tree.map(lambda x: x.sharding, state)
    step = jax.jit(make_step(bucket, rebuild, attention), donate_argnums=1, out_shardings=(kept, everywhere))
    with tempfile.TemporaryDirectory() as folder, target.compiling(mesh):
        begin = time.perf_counter()
        lowered = step.lower(leaves, state, integers(PackedLayout(bucket).size))
        lowered_s = time.perf_counter() - begin
        dump = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        begin = time.perf_counter()
        compiled = lowered.compile(compiler_options=dump | args.options)
        compile_s = time.perf_counter() - begin
        thunks = read_thunks(Path(folder))
    memory = compiled.memory_analysis()
    return {
        "target": args.target, "preset": args.preset, "chips": args.chips, "layers": config.num_layers,
        "bucket": [bucket.num_tokens, bucket.num_rows], "options": args.options,
        "lower_s": round(lowered_s, 1), "compile_s": round(compile_s, 1),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "kv_bytes": sum(page.size * page.dtype.itemsize for page in state.kv) // args.chips,
        "alias_bytes": memory.alias_size_in_bytes, "temp_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        **thunks,
    }  # fmt: skip


def read_thunks(folder: Path) -> dict[str, Any]:
    """What runs in CUDA graphs and what outside of them, from XLA's dump of the thunk sequence."""
    (file,) = folder.glob("*thunk_sequence_after_thunk_passes.txt")
    buffers, buffer_indent = 0, None
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for line in file.read_text().splitlines():
        match = re.match(r"( *)\d+: (k\w+)", line)
        if match is None:
            continue
        indent, kind = len(match[1]), match[2]
        if buffer_indent is not None and indent <= buffer_indent:
            buffer_indent = None
        if kind == "kCommandBuffer":
            buffers, buffer_indent = buffers + 1, indent
            continue
        (outside if buffer_indent is None else inside)[kind] += 1
    return {"command_buffers": buffers, "inside": dict(inside), "outside": dict(outside)}


if __name__ == "__main__":
    main()
