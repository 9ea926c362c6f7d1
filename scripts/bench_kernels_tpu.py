"""What the TPU compiler says about the attention kernels, ours and the one that jax ships, on the same batches.

Each kernel is compiled for the target in a process of its own, with the compiler's final VLIW bundles dumped, and the
bundles of its inner loops are counted. An estimate walks the batch as the kernel would, iteration by iteration, and
takes for each the larger of its bundles (one a cycle) and of the bytes it moves (at the peak bandwidth).

Read it as a comparison, not as a time: bundles know no stall, DMA has no latency here, and nothing of this was checked
against a chip. Of the shipped kernel's time the append of new K/V is missing: it leaves that to its caller.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks.bundles import Loop, read_loops

MODELS = {  # query heads, KV heads, head dim, as one chip sees them
    "1b": (32, 8, 64),
    "3b": (24, 8, 128),
    "8b": (32, 8, 128),
    "70b/8": (8, 1, 128),
}
PAGE = 128
SHIPPED_BLOCKS = [(8, 8), (8, 32), (8, 64)]  # pages of KV, queries


@dataclass(frozen=True)
class Row:
    query_len: int
    kv_len: int


BATCHES = {
    "decode 64 x 2k": [Row(1, 2048)] * 64,
    "prefill 2k": [Row(2048, 2048)],
    "mixed 63 x 2k + 1k": [Row(1, 2048)] * 63 + [Row(1024, 1024)],
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    cycles: float = 0.0
    bundles: float = 0.0
    dma_cycles: float = 0.0

    def then(self, bundles: float, dma_cycles: float) -> Estimate:
        return Estimate(
            cycles=self.cycles + max(bundles, dma_cycles),
            bundles=self.bundles + bundles,
            dma_cycles=self.dma_cycles + dma_cycles,
        )


def main(target: str, static: bool, rest: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="bench_kernels --target TPU")
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--decode", action="append", help="KV_BLOCK,ITEMS to try (default: the chosen one)")
    parser.add_argument("--mixed", action="append", help="Q_BLOCK,KV_BLOCK,TILE_ROWS,UNITS to try")
    parser.add_argument("--no-shipped", action="store_true", help="leave out the kernel that jax ships")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args(rest)
    if not static:
        raise ValueError("there is no TPU here to measure on: use --static")
    report = Report(target, args.model)
    report.ours(_tuples(args.decode), _tuples(args.mixed))
    if not args.no_shipped:
        report.shipped()
    report.show()
    if args.json:
        args.json.write_text(json.dumps({"target": target, "model": args.model, "lines": report.lines}, indent=1))


def _tuples(texts: list[str] | None) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in text.split(",")) for text in texts or []]


class Report:
    def __init__(self, target: str, model: str) -> None:
        from pallas_kernels.targets import tpu_target

        self.target, self.model = tpu_target(target), model
        self.num_query_heads, self.num_kv_heads, self.head_dim = MODELS[model]
        self.lines: list[dict[str, Any]] = []
        self.best: dict[str, dict[str, tuple[Estimate, str]]] = {batch: {} for batch in BATCHES}

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * 2

    def dma_cycles(self, num_bytes: float) -> float:
        return num_bytes / self.target.hbm_bytes_per_cycle

    def ours(self, decode: list[tuple[int, ...]], mixed: list[tuple[int, ...]]) -> None:
        from pallas_kernels.tpu import blocks, layout

        g = layout.geometry(attention_spec(self.model))
        chosen = blocks.choose(g, 4096 // PAGE, self.target.chip)
        decode = decode or [(chosen.decode.kv_block, chosen.decode.items_per_turn)]
        m = chosen.mixed
        mixed = mixed or [(m.q_block, m.kv_block, m.tile_rows, m.units_per_turn)]
        decodes = {sizes: self._our_decode(g, *sizes) for sizes in decode}
        mixeds = {sizes: self._our_mixed(g, *sizes) for sizes in mixed}
        for batch, rows in BATCHES.items():
            for d, walk_decodes in decodes.items():
                for x, walk_chunks in mixeds.items():
                    estimate = walk_chunks(rows, walk_decodes(rows, Estimate()))
                    self._offer(batch, "ours", estimate, f"decode {d}, mixed {x}")

    def _our_decode(self, g: Any, kv_block: int, items: int) -> Any:
        loops = compile_and_count(self.target.name, self.model, "decode", [kv_block, items])
        turn = max((loop for loop in loops if loop.depth == 1), key=lambda loop: loop.matmuls)
        runs = [loop for loop in loops if loop.depth == 2 and turn.begin <= loop.begin < turn.begin + turn.bundles]
        run = max((loop.bundles for loop in runs), default=0)
        once = turn.bundles - sum(loop.bundles for loop in runs)
        tokens = kv_block * items
        self._line(
            "ours", "decode", f"kv_block {kv_block}, items {items}",
            once + run * tokens // PAGE, tokens * self.token_bytes, tokens, "KV token", tokens, 1,
        )  # fmt: skip

        def walk(rows: list[Row], estimate: Estimate) -> Estimate:
            work = [min(kv_block, row.kv_len - at) for row in rows if row.query_len == 1
                    for at in range(0, row.kv_len, kv_block)]  # fmt: skip
            for begin in range(0, len(work), items):
                live = work[begin : begin + items]
                copies = sum(-(-n // PAGE) for n in live)
                estimate = estimate.then(once + run * copies, self.dma_cycles(sum(live) * self.token_bytes))
            return estimate

        return walk

    def _our_mixed(self, g: Any, q_block: int, kv_block: int, tile_rows: int, units: int) -> Any:
        loops = compile_and_count(self.target.name, self.model, "mixed", [q_block, kv_block, tile_rows, units])
        whole, masked = sorted((loop for loop in loops if loop.depth == 2 and loop.matmuls), key=lambda x: x.bundles)
        entry = max((loop for loop in loops if loop.depth == 1), key=lambda loop: loop.bundles)
        inner = [x for x in loops if x.depth == 2 and entry.begin <= x.begin < entry.begin + entry.bundles]
        overhead = entry.bundles - sum(loop.bundles for loop in inner)
        run = max((x.bundles for x in inner if not x.matmuls and x.copies), default=0)
        # Of one turn: `units` planes x tile_rows queries' rows, over kv_block tokens.
        queries = units * tile_rows / (g.queries_per_plane * g.num_k_planes)
        for name, loop in (("mixed", whole), ("mixed, masked", masked)):
            self._line(
                "ours", name, f"q_block {q_block}, kv_block {kv_block}, tile {tile_rows}, units {units}",
                loop.bundles, kv_block * self.token_bytes * units * tile_rows
                / (g.num_k_planes * q_block * g.queries_per_plane),
                queries * kv_block / 1024, "query x 1k KV", kv_block, queries,
            )  # fmt: skip

        def walk(rows: list[Row], estimate: Estimate) -> Estimate:
            for row in rows:
                if row.query_len == 1:
                    continue
                for begin in range(0, row.query_len, q_block):
                    num_q = min(q_block, row.query_len - begin)
                    first = row.kv_len - row.query_len + begin
                    tiles = -(-num_q * g.queries_per_plane // tile_rows)
                    turns = -(-g.num_k_planes * tiles // units)
                    for at in range(0, first + num_q, kv_block):
                        loop = whole if first >= at + kv_block - 1 else masked
                        live = min(kv_block, first + num_q - at)
                        bundles = overhead + run * -(-live // PAGE) + turns * loop.bundles
                        estimate = estimate.then(bundles, self.dma_cycles(live * self.token_bytes))
            return estimate

        return walk

    def shipped(self) -> None:
        for pages, queries in SHIPPED_BLOCKS:
            try:
                loops = compile_and_count(self.target.name, self.model, "shipped", [pages, queries])
            except CompileError as error:
                print(f"the shipped kernel with {(pages, queries)} does not compile: {error}")
                continue
            deepest = max((loop for loop in loops if loop.matmuls), key=lambda loop: (loop.depth, loop.bundles))
            kv_block = pages * PAGE
            # Head dim 64 is stored in 128 lanes.
            block_bytes = kv_block * self.token_bytes * max(1, 128 // self.head_dim)
            self._line(
                "shipped", "all", f"{pages} pages, {queries} queries", deepest.bundles, block_bytes,
                kv_block, "KV token", kv_block, queries,
            )  # fmt: skip
            per_query = deepest.bundles / queries * 1024 / kv_block
            self.lines[-1]["per query x 1k KV"] = round(per_query, 1)
            for batch, rows in BATCHES.items():
                estimate = Estimate()
                for num_blocks in _shipped_blocks(rows, queries, kv_block):
                    for _ in range(num_blocks):
                        estimate = estimate.then(deepest.bundles, self.dma_cycles(block_bytes))
                self._offer(batch, "shipped", estimate, f"{pages} pages, {queries} queries")

    def _offer(self, batch: str, kernel: str, estimate: Estimate, sizes: str) -> None:
        best = self.best[batch].get(kernel)
        if best is None or estimate.cycles < best[0].cycles:
            self.best[batch][kernel] = (estimate, sizes)

    def _line(
        self, kernel: str, variant: str, sizes: str, bundles: float, num_bytes: float, work: float, unit: str,
        kv_tokens: float, queries: float,
    ) -> None:  # fmt: skip
        flops = 4 * self.num_query_heads * self.head_dim * kv_tokens * queries
        self.lines.append(
            {
                "kernel": kernel,
                "variant": variant,
                "block sizes": sizes,
                "bundles": round(bundles),
                "bytes": round(num_bytes),
                "DMA floor": round(self.dma_cycles(num_bytes)),
                "MXU floor": round(flops / self.target.flops_per_cycle),
                f"per {unit}": round(bundles / work, 2),
                f"DMA floor per {unit}": round(self.dma_cycles(num_bytes) / work, 2),
            }
        )

    def show(self) -> None:
        print(f"{self.target.name}, {self.model}: {MODELS[self.model]} heads, KV heads, head dim; page {PAGE}, bf16")
        print("one iteration of the inner loop, cycles:")
        for line in self.lines:
            print("  " + "  ".join(f"{key}={value}" for key, value in line.items()))
        print("estimate of the whole batch, at each kernel's best block sizes of those above:")
        for batch, kernels in self.best.items():
            for kernel, (estimate, sizes) in kernels.items():
                micros = estimate.cycles / self.target.clock_hz * 1e6
                print(
                    f"  {batch:20} {kernel:8} {micros:9.1f} us   (bundles {estimate.bundles:.0f}, DMA floor "
                    f"{estimate.dma_cycles:.0f} cycles; {sizes})"
                )
            if len(kernels) == 2:
                ratio = kernels["shipped"][0].cycles / kernels["ours"][0].cycles
                print(f"  {batch:20} ours is {ratio:.2f}x as fast")


def _shipped_blocks(rows: list[Row], queries: int, kv_block: int) -> Iterator[int]:
    """KV blocks of each (query block, row) that meet: it takes all of a row's blocks, causal or not."""
    start = 0
    for row in rows:
        stop = start + row.query_len
        for _ in range(start // queries, -(-stop // queries)):
            yield -(-row.kv_len // kv_block)
        start = stop


class CompileError(Exception):
    pass


def compile_and_count(target: str, model: str, kernel: str, sizes: list[int]) -> list[Loop]:
    """Compiles in a child process, for the dump flags are read when libtpu loads."""
    with tempfile.TemporaryDirectory() as folder:
        flags = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
        )
        environment = {
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": flags,
        }
        command = [sys.executable, "-m", "scripts.benchmarks.compile_tpu_kernel", target, kernel, json.dumps(sizes)]
        heads = json.dumps(MODELS[model])
        done = subprocess.run(
            [*command, heads], env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise CompileError(done.stderr.strip().splitlines()[-1][:300])
        dumps = [path for path in Path(folder).glob("*attention*final_bundles.txt") if "schedule" not in path.name]
        if len(dumps) != 1:
            raise CompileError(f"expected one dump of the kernel's bundles: {dumps=}")
        return read_loops(dumps[0])


def attention_spec(model: str) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.api import AttentionSpec

    num_query_heads, num_kv_heads, head_dim = MODELS[model]
    return AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE,
        dtype=jnp.bfloat16,
        kv_dtype=jnp.bfloat16,
    )
