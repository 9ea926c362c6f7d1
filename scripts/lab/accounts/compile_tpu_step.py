"""Compiles whole steps of a model for TPUs that are not here, as the runner would, and prints what the compiler says.

    JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 python -m scripts.lab.accounts.compile_tpu_step \
        --target v6e:1x1 --preset llama-3.1-8b --quantization int8 --kv-dtype int8

It prints a JSON object for each `--tokens`: 64 (the rows) is the decode step, others are mixed steps of as many rows.
`alias_bytes` are updated in place, `temp_bytes` are what the program writes besides its results. `weights_read` and
`kv_read` are counted, not compiled: the bytes that a chip must read in a decode step of 64 rows of `--context` tokens.
`stores_logits` and `narrows_maxima` are about the pass that finds the greedy token (`model.sampling.greedy`).
`exchanges` counts those between chips outside of loops; those with `-start` run next to other operations.
`product_cycles` and `glue_cycles` are those of one layer, see `glue`; null if one layer only is compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from batcher.step import Bucket, Variant
from model.compiling.compiler_options import compiler_options
from model.execution.dequantized_copies import find, told_apart
from model.execution.memory_plan import RunnerConfig
from model.execution.step_programs import StepPrograms
from model.network.packed import pack_for_tpu
from model.network.sharding import make_mesh
from pallas_kernels.spec import Backend
from scripts.lab.accounts.glue import layer_cycles
from scripts.lab.accounts.jax_attention import JaxAttention
from scripts.lab.accounts.step_bytes import step_bytes
from scripts.lab.accounts.targets import tpu_target
from scripts.lab.accounts.whole_step import add_model_flags, attention_of, model_of

NUM_ROWS, PAGE_SIZE = 64, 128
EXCHANGES = r"(?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?"
NUM_PAGES = 511  # besides the null page
LIMITS = RunnerConfig(max_num_seqs=NUM_ROWS, max_num_batched_tokens=8192, max_model_len=64 * PAGE_SIZE)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    add_model_flags(parser)
    parser.add_argument("--tokens", type=int, action="append", help="of a step; may be given again (default: 64)")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each row")
    parser.add_argument("--options", type=json.loads, default={}, help="XLA's options besides the server's, as JSON")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the last program there")
    parser.add_argument("--kv-dtype", choices=("bfloat16", "int8"), default="bfloat16", help="of the pages")
    parser.add_argument("--attention", choices=("own", "jax"), default="own", help="jax: the kernel that JAX ships")
    args = parser.parse_args()
    if args.attention == "jax" and args.kv_dtype != "bfloat16":
        parser.error("--attention jax needs --kv-dtype bfloat16: its pages have no scales here")
    devices = tpu_target(args.target).devices()
    mesh = make_mesh(len(devices), devices)
    model = pack_for_tpu(model_of(args, mesh), mesh)
    attention = attention_of(model.config, mesh, Backend.TPU, page_size=PAGE_SIZE, kv_dtype=jnp.dtype(args.kv_dtype))
    if args.attention == "jax":
        attention = JaxAttention(attention.spec, attention.backend, mesh, attention.axis)
    programs = StepPrograms(model, attention, LIMITS, NUM_PAGES, None)
    for num_tokens in args.tokens or [NUM_ROWS]:
        account = {"num_tokens": num_tokens, **compile_step(programs, num_tokens, args.options, args.dump)}
        print(json.dumps(account | step_bytes(model, attention, num_rows=NUM_ROWS, context=args.context)), flush=True)


def compile_step(
    programs: StepPrograms, num_tokens: int, options: dict[str, Any] | None = None, dump: Path | None = None
) -> dict[str, Any]:
    """Of the step of so many tokens in `NUM_ROWS` rows."""
    program = programs.step(Bucket(num_tokens=num_tokens, num_rows=NUM_ROWS, variant=Variant.GREEDY))
    config = programs.model_config
    begin, begin_cpu = time.perf_counter(), time.process_time()
    lowered = program.as_read().lower()
    traced = time.perf_counter()
    compiled = lowered.compile(compiler_options=compiler_options("tpu") | (options or {}))
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None and text is not None
    if dump is not None:
        dump.write_text(text)
    layer = layer_cycles(text) if config.num_layers > 1 else None
    return {
        "trace_s": round(traced - begin, 1),
        "compile_s": round(time.perf_counter() - traced, 1),
        "cpu_s": round(time.process_time() - begin_cpu, 1),  # of both; what the machine's other work leaves alone
        "kv_bytes": programs.attention.page_bytes() * (NUM_PAGES + 1) * config.num_layers,
        "alias_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "exchanges": dict(Counter(re.findall(rf" ({EXCHANGES})\(", text[text.index("\nENTRY ") :]))),
        "product_cycles": layer and round(layer.products),
        "glue_cycles": layer and round(layer.glue),
        **read_logits(text, config.vocab_size),
        "dequantized_copies": find(text, told_apart(programs.quantized_kernels, num_tokens, NUM_ROWS)),
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
