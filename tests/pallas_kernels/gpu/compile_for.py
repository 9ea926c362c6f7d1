"""Compiles the operation for one GPU target with the real compilers and prints what they say, one JSON object a line.

Run in a process of its own: `python -m tests.pallas_kernels.gpu.compile_for h200`.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pallas_kernels.chips import arch_converts_fp8
from pallas_kernels.gpu import tuning
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.lab.accounts import gpu_report
from scripts.lab.accounts.compile_gpu_layer import StepShape, lower_layer
from scripts.lab.accounts.sass import early_uses, read_loops
from scripts.lab.accounts.specs import MODELS, make_spec
from scripts.lab.accounts.targets import gpu_target
from scripts.lab.ptx import machine  # noqa: F401, its families of instructions
from scripts.lab.ptx.decode import Decoder, family_of
from scripts.lab.ptx.parse import parse
from tests.pallas_kernels.gpu import proxy_fences
from tests.pallas_kernels.gpu.offsets import page_products
from tests.pallas_kernels.gpu.pair_masks import pairs_under_one_mask

USUAL = StepShape(num_tokens=1024, pages_per_seq=64)
# 512 sequences of up to 128k tokens each, and 8,192 tokens in a mixed step.
LARGEST = StepShape(num_rows=512, num_tokens=8192, pages_per_seq=2048)

MMA_ONLY = "llama-3.1-8b, without wgmma"  # what a Hopper chip falls back to
# Each kind of heads, of numbers and of sizes is among these. Hopper's loops are held to a bound in them.
FEW = ("llama-3.1-8b", "sixteen in a group", "llama-3.2-1b, int8", "llama-3.1-70b/8, fp8")
# What chips other than Hopper compile: the same code with other instructions and limits. A compilation takes half a
# minute of a core. The chips without TMA share the kinds, and so do those with it.
OF_CHIP = {
    "a100": ("llama-3.1-8b",),
    "a10": ("llama-3.2-1b, int8",),
    "l4": ("sixteen in a group", "llama-3.1-8b, fp8"),
    "b200": ("llama-3.1-8b",),
    "b300": ("llama-3.1-8b, fp8",),
    "rtx5090": ("sixteen in a group", "llama-3.2-1b, int8"),
}
OF_OTHERS = ("llama-3.1-8b, fp8",)  # Hopper has fp8 in larger pages and groups
# What is compiled: ((query heads, KV heads, head dim) of one chip, page size, dtype), step.
# Pages of "fp8" are of int8 on a chip that does not convert fp8.
CASES = {
    "llama-3.1-8b": (MODELS["8b"], 64, "bfloat16", USUAL),
    "one head each": ((8, 8, 64), 16, "bfloat16", USUAL),
    "sixteen in a group": ((16, 1, 128), 16, "bfloat16", USUAL),
    "llama-3.2-1b, largest, float16": (MODELS["1b"], 64, "float16", LARGEST),
    MMA_ONLY: (MODELS["8b"], 64, "bfloat16", USUAL),
    "llama-3.1-8b, fp8": (MODELS["8b"], 64, "bfloat16", USUAL),
    "llama-3.2-1b, int8": (MODELS["1b"], 16, "bfloat16", USUAL),
    "llama-3.1-70b/8, fp8": (MODELS["70b/8"], 128, "float16", LARGEST),
}


def cases(target_name: str) -> dict[str, Any]:
    """Those of the target. Only a Hopper chip has two forms of the kernels."""
    of_hopper = [name for name in CASES if name not in OF_OTHERS]
    return {name: CASES[name] for name in CASES if name in OF_CHIP.get(target_name, of_hopper)}


KV_DTYPES = {"fp8": jnp.float8_e4m3fn, "int8": jnp.int8}


def main(target_name: str) -> None:
    target = gpu_target(target_name)
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    for case, (heads, page_size, dtype, shape) in cases(target_name).items():
        kv_dtype = KV_DTYPES.get(case.rpartition(" ")[2], jnp.dtype(dtype))
        if kv_dtype == jnp.float8_e4m3fn and not arch_converts_fp8(target.chip.arch):
            kv_dtype = jnp.int8
        spec = make_spec(heads, page_size, jnp.dtype(dtype), kv_dtype)
        backend = Backend.GPU_MMA if case == MMA_ONLY else Backend.GPU
        gpu = Gpu(
            arch=target.chip.arch,
            num_multiprocessors=target.chip.num_multiprocessors,
            mma_only=backend is Backend.GPU_MMA,
        )
        with target.compiling(mesh):
            compiled, kv, kernels = gpu_report.collected(
                partial(lower_layer, mesh, spec, shape, backend), with_sass=True
            )
        memory = compiled.memory_analysis()
        assert memory is not None
        result = {
            "case": case,
            "merges": merges(gpu, spec, shape),
            "head_dim": spec.head_dim,
            "kv_dtype": str(jnp.dtype(kv_dtype)),
            "kv_bytes": kv.size * kv.dtype.itemsize,
            "alias_bytes": memory.alias_size_in_bytes,
            "temp_bytes": memory.temp_size_in_bytes,
            # What the work lists are laid out for, and what a chip can hold.
            "assumed_ctas": {
                "decode": tuning.decode_ctas(gpu, spec) // gpu.num_multiprocessors,
                "prefill": tuning.prefill_ctas(gpu, spec) // gpu.num_multiprocessors,
                "combine": tuning.merging_ctas(gpu) // gpu.num_multiprocessors,
            },
            "kernels": [
                kernel.figures() | {"ctas": kernel.ctas(target.chip)} | count(kernel, kv.size // kv.shape[0])
                for kernel in kernels
            ],
        }
        print(json.dumps(result), flush=True)


def merges(gpu: Gpu, spec: AttentionSpec, shape: StepShape) -> bool:
    """Whether a kernel may cut rows into parts, which one more kernel merges."""
    sizes = {"num_rows": shape.num_rows, "max_keys": shape.pages_per_seq * spec.page_size}
    prefill = tuning.prefill_parts(gpu, spec, num_tokens=shape.num_tokens, **sizes)
    return max(prefill.num_slots, tuning.decode_parts(gpu, spec, **sizes).num_slots) > 0


def count(kernel: gpu_report.Kernel, page_elements: int) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "proxy_fences": kernel.ptx.count(proxy_fences.FENCE),
        "unfenced": proxy_fences.unfenced_accesses(kernel.ptx),
        "page_products": page_products(kernel.ptx, page_elements),
        "pairs_under_one_mask": pairs_under_one_mask(kernel.ptx),
        "not_executable": not_executable(kernel.ptx),
        "asynchronous_products": kernel.sass.count("HGMMA"),
        "early_uses": early_uses(kernel.sass),
        "stores_of_16_bytes": len(re.findall(r"\bst(?:\.global)?\.v4\.b32\b", kernel.ptx)),
    }
    if kernel.name == "paged_prefill":
        figures["loops"] = [vars(loop) for loop in read_loops(kernel.sass)]
    return figures


def not_executable(ptx: str) -> list[str]:
    """The instructions that `scripts.lab.ptx` cannot execute."""
    kernel, found = parse(ptx), set()
    decoder = Decoder(kernel, defaultdict(int))
    for ins in kernel.instructions:
        try:
            family_of(ins.opcode).make(ins, decoder)
        except NotImplementedError:
            found.add(ins.text)
    return sorted(found)


if __name__ == "__main__":
    main(sys.argv[1])
