"""Compiles whole steps of a model for TPUs that are not here, as the runner would, and prints what the compiler says.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m scripts.benchmarks.accounts.compile_tpu_step \
        --target v6e:1x1 --preset llama-3.1-8b --quantization int8 --kv-dtype int8

It prints a JSON object for each `--tokens`: 64 (the rows) is the decode step, others are mixed steps of as many rows.
`alias_bytes` are updated in place, `temp_bytes` are what the program writes besides its results. `weights_read` and
`kv_read` are counted, not compiled: the bytes that a chip must read in a decode step of 64 rows of `--context` tokens.
`stores_logits` and `narrows_maxima` are about the pass that finds the greedy token (`model.sampling.greedy`).
`product_cycles` and `glue_cycles` are those of one layer, see `glue`; null if one layer only is compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout, Variant
from model.compiling.compiler_options import compiler_options
from model.compiling.traced_programs import Program
from model.execution.step import DeviceState, make_step
from model.execution.wide_copies import find, narrow_kernels, told_apart
from model.network.llama import Llama
from model.network.packed import pack_for_tpu
from model.network.sharding import TENSOR_AXIS, abstract_model, make_mesh, sharding_of
from model.presets import preset
from model.quantization.forms import Rounding, form_named
from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.benchmarks.accounts.glue import layer_cycles
from scripts.benchmarks.accounts.step_bytes import step_bytes
from scripts.benchmarks.accounts.targets import tpu_target

NUM_ROWS, PAGES_PER_SEQ, PAGE_SIZE = 64, 64, 128
NUM_PAGES = 512


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--preset", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, action="append", help="of a step; may be given again (default: 64)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each row")
    parser.add_argument("--quantization", help="of the weights: int8, fp8, int4, int4-g64, int4-g128-zeros")
    parser.add_argument("--rounded-rows", type=int, help="products of so many rows or more round their inputs")
    parser.add_argument("--rounded-head", action="store_true", help="and so does the head")
    parser.add_argument("--kv-dtype", choices=("bfloat16", "int8"), default="bfloat16", help="of the pages")
    parser.add_argument("--layers", type=int, help="compile this many only")
    args = parser.parse_args()
    devices = tpu_target(args.target).devices()
    mesh = make_mesh(len(devices), devices)
    config = preset(args.preset)
    if args.layers:
        config = replace(config, num_layers=args.layers)
    rounding = None
    if args.rounded_rows is not None:
        rounding = Rounding(min_rows=args.rounded_rows, with_head=args.rounded_head)
    form = form_named(args.quantization, config.projection_inputs) if args.quantization else None
    model = pack_for_tpu(
        abstract_model(config, dtype=jnp.bfloat16, mesh=mesh, quantization=form, rounding=rounding), mesh
    )
    spec = AttentionSpec(
        num_query_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        page_size=PAGE_SIZE,
        dtype=jnp.bfloat16,
        kv_dtype=jnp.dtype(args.kv_dtype),
    )
    attention = PagedAttention(spec, Backend.TPU, mesh, TENSOR_AXIS)
    for num_tokens in args.tokens or [NUM_ROWS]:
        account = {"num_tokens": num_tokens, **compile_step(model, attention, mesh, num_tokens)}
        print(json.dumps(account | step_bytes(model, attention, num_rows=NUM_ROWS, context=args.context)), flush=True)


def compile_step(model: Llama, attention: PagedAttention, mesh: Mesh, num_tokens: int) -> dict[str, Any]:
    """Of the step of so many tokens in `NUM_ROWS` rows."""
    structure, weights = nnx.split(model)
    leaves, tree = jax.tree.flatten(weights)
    everywhere, config = NamedSharding(mesh, P()), model.config

    def integers(*shape: int) -> Any:  # which stands for an array
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    pages: Any = attention.kv_pages(NUM_PAGES)
    by_head, by_vocab = sharding_of(("rows", "heads"), mesh), sharding_of(("rows", "vocab"), mesh)
    scales: Any = jax.ShapeDtypeStruct((2, config.num_kv_heads), jnp.float32, sharding=by_head)
    history: Any = jax.ShapeDtypeStruct((NUM_ROWS, config.vocab_size), jnp.int32, sharding=by_vocab)
    state = DeviceState(
        slots=integers(NUM_ROWS, SlotLayout.width(PAGES_PER_SEQ)),
        history=history,
        masks=integers(NUM_ROWS, num_mask_words(config.vocab_size)),
        kv=[pages] * config.num_layers,
    )
    kv_scales = [scales if attention.spec.has_kv_scales else None] * config.num_layers
    kept = jax.tree.map(lambda x: x.sharding, state)
    bucket = Bucket(num_tokens=num_tokens, num_rows=NUM_ROWS, variant=Variant.GREEDY)
    step = make_step(bucket, lambda leaves: nnx.merge(structure, jax.tree.unflatten(tree, leaves)), attention)
    arguments = (leaves, kv_scales, state, integers(PackedLayout(bucket).size))
    program = Program(step, arguments, donated=2, out_shardings=(kept, everywhere))
    begin, begin_cpu = time.perf_counter(), time.process_time()
    lowered = program.as_read().lower()
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options("tpu"))
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None and text is not None
    layer = layer_cycles(text) if config.num_layers > 1 else None
    return {
        "trace_s": round(traced - begin, 1),
        "compile_s": round(time.perf_counter() - traced, 1),
        "cpu_s": round(time.process_time() - begin_cpu, 1),  # of both; what the machine's other work leaves alone
        "kv_bytes": attention.page_bytes() * NUM_PAGES * config.num_layers,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "product_cycles": layer and round(layer.products),
        "glue_cycles": layer and round(layer.glue),
        **read_logits(text, config.vocab_size),
        "wide_copies": find(text, told_apart(narrow_kernels(model, "tpu", mesh), num_tokens, NUM_ROWS)),
        "argument_bytes": memory.argument_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def read_logits(text: str, vocab_size: int) -> dict[str, bool]:
    """Whether the program stores the rows' logits, and whether it stores their maxima in bfloat16."""
    program = text[text.index("\nENTRY ") :]
    results = [line.partition(" = ")[2].partition(" fusion(")[0] for line in program.splitlines() if " fusion(" in line]
    return {
        "stores_logits": any(f"f32[{NUM_ROWS},{vocab_size}]" in result for result in results),
        "narrows_maxima": any(f"bf16[{NUM_ROWS}]" in result for result in results),
    }


if __name__ == "__main__":
    main()
