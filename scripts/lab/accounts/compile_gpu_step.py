"""Compiles the whole step of a model for a GPU that is not here, and prints an account of it, one JSON object a line.

    JAX_PLATFORMS=cpu python -m scripts.lab.accounts.compile_gpu_step \
        --target h200 --preset llama-3.1-8b --rows 64

`command_buffers` are CUDA graphs; `inside` and `outside` count what runs in them and what is launched one by one
(`kCustomCall` are the attention kernels). `copies` are the copies that XLA put in, `copied_arguments` the temporaries
with the shape of a weight or of the K/V pages, `kv_writes` the kernels that write to pages. `weights_read` and
`kv_read` are counted, not compiled, see `step_bytes`. Matrix products are not autotuned without the chip: this says
nothing about their speed.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from batcher.step import Bucket, Variant
from model.compiling.compiler_options import compiler_options
from model.execution.dequantized_copies import find
from model.execution.memory_plan import RunnerConfig
from model.execution.step_programs import StepPrograms
from model.network.sharding import make_mesh
from pallas_kernels.spec import Backend
from scripts.lab.accounts.step_bytes import step_bytes
from scripts.lab.accounts.targets import gpu_target
from scripts.lab.accounts.whole_step import add_model_flags, attention_of, model_of

PAGE_SIZE = 64
NUM_SLOTS = 256  # different from the rows of a step: copies of an argument are recognised by their shape
MIB = 1 << 20
KV_DTYPES = {"auto": jnp.bfloat16, "fp8": jnp.float8_e4m3fn, "int8": jnp.int8}
HLO_NAMES = {"bfloat16": "bf16", "float8_e4m3fn": "f8e4m3fn", "int8": "s8"}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    add_model_flags(parser)
    parser.add_argument("--chips", type=int, default=1, help="over which the model is split")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, help="of a mixed step; without it, a decode step")
    parser.add_argument("--variant", type=Variant, default=Variant.GREEDY, choices=[Variant.GREEDY, Variant.SAMPLE])
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="auto", help="of the pages")
    parser.add_argument("--context", type=int, default=2048, help="tokens of each row, for the bytes that are read")
    parser.add_argument("--num-pages", type=int, default=8191, help="besides the null page")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--options", type=json.loads, default={}, help="XLA's options besides the server's, as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(compile_step(args, Path(folder))))


def compile_step(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The account of one step. XLA dumps into `folder`."""
    target = gpu_target(args.target)
    mesh = make_mesh(args.chips, target.devices(args.chips))
    model = model_of(args, mesh)
    kv_dtype = KV_DTYPES[args.kv_cache_dtype]
    attention = attention_of(model.config, mesh, Backend.GPU, page_size=PAGE_SIZE, kv_dtype=kv_dtype)
    bucket = Bucket(args.tokens or args.rows, args.rows, args.variant)
    limits = RunnerConfig(
        max_num_seqs=NUM_SLOTS, max_num_batched_tokens=bucket.num_tokens, max_model_len=args.max_model_len
    )
    programs = StepPrograms(model, attention, limits, args.num_pages, None)
    program = programs.step(bucket)
    pages: Any = programs.state_like.kv  # described, not allocated
    with target.compiling(mesh):
        begin = time.perf_counter()
        lowered = program.as_read().lower()
        lowered_s = time.perf_counter() - begin
        dump = {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
        begin = time.perf_counter()
        compiled = lowered.compile(compiler_options=compiler_options("gpu") | args.options | dump)
        compile_s = time.perf_counter() - begin
    memory = compiled.memory_analysis()
    text = compiled.as_text()
    assert memory is not None and text is not None
    return {
        "target": args.target, "preset": args.preset, "chips": args.chips, "layers": model.config.num_layers,
        "quantization": args.quantization, "kv_dtype": str(jnp.dtype(kv_dtype)),
        "bucket": [bucket.num_tokens, bucket.num_rows], "options": args.options,
        "lower_s": round(lowered_s, 1), "compile_s": round(compile_s, 1),
        "argument_gib": round(memory.argument_size_in_bytes / 2**30, 2),
        "kv_bytes": sum(page.size * page.dtype.itemsize for page in pages) // args.chips,
        "alias_bytes": memory.alias_size_in_bytes, "temp_mib": round(memory.temp_size_in_bytes / MIB, 1),
        "temp_bytes": memory.temp_size_in_bytes,
        "dequantized_copies": find(text, programs.quantized_kernels),
        **step_bytes(model, attention, num_rows=args.rows, context=args.context),
        **read_thunks(_dumped(folder, "thunk_sequence_after_thunk_passes")),
        **read_buffers(_dumped(folder, "gpu_after_optimizations-buffer-assignment")),
        **read_program(_dumped(folder, "gpu_after_optimizations"), pages[0]),
    }  # fmt: skip


def _dumped(folder: Path, kind: str) -> str:
    (file,) = folder.glob(f"*jit_step.*{kind}.txt")
    return file.read_text()


def read_thunks(text: str) -> dict[str, Any]:
    """The commands inside and outside of CUDA graphs, from XLA's dump of the thunk sequence."""
    buffers, buffer_indent = 0, None
    inside: Counter[str] = Counter()
    outside: Counter[str] = Counter()
    for line in text.splitlines():
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


def read_buffers(text: str) -> dict[str, Any]:
    """The temporaries of XLA's buffer assignment: the largest, and those with the shape of a large argument."""
    arguments: set[tuple[str, ...]] = set()
    temporaries: dict[str, int] = {}
    in_temporaries = False
    for line in text.splitlines():
        if line.startswith("allocation"):
            in_temporaries = "preallocated-temp" in line
            match = re.search(r"size (\d+),.* parameter \d+, shape \|(\S+?)\|", line)
            if match and int(match[1]) >= MIB:
                arguments.add(_dimensions(match[2]))
        elif in_temporaries and (match := re.search(r"\(size=(\d+),offset=\d+\): (\w+\[[\d,]*\])", line)):
            temporaries[match[2]] = int(match[1])
        elif not line.startswith(" value"):
            in_temporaries = False
    largest = sorted(temporaries, key=lambda shape: -temporaries[shape])[:3]
    return {
        "largest_temporaries": {shape: round(temporaries[shape] / MIB, 1) for shape in largest},
        "copied_arguments": sorted(shape for shape in temporaries if _dimensions(shape) in arguments),
    }


def _dimensions(shape: str) -> tuple[str, ...]:
    """The dtype, and the sizes in sorted order: a transposed copy has the same dimensions."""
    dtype, _, sizes = shape.partition("[")
    sizes, _, _ = sizes.partition("]")
    return (dtype, *sorted(size for size in sizes.split(",") if size != "1"))


def read_program(text: str, kv: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """Copies in the optimised program, by shape, and the number of fused scatters that write to K/V pages."""
    local = kv.sharding.shard_shape(kv.shape)
    pages = f"{HLO_NAMES.get(str(kv.dtype), kv.dtype)}[{','.join(map(str, local))}]"
    return {
        "copies": dict(Counter(re.findall(r"= \(?(\w+\[[\d,]*\]).*? copy(?:-start)?\(", text))),
        "kv_writes": len(re.findall(rf"%\S*scatter_fusion\S* = {re.escape(pages)}\S* fusion\(", text)),
    }


if __name__ == "__main__":
    main()
