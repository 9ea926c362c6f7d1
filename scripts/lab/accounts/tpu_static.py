"""Estimates of the attention kernels on a TPU from the compiler's final VLIW bundles, without the chip.

A kernel is compiled in a child process, and the bundles of its loops are counted. An estimate goes through a batch as
the kernel does, iteration by iteration. Each iteration takes the longer of its bundles (one per cycle) and its memory
traffic (at the peak bandwidth).

The estimates are for comparisons. They are not times: bundles have no stalls here, DMA has no latency, and nothing was
checked on a chip. For our kernels all bundles inside the outermost loop count, including branches that are not taken,
and the rotation and the append of new K/V. Loops that copy operands which XLA has placed in VMEM do not count: where
they lie is the whole program's affair.
For the kernel of jax only the innermost loop counts; its caller must append new K/V, which does not count either.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from typing import Any

from pallas_kernels.tpu.decode_memory import SHORT_BLOCK
from pallas_kernels.tpu.tiles import NARROW_UNITS
from scripts.lab.accounts.bundles import Loop, Vmem, dump_flags
from scripts.lab.accounts.process import printed_by
from scripts.lab.accounts.specs import MODELS
from scripts.lab.accounts.targets import TpuTarget

PAGE = 128
TOKEN_TILE, TILE_WORDS = 16, 8  # tokens that are rotated and packed at a time, and their words, in bfloat16
MASKS = 2  # of a query block, besides the one that masks nothing


@dataclass(frozen=True)
class Row:
    """A sequence of a batch: its tokens in this step, and all its tokens."""

    query_len: int
    kv_len: int


BATCHES = {
    "decode 64 x 2k": [Row(1, 2048)] * 64,
    "decode 256 x 100": [Row(1, 100)] * 256,
    "prefill 2k": [Row(2048, 2048)],
    "mixed 63 x 2k + 1k": [Row(1, 2048)] * 63 + [Row(1024, 1024)],
    "drafts 64 x 2k, 4 each": [Row(4, 2048)] * 64,
    "drafts 1 x 32k, 4": [Row(4, 32768)],
    "chunk of 64 on 32k": [Row(64, 32768)],
}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The estimate of a batch, or of a part of it."""

    cycles: float = 0.0
    bundles: float = 0.0
    inner_bundles: float = 0.0  # in the innermost loop, where the products are
    dma_cycles: float = 0.0
    pairs: float = 0.0  # (query, KV token) pairs that are computed

    def then(self, bundles: float, dma_cycles: float, inner_bundles: float = 0.0, pairs: float = 0.0) -> Estimate:
        """This estimate plus further work, which takes the longer of its bundles and its copies."""
        return Estimate(
            cycles=self.cycles + max(bundles, dma_cycles),
            bundles=self.bundles + bundles,
            inner_bundles=self.inner_bundles + inner_bundles,
            dma_cycles=self.dma_cycles + dma_cycles,
            pairs=self.pairs + pairs,
        )

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """One iteration of a kernel's inner loop."""

    bundles: int
    num_bytes: float
    kv_tokens: int
    queries: float


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """The compiler's account of a kernel."""

    loops: list[Loop]
    vmem: Vmem

    def busiest(self, depth: int) -> Loop:
        """The loop of this depth with matrix products and the most bundles."""
        return max((loop for loop in self.loops if loop.depth == depth and loop.matmuls), key=lambda x: x.bundles)


class CompileError(Exception):
    """The compiler refuses a kernel with these block sizes; the message is the compiler's."""


def compile_kernels(
    target: str, jobs: list[tuple[str, tuple[int, ...], tuple[int, int, int], str]]
) -> list[Compiled | CompileError]:
    """Jobs are (kernel, block sizes, heads, dtype of the pages). They are compiled in a child process."""
    module = "scripts.lab.accounts.compile_tpu_kernel"
    with tempfile.TemporaryDirectory() as folder:
        lines = printed_by(module, target, folder, json.dumps(jobs), LIBTPU_INIT_ARGS=dump_flags(folder))
    return [_result(line) for line in lines]


def _result(line: dict[str, Any]) -> Compiled | CompileError:
    if "error" in line:
        return CompileError(line["error"])
    return Compiled(loops=[Loop(**loop) for loop in line["loops"]], vmem=Vmem(**line["vmem"]))


class Kernel:
    """A kernel with its block sizes, compiled for a target, with estimates of an iteration and of a batch."""

    name: str

    def __init__(
        self, target: TpuTarget, model: str, sizes: tuple[int, ...], compiled: Compiled, kv_bytes: int = 2
    ) -> None:
        """`kv_bytes`: bytes of one element of the pages."""
        self.target, self.model, self.sizes, self.compiled, self.kv_bytes = target, model, sizes, compiled, kv_bytes
        self.num_query_heads, self.num_kv_heads, self.head_dim = MODELS[model]

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token."""
        return 2 * self.num_kv_heads * self.head_dim * self.kv_bytes

    def dma_cycles(self, num_bytes: float) -> float:
        """Cycles in which the memory delivers `num_bytes`."""
        return num_bytes / self.target.memory_bytes_per_cycle

    def mxu_cycles(self, pairs: float) -> float:
        """Cycles in which the matrix units of one core multiply `pairs` (query, KV token) pairs."""
        chip = self.target.chip
        return 4 * self.num_query_heads * self.head_dim * pairs * chip.cores / chip.flops_per_cycle

    def iteration(self) -> Iteration:
        """One iteration of the inner loop."""
        raise NotImplementedError

    def estimate(self, rows: list[Row]) -> Estimate:
        """The estimate of a batch with these rows."""
        raise NotImplementedError


class OurDecode(Kernel):
    """Sizes: KV block, items per turn."""

    name = "ours, decode"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        turns = [loop for loop in self.compiled.loops if loop.depth == 1 and loop.matmuls]
        turn = max(turns, key=lambda loop: loop.bundles)
        self.run, self.once = self._turn(turn)
        # The turn of batches of short rows, if there is one.
        self.short_once = self._turn(min(turns, key=lambda loop: loop.bundles))[1]
        # Before the first turn and after the last, for each tile of tokens, loops over its tokens' words.
        others = [loop for loop in self.compiled.loops if loop.depth == 1 and not loop.matmuls and not loop.copies]
        inner = [loop for loop in self.compiled.loops for other in others if loop.inside(other)]
        self.per_tile = sum(loop.bundles for loop in others) + (TILE_WORDS - 1) * sum(loop.bundles for loop in inner)

    def _turn(self, turn: Loop) -> tuple[int, int]:
        """Bundles that start the copy of one page, and those of the rest of a turn."""
        runs = [loop for loop in self.compiled.loops if loop.inside(turn)]
        return max((loop.bundles for loop in runs), default=0), turn.bundles - sum(loop.bundles for loop in runs)

    def iteration(self) -> Iteration:
        tokens = self.sizes[0] * self.sizes[1]
        bundles = self.once + self.run * tokens // PAGE
        return Iteration(bundles=bundles, num_bytes=tokens * self.token_bytes, kv_tokens=tokens, queries=1)

    def estimate(self, rows: list[Row]) -> Estimate:
        kv_block, items = self.sizes
        is_short = all(row.kv_len <= SHORT_BLOCK for row in rows if row.query_len == 1)
        kv_block, once = (min(kv_block, SHORT_BLOCK), self.short_once) if is_short else (kv_block, self.once)
        work = [
            min(kv_block, row.kv_len - begin)
            for row in rows
            if row.query_len == 1
            for begin in range(0, row.kv_len, kv_block)
        ]
        num_rows = sum(row.query_len == 1 for row in rows)
        estimate = Estimate().then(self.per_tile * -(-num_rows // TOKEN_TILE), 0.0)
        for first in range(0, len(work), items):
            live = work[first : first + items]
            copies = sum(-(-tokens // PAGE) for tokens in live)
            bundles = once + self.run * copies
            estimate = estimate.then(bundles, self.dma_cycles(sum(live) * self.token_bytes), bundles, sum(live))
        return estimate


class OurMixed(Kernel):
    """Sizes: query block, KV block, tile's query rows, tile's tokens, units per turn. What depends on the number of a
    block's queries is there twice, for narrow tiles first, if there are any."""

    name = "ours, mixed"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        entry = self.compiled.busiest(1)
        inner = [loop for loop in self.compiled.loops if loop.inside(entry) and loop.depth == entry.depth + 1]
        turns = [loop for loop in inner if loop.matmuls]
        self.run = max((loop.bundles for loop in inner if loop.copies), default=0)
        self.once = entry.bundles - sum(loop.bundles for loop in inner)
        # Once per query block: the rotation of its tiles of tokens and the masks, the packing of new K and V, which is
        # two loops, and, behind the turns, its outputs. Per KV block, if its last tile is not full: its dead words.
        others = [loop for loop in inner if not (loop.copies or loop.moves)]
        before = [loop.bundles for loop in others if loop.begin < turns[0].begin]
        after = [loop.bundles for loop in others if loop.begin > turns[-1].begin]
        # Keys that are not rotated are packed without arithmetic.
        if len(before) - 2 * len(turns) not in (2, 3) or len(after) != len(turns):
            raise ValueError(f"not the loops of the mixed kernel: {[vars(loop) for loop in inner]}")
        *packing, self.dead_words = before[2 * len(turns) :]

        per_plane = self.num_query_heads // self.num_planes
        self.tile_queries = self.sizes[2] // per_plane
        narrow = narrow_tile(per_plane) if len(turns) > 1 else 0
        self.widths = [
            _Width(
                queries=queries,
                turn=turn.bundles,
                units=self._units(queries) if queries == narrow else self.sizes[4],
                per_tokens=before[2 * i] + sum(packing),
                masks=before[2 * i + 1],
                per_unit=after[i],
            )
            for i, (queries, turn) in enumerate(zip([narrow, self.tile_queries][-len(turns) :], turns, strict=True))
        ]

    def _units(self, narrow: int) -> int:
        """Narrow tiles of a turn, which takes them from several planes together."""
        wide = self.tile_queries // narrow
        return NARROW_UNITS * max(n for n in range(1, wide + 1) if self.num_planes % n == 0)

    @property
    def num_planes(self) -> int:
        """Planes of 128 lanes of the keys."""
        return self.num_kv_heads // (128 // self.head_dim)

    def iteration(self) -> Iteration:
        q_block, _, _, tile_tokens, units = self.sizes
        queries = units * self.tile_queries / self.num_planes  # of all planes
        num_bytes = tile_tokens * self.token_bytes * queries / q_block
        return Iteration(bundles=self.widths[-1].turn, num_bytes=num_bytes, kv_tokens=tile_tokens, queries=queries)

    def estimate(self, rows: list[Row]) -> Estimate:
        q_block, kv_block = self.sizes[:2]
        estimate = Estimate()
        for row in rows:
            for begin in range(0, row.query_len if row.query_len > 1 else 0, q_block):
                num_q = min(q_block, row.query_len - begin)
                width = next(width for width in self.widths if num_q <= width.queries or width is self.widths[-1])
                first = row.kv_len - row.query_len + begin
                for at in range(0, first + num_q, kv_block):
                    estimate = self._entry(estimate, width, num_q, first - at)
                units = self.num_planes * -(-num_q // width.queries)
                bundles = width.per_tokens * -(-num_q // TOKEN_TILE) + width.per_unit * units + MASKS * width.masks
                estimate = estimate.then(bundles, self.dma_cycles(2 * num_q * self.token_bytes))
        return estimate

    def _entry(self, estimate: Estimate, width: _Width, num_q: int, position: int) -> Estimate:
        _, kv_block, _, tile_tokens, _ = self.sizes
        live = min(kv_block, position + num_q)
        seen = [
            min(kv_block, max(0, position + min(first + width.queries, num_q)))
            for first in range(0, num_q, width.queries)
        ]
        tiles = sum(-(-tokens // tile_tokens) for tokens in seen)
        inner = -(-tiles * self.num_planes // width.units) * width.turn
        bundles = self.once + self.run * -(-live // PAGE) + inner
        bundles += 2 * self.num_planes * self.dead_words * (live % tile_tokens > 0)
        pairs = tiles * tile_tokens * width.queries
        return estimate.then(bundles, self.dma_cycles(live * self.token_bytes), inner, pairs)


@dataclass(frozen=True, kw_only=True)
class _Width:
    """The bundles of one size of tiles."""

    queries: int  # of a tile
    turn: int
    units: int  # of a turn
    per_tokens: int  # for each tile of tokens
    masks: int  # for each mask
    per_unit: int  # for each plane's tile of queries


def narrow_tile(queries_per_plane: int) -> int:
    """Queries of a narrow tile: see `pallas_kernels.tpu.tiles.MixedBlocks.narrow`."""
    queries = 16
    while queries * queries_per_plane % 128 or queries * queries_per_plane < 256:
        queries *= 2
    return queries


class OurFew(Kernel):
    """The mixed kernel for rows of few queries. Sizes: query block, KV block, tokens computed on at a time, slots."""

    name = "ours, few queries"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.tile, chunk, entry = (self.compiled.busiest(depth) for depth in (3, 2, 1))
        inner = [loop for loop in self.compiled.loops if loop.inside(entry) and loop.depth == entry.depth + 1]
        self.run = max((loop.bundles for loop in inner if loop.copies), default=0)
        self.once = entry.bundles - sum(loop.bundles for loop in inner)
        self.per_chunk = chunk.bundles - self.tile.bundles
        others = [loop for loop in inner if not (loop.copies or loop.moves) and loop is not chunk]
        dead_words = max((loop for loop in others if loop.begin < chunk.begin), key=lambda loop: loop.begin)
        self.dead_words = dead_words.bundles  # of each plane, if the KV block's last tile is not full
        # Once for each tile of tokens, or for each chunk.
        self.around = sum(loop.bundles for loop in others if loop is not dead_words)

    def iteration(self) -> Iteration:
        _, _, tokens, slots = self.sizes
        num_bytes = tokens * self.token_bytes
        return Iteration(bundles=self.tile.bundles, num_bytes=num_bytes, kv_tokens=tokens, queries=slots)

    def estimate(self, rows: list[Row]) -> Estimate:
        _, kv_block, tokens, slots = self.sizes
        estimate = Estimate()
        for row in rows:
            if row.query_len == 1:
                continue
            chunks, around = -(-row.query_len // slots), self.around
            for begin in range(0, row.kv_len, kv_block):
                live = min(kv_block, row.kv_len - begin)
                tiles = -(-live // tokens)
                inner = chunks * tiles * self.tile.bundles
                around_it = around * max(chunks, -(-row.query_len // TOKEN_TILE)) + chunks * self.per_chunk
                bundles = self.once + self.run * -(-live // PAGE) + inner + around_it
                bundles += self.dead_words * 2 * self.num_kv_heads * self.head_dim // 128 * (live % tokens > 0)
                pairs = chunks * slots * tiles * tokens
                estimate = estimate.then(bundles, self.dma_cycles(live * self.token_bytes), inner, pairs)
                around = 0
            estimate = estimate.then(0.0, self.dma_cycles(2 * row.query_len * self.token_bytes))
        return estimate


class Shipped(Kernel):
    """`jax.experimental.pallas.ops.tpu.ragged_paged_attention`. Sizes: pages of KV, queries.

    It stores head dim 64 in 128 lanes, so its pages and queries are padded."""

    name = "shipped"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        matmuls = (loop for loop in self.compiled.loops if loop.matmuls)
        self.inner = max(matmuls, key=lambda loop: (loop.depth, loop.bundles))

    @property
    def token_bytes(self) -> int:
        return super().token_bytes * max(1, 128 // self.head_dim)

    def iteration(self) -> Iteration:
        tokens = self.sizes[0] * PAGE
        num_bytes = tokens * self.token_bytes
        return Iteration(bundles=self.inner.bundles, num_bytes=num_bytes, kv_tokens=tokens, queries=self.sizes[1])

    def estimate(self, rows: list[Row]) -> Estimate:
        pages, queries = self.sizes
        kv_block = pages * PAGE
        estimate, start = Estimate(), 0
        for row in rows:
            stop = start + row.query_len
            # For each block of queries it reads all KV blocks of the row, causal or not, in whole pages.
            for _ in range(start // queries, -(-stop // queries)):
                for at in range(0, row.kv_len, kv_block):
                    live = min(kv_block, -(-(row.kv_len - at) // PAGE) * PAGE)
                    dma = self.dma_cycles(live * self.token_bytes)
                    estimate = estimate.then(self.inner.bundles, dma, self.inner.bundles, queries * kv_block)
            start = stop
        return estimate


KERNELS = {"decode": OurDecode, "mixed": OurMixed, "few": OurFew, "shipped": Shipped}
