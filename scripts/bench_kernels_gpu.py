"""The GPU attention kernels: by the compilers' account, and on a chip.

    python -m scripts.bench_kernels --target h200 --static [--cuda-root FOLDER]
    python -m scripts.bench_kernels --target h200 --device [--json FILE]

`--static` compiles for the chip without having it and prints registers, spills, shared memory, CTAs per multiprocessor
and, given a folder with `bin/nvdisasm` and `bin/ptxas`, the inner loops beside the cycles in which the memory delivers
their block. Compile-only evidence: it bounds, it does not time. `--device` measures; see `benchmarks/device_gpu.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {"1b": (32, 8, 64), "8b": (32, 8, 128), "70b/8": (8, 1, 128)}  # query heads, KV heads, head dim on a chip
PAGE_SIZE = 64


def main(target: str, static: bool, rest: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_kernels", description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--device", action="store_true", help="measure on the attached chip")
    parser.add_argument("--cuda-root", type=Path, help="with bin/nvdisasm and bin/ptxas: count the inner loops")
    parser.add_argument("--json", type=Path, help="write the figures here, too")
    parser.add_argument("--compile-into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(rest)
    if args.compile_into:
        compile_kernels(target, args.model, args.cuda_root, args.compile_into)
    elif args.device:
        from scripts.benchmarks import device_gpu

        device_gpu.main(target, MODELS[args.model], args.json)
    elif static:
        figures = print_static(target, args.model, args.cuda_root)
        if args.json:
            args.json.write_text(json.dumps(figures, indent=1))
    else:
        parser.error("say --static or --device")


def print_static(target_name: str, model: str, cuda_root: Path | None) -> list[dict[str, Any]]:
    from pallas_kernels.gpu import report
    from pallas_kernels.targets import gpu_target
    from scripts.benchmarks.sass import read_loops

    target = gpu_target(target_name)
    _, _, head_dim = MODELS[model]
    figures = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_compiler(target_name, model, cuda_root, folder)
        print(f"{target.device_kind}, {model}, page {PAGE_SIZE}, bf16: compiled only, nothing was run")
        print(f"{'kernel':24}{'registers':>10}{'spills':>8}{'SMEM KiB':>10}{'CTAs/SM':>9}")
        for kernel in report.kernels(folder):
            ctas, kib = kernel.ctas(target), kernel.shared_memory / 1024
            print(f"{kernel.name:24}{kernel.registers:10}{kernel.spill_bytes:8}{kib:10.1f}{ctas:9}")
            figure: dict[str, Any] = vars(kernel) | {"ctas": ctas, "loops": []}
            figures.append(figure)
            sass = folder / f"{kernel.file}.sass_ctrl"
            if not sass.is_file():
                continue
            for loop in read_loops(sass):
                counts = ", ".join(
                    f"{loop.operations[op]} {op}"
                    for op in ("HGMMA", "HMMA", "LDSM", "UTMALDG", "LDGSTS", "MUFU", "BAR", "STL", "LDL")
                    if op in loop.operations
                )
                print(
                    f"    loop: {loop.instructions} instructions, {loop.stall_cycles} issue cycles per warp; {counts}"
                )
                figure["loops"].append(vars(loop))
        per_multiprocessor = target.memory_bytes_per_s / target.num_multiprocessors / target.clock_hz  # bytes/cycle
        for block_kv in (32, 64, 128):
            size = 2 * block_kv * head_dim * 2
            print(
                f"memory floor of a block of {block_kv} keys: {size / 1024:.0f} KiB, "
                f"{size / per_multiprocessor:.0f} cycles of a multiprocessor"
            )
    return figures


def run_compiler(target: str, model: str, cuda_root: Path | None, folder: Path) -> None:
    """In a process of its own: the PTX version is fixed by the first target that a process compiles for."""
    command = [sys.executable, "-m", "scripts.bench_kernels", "--target", target, "--model", model]
    command += ["--compile-into", str(folder)] + (["--cuda-root", str(cuda_root)] if cuda_root else [])
    process = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False
    )
    if process.returncode:
        raise SystemExit(f"the kernels do not compile for {target}:\n{process.stderr[-4000:]}")


def compile_kernels(target_name: str, model: str, cuda_root: Path | None, folder: Path) -> None:
    """One mixed step of one layer: it has all kernels."""
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(folder)
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.mosaic import gpu as _mosaic  # noqa: F401, sets the variable below: ours must come after
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    from pallas_kernels.api import AttentionSpec, Backend, PagedAttention, RaggedBatch
    from pallas_kernels.targets import gpu_target

    if cuda_root:
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(cuda_root.resolve())
    target = gpu_target(target_name)
    mesh = Mesh(np.array(target.devices()), ("tensor",))
    num_heads, num_kv_heads, head_dim = MODELS[model]
    spec = AttentionSpec(
        num_query_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=PAGE_SIZE,
        dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16,
    )  # fmt: skip
    attention = PagedAttention(spec, Backend.GPU, mesh)
    num_rows, num_tokens = 64, 2048

    def layer(batch: RaggedBatch, *operands: jax.Array) -> Any:
        return attention(*operands, attention.make_schedule(batch, num_tokens=num_tokens, decode_only=False))

    def abstract(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    batch = RaggedBatch(
        page_table=abstract(num_rows, 128), kv_lens=abstract(num_rows), query_starts=abstract(num_rows + 1),
        num_decodes=abstract(), num_rows=abstract(),
    )  # fmt: skip
    heads = [abstract(num_tokens, n, head_dim, dtype=jnp.bfloat16) for n in (num_heads, num_kv_heads, num_kv_heads)]
    with target.compiling(mesh):
        jax.jit(layer, donate_argnums=4).lower(batch, *heads, attention.kv_pages(4096)).compile()
