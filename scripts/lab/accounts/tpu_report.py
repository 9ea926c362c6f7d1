"""What the TPU compiler says about the attention kernels, ours and the one that jax ships, on the same batches.

What is counted, and how far it can be trusted, is said in `tpu_static`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from pallas_kernels import tuning
from pallas_kernels.tpu import blocks, layout
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.tiles import MixedBlocks
from scripts.lab.accounts.specs import MODELS, make_spec
from scripts.lab.accounts.targets import tpu_target
from scripts.lab.accounts.tpu_static import (
    BATCHES,
    KERNELS,
    PAGE,
    CompileError,
    Estimate,
    Kernel,
    Row,
    compile_kernels,
)
from scripts.lab.tables import Table, head

SHIPPED_BLOCKS = [(8, 8), (16, 8), (8, 32), (8, 64), (16, 64)]  # pages of KV, queries
# Lengths as in serving: an item of a decode or a tile of a chunk has its full cost, even if it is mostly padding.
TUNED_FOR = {
    "decode": [Row(1, kv_len) for kv_len in (100, 300, 700, 1500, 2500, 4000, 6000, 8000)] * 8,
    "mixed": [Row(2048, 2048), Row(512, 4096), Row(300, 300)],
}
FEW_QUERIES, MOST_FEW_QUERIES = 4, 16  # tokens of a row with drafts: that the kernel is compiled for, and at most
KV_BYTES = {"bfloat16": 2, "int8": 1}
CONTEXT = 128 << 10  # tokens: no block is shortened
Sizes = tuple[int, ...]  # of blocks


def geometry(model: str, kv_dtype: str = "bfloat16") -> layout.Geometry:
    """The TPU kernels' geometry of a model's heads."""
    return layout.geometry(make_spec(MODELS[model], PAGE, kv_dtype=kv_dtype))


def compiled(target: str, model: str, jobs: list[tuple[str, Sizes]], kv_dtype: str = "bfloat16") -> list[Kernel]:
    """The kernels of `jobs` that compile; errors of the others are printed. The kernel of jax has bfloat16 pages."""
    kernels = []
    dtypes = ["bfloat16" if kind == "shipped" else kv_dtype for kind, _ in jobs]
    described = [(*job, MODELS[model], dtype) for job, dtype in zip(jobs, dtypes, strict=True)]
    results = compile_kernels(target, described)
    for (kind, sizes, _, dtype), result in zip(described, results, strict=True):
        if isinstance(result, CompileError):
            print(f"{model}: {kind} {sizes} does not compile for {target}: {result}", file=sys.stderr)
        else:
            kernels.append(KERNELS[kind](tpu_target(target), model, sizes, result, KV_BYTES[dtype]))
    return kernels


class Report:
    """One model's table of iterations, and one of batches."""

    def __init__(
        self,
        target: str,
        model: str,
        sizes: Mapping[str, list[Sizes] | None],
        *,
        shipped: bool,
        kv_dtype: str,
    ) -> None:
        """`sizes`: of the kernels "decode", "mixed" and "few"; None: the chosen ones."""
        self.target, self.model, self.kv_dtype = tpu_target(target), model, kv_dtype
        chosen, of_spec_decode = (
            blocks.choose(geometry(model, kv_dtype), CONTEXT // PAGE, self.target.chip.name, spec_decode=queries)
            for queries in (0, FEW_QUERIES)
        )
        own = {"decode": chosen.decode, "mixed": chosen.mixed, "few": of_spec_decode.mixed}
        jobs = [(kind, tried) for kind, rule in own.items() for tried in sizes[kind] or [tuple(vars(rule).values())]]
        jobs += [("shipped", tried) for tried in SHIPPED_BLOCKS if shipped]
        self.kernels = compiled(target, model, jobs, kv_dtype)

    def lines(self) -> list[str]:
        """The tables in Markdown."""
        heads = "{} query heads, {} KV heads, head dim {}".format(*MODELS[self.model])
        title = f"\n### {self.target.name}, {self.model}: {heads}; pages of {PAGE} in {self.kv_dtype}\n"
        return [title, *self._iterations(), "", *self._batches()]

    def _iterations(self) -> list[str]:
        table = Table(
            {
                "kernel": "", "block sizes": "", "bundles of one inner iteration": ">", "bytes": ".0f",
                "DMA floor": ".0f", "MXU floor": ".0f", "bundles per KV token (DMA floor)": ">",
                "bundles per query x 1k KV (MXU floor)": ">", "VMEM MiB (spilled KiB)": ">",
            }
        )  # fmt: skip
        for kernel in self.kernels:
            i, vmem = kernel.iteration(), kernel.compiled.vmem
            pairs = i.kv_tokens * i.queries
            dma, mxu = kernel.dma_cycles(i.num_bytes), kernel.mxu_cycles(pairs)
            per_token = f"{i.bundles / i.kv_tokens:.2f} ({dma / i.kv_tokens:.2f})"
            per_pair = f"{i.bundles * 1024 / pairs:.1f} ({mxu * 1024 / pairs:.1f})"
            memory = f"{vmem.used / 2**20:.1f} ({vmem.spilled / 2**10:.0f})"
            sizes = ", ".join(map(str, kernel.sizes))
            table.row(kernel.name, sizes, i.bundles, i.num_bytes, dma, mxu, per_token, per_pair, memory)
        return table.lines

    def _batches(self) -> list[str]:
        per_pair = "inner bundles per query x 1k KV computed (of the causal ones, everything included)"
        columns = {"batch": "", "ours, us": ".1f", "shipped, us": ".1f", "ours is faster by": ">"}
        table = Table({**columns, "ours: bundles, DMA floor": ">", per_pair: ">", "shipped": ">"})
        for name, rows in BATCHES.items():
            ours, theirs = self._best("ours", rows), self._best("shipped", rows)
            micros, shipped = (e and e.cycles / self.target.chip.clock_hz * 1e6 for e in (ours, theirs))
            faster = theirs and f"{theirs.cycles / ours.cycles:.2f}x"
            floors = f"{ours.bundles:.0f}, {ours.dma_cycles:.0f}"
            table.row(name, micros, shipped, faster, floors, _per_pair(ours, rows), _per_pair(theirs, rows))
        return table.lines

    def _best(self, kernel: str, rows: Any) -> Any:
        """The estimate of a batch. For the kernel of jax, it is that of the best block sizes for this batch."""
        if kernel == "shipped":
            estimates = [k.estimate(rows) for k in self.kernels if k.name == "shipped"]
            return min(estimates, key=lambda estimate: estimate.cycles, default=None)
        is_few = all(1 < row.query_len <= MOST_FEW_QUERIES for row in rows)
        parts = [
            min((k.estimate(rows) for k in self.kernels if k.name == name), key=lambda estimate: estimate.cycles)
            for name in ("ours, decode", "ours, few queries" if is_few else "ours, mixed")
        ]
        return sum(parts, Estimate())


def _per_pair(estimate: Estimate | None, rows: list[Row]) -> str | None:
    """Bundles per 1,024 pairs, of prompts only: in a decode the matrix unit multiplies padding."""
    if estimate is None or any(row.query_len == 1 for row in rows):
        return None
    causal = sum(row.query_len * (2 * row.kv_len - row.query_len + 1) / 2 for row in rows)
    return f"{estimate.inner_bundles * 1024 / estimate.pairs:.1f} ({estimate.bundles * 1024 / causal:.1f})"


# ---- block sizes ----


def candidates(g: Any) -> dict[str, list[Sizes]]:
    """The block sizes to try, by kind of kernel. Those of `blocks.choose` come first: the result is no worse."""
    rule = blocks.choose(g, CONTEXT // PAGE)
    queries = 1024 // g.queries_per_plane  # of one tile
    mixed: list[Sizes] = [
        (queries * tiles, kv_block, 1024, 256, 8)
        for tiles in ((1, 2) if g.num_k_planes > 4 else (2, 4))
        for kv_block in (1024, 2048)
    ]
    others: dict[str, list[Sizes]] = {"decode": [(256, 8), (512, 4), (1024, 4), (2048, 4)], "mixed": mixed}
    return {
        kind: list(dict.fromkeys([tuple(vars(getattr(rule, kind)).values()), *sizes])) for kind, sizes in others.items()
    }


def sweep(target: str) -> None:
    """Stores the best sizes per geometry and kind: for `TUNED_FOR`, the fewest cycles, then bundles, then VMEM."""
    from pallas_kernels.tpu import blocks

    path = tuning.FOLDER / f"{tpu_target(target).chip.name}.json"
    entries: dict[str, Any] = {}
    for model in MODELS:
        g = geometry(model)
        if blocks.key(g) in entries:  # the 3B's heads, padded, are the 8B's
            continue
        tried = candidates(g)
        kernels = compiled(target, model, [(kind, sizes) for kind in tried for sizes in tried[kind]])
        entries[blocks.key(g)] = {
            kind: dict(zip(fields, _kept(kernels, kind, tried[kind][0]).sizes, strict=True))
            for kind, fields in (
                ("decode", DecodeBlocks.__dataclass_fields__),
                ("mixed", MixedBlocks.__dataclass_fields__),
            )
        }
    source = f"{head()}; the compiler's account, not checked on a chip"
    path.write_text(json.dumps({"source": source, "entries": entries}, indent=2) + "\n")


def _kept(kernels: list[Kernel], kind: str, by_rule: Sizes) -> Kernel:
    """The best kernel of a kind; prints a line for each. At most half of the VMEM: XLA keeps weights in the rest."""
    tried = [k for k in kernels if isinstance(k, KERNELS[kind])]
    fitting = [k for k in tried if k.compiled.vmem.used <= k.compiled.vmem.capacity // 2]
    best = min(fitting, key=lambda k: (_cost(k.estimate(TUNED_FOR[kind])), k.compiled.vmem.used))
    for k in tried:
        cycles, bundles = _cost(k.estimate(TUNED_FOR[kind]))
        marks = ["by rule"] * (k.sizes == by_rule) + ["kept"] * (k is best)
        print(
            f"{k.target.name} {k.model} {kind} {k.sizes}: {cycles} cycles, {bundles} bundles, "
            f"{k.compiled.vmem.used / 2**20:.1f} MiB of VMEM",
            *marks,
            sep=", ",
        )
    return best


def _cost(estimate: Estimate) -> tuple[int, int]:
    return round(estimate.cycles), round(estimate.bundles)
