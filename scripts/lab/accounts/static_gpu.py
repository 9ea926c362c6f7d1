"""The compilers' account of the GPU attention kernels, without the chip: resources, inner loops, and two floors; and,
from these and the work lists, predicted times of some batches (`gpu_prediction`).

Per kernel: registers, spills, shared memory, and the number of its CTAs that a multiprocessor holds. Per inner loop
with matrix products, for one turn (one block of keys of one KV head): the instructions of a warp, the cycles in which
the multiprocessor's share of the memory bandwidth delivers the block, and the cycles in which its tensor cores multiply
it.

A warpgroup has a warp on each of the four schedulers, so a scheduler issues one warp's instructions per warpgroup. The
least number of cycles of a turn is the largest of three counts: these instructions, the exponentials (16 per cycle and
multiprocessor), and the compiler's stalls divided by the resident CTAs. It includes no scoreboard waits, memory latency
or bank conflicts, so a real kernel is at least as slow. The memory floor assumes that no other CTA reads the block;
neighbouring tiles of a prompt share blocks in the L2 cache.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.chips import GpuChip
from pallas_kernels.gpu import device, prefill_tile, tuning
from pallas_kernels.spec import AttentionSpec
from scripts.lab.accounts import gpu_prediction, gpu_report
from scripts.lab.accounts.gpu_prediction import Machine
from scripts.lab.accounts.process import CompilerError, printed_by
from scripts.lab.accounts.sass import Loop, read_loops
from scripts.lab.accounts.specs import make_spec
from scripts.lab.accounts.targets import gpu_target
from scripts.lab.tables import Table

SHOWN = ("HGMMA", "HMMA", "LDSM", "UTMALDG", "LDGSTS", "MUFU", "BAR", "FENCE", "STL", "LDL")
MUFU_CYCLES = 8  # of a scheduler for one warp: each scheduler has four of the multiprocessor's 16 units


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One turn of a loop on one CTA: its lower bounds, in cycles of a multiprocessor."""

    block_kv: int
    bytes: int
    issue: float
    memory: float
    products: float

    @classmethod
    def of(cls, loop: Loop, kernel: gpu_report.Kernel, chip: GpuChip, spec: AttentionSpec) -> Turn:
        """The turn of a kernel's loop on `chip`."""
        gpu = device.Gpu(arch=chip.arch, num_multiprocessors=chip.num_multiprocessors)
        group = spec.num_query_heads // spec.num_kv_heads
        if kernel.name == "paged_decode":
            block_kv, rows, computing = tuning.decode_tiles(gpu, spec).block_kv, group, 1
        elif kernel.name == "paged_prefill":
            computing = kernel.warpgroups - 1  # the last one only copies
            block_kv, rows = tuning.hopper_prefill_tiles(spec).block_kv, prefill_tile.TILE_M * computing
        else:
            block_kv, rows, computing = tuning.mma_prefill_tiles(gpu, spec).block_kv, prefill_tile.TILE_M, 1
        per_cycle = chip.num_multiprocessors * chip.clock_hz
        size = 2 * block_kv * spec.head_dim * jnp.dtype(spec.kv_dtype).itemsize
        exponentials = loop.operations.get("MUFU", 0) * MUFU_CYCLES
        return cls(
            block_kv=block_kv,
            bytes=size,
            issue=max(loop.instructions * computing, exponentials * computing, loop.stall_cycles / kernel.ctas(chip)),
            memory=size / (chip.memory_bytes_per_s / per_cycle),
            products=4 * rows * block_kv * spec.head_dim / (chip.bf16_flops_per_s / per_cycle),
        )


def account(
    target_name: str, model: str, heads: tuple[int, int, int], kv_dtype: str, cuda_root: Path | None
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and the report in Markdown. `kv_dtype`: of the pages."""
    jax.config.update("jax_platforms", "cpu")  # the work lists are made here; the chip is not needed, even if attached
    chip, spec = gpu_target(target_name).chip, make_spec(heads, kv_dtype=kv_dtype)
    lines = [
        f"## {chip.device_kind}: {model} ({heads[0]} query heads, {heads[1]} KV heads, head dim {heads[2]}), "
        f"bf16, pages of {spec.page_size} tokens" + (f" in {kv_dtype}" if spec.has_kv_scales else ""),
        "",
        f"Compiled only, nothing was run. jax {version('jax')}, ptxas of {_package('nvidia-cuda-nvcc')}. "
        f"{chip.num_multiprocessors} multiprocessors at {chip.clock_hz / 1e9:g} GHz, "
        f"{chip.memory_bytes_per_s / 1e9:g} GB/s, {chip.bf16_flops_per_s / 1e12:g} TFLOP/s.",
        "",
    ]
    uses = ("warpgroups", "registers", "spill bytes", "SMEM KiB", "CTAs per multiprocessor")
    resources = Table({"kernel": "", **dict.fromkeys(uses, ">"), "SMEM KiB": ".1f"})
    counts = dict.fromkeys(("keys", "KiB", "instructions per warp", "stalls per warp"), ".0f")
    floors = dict.fromkeys(("cycles to issue", "memory floor", "product floor"), ".0f")
    turns = Table({"loop": "", **counts, "of them": "", **floors})
    kernels, cycles = [], {}  # cycles to issue a whole block, by kernel
    for kernel in compiled_kernels(target_name, heads, kv_dtype, cuda_root):
        ctas = kernel.ctas(chip)
        used = kernel.warpgroups, kernel.registers, kernel.spill_bytes
        resources.row(kernel.name, *used, kernel.shared_memory / 1024, ctas)
        figure: dict[str, Any] = kernel.figures() | {"ctas": ctas, "loops": []}
        kernels.append(figure)
        for index, loop in enumerate(read_loops(kernel.sass)):
            turn = Turn.of(loop, kernel, chip, spec)
            figure["loops"].append(vars(loop) | vars(turn))
            found = ", ".join(f"{loop.operations[op]} {op}" for op in SHOWN if op in loop.operations)
            counted = turn.block_kv, turn.bytes / 1024, loop.instructions, loop.stall_cycles
            name = f"{kernel.name}, {['whole blocks', 'masked'][index]}"
            turns.row(name, *counted, found, turn.issue, turn.memory, turn.products)
            if index == 0:
                cycles[kernel.name] = turn.issue
    lines += [*resources.lines, "", *turns.lines, ""]
    prefill_cycles = cycles.get("paged_prefill") or cycles["paged_prefill_mma"]
    machine = Machine(chip=chip, spec=spec, decode_cycles=cycles["paged_decode"], prefill_cycles=prefill_cycles)
    batches, predicted = gpu_prediction.table(machine)
    return {"target": target_name, "model": model, "kernels": kernels, "batches": batches}, lines + predicted


def compiled_kernels(
    target: str, heads: tuple[int, int, int], kv_dtype: str, cuda_root: Path | None
) -> list[gpu_report.Kernel]:
    """The kernels of a mixed step, with their SASS.

    Raises:
        SystemExit: there is no nvdisasm, or the kernels do not compile.
    """
    root = cuda_root or _cuda_root()
    if root is None or not (root / "bin" / "nvdisasm").is_file():
        raise SystemExit(
            f"no bin/nvdisasm under {root}: install the package nvidia-cuda-nvdisasm next to the CUDA plug-in "
            "(scripts/test --all does), or name a CUDA toolkit's folder with --cuda-root"
        )
    arguments = (target, json.dumps(heads), kv_dtype, str(root.resolve()))
    try:
        lines = printed_by("scripts.lab.accounts.compile_gpu_layer", *arguments)
    except CompilerError as error:
        raise SystemExit(f"the kernels do not compile for {target}: {error}") from error
    return [gpu_report.Kernel(**line) for line in lines]


def _cuda_root() -> Path | None:
    """The folder where jax finds ptxas: CUDA_ROOT, or that of the plug-in's packages."""
    from jax._src import lib  # private, but the only way to get the folder that jax itself uses

    return Path(lib.cuda_path) if lib.cuda_path else None


def _package(name: str) -> str:
    return f"{name} {version(name)}"
