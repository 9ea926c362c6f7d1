"""The time of one layer's attention on a GPU, predicted for a batch from its work lists: a model, no measurement.

The floor is the time in which the memory delivers every key and value of the batch once, at the bandwidth of the data
sheet. The model adds what the kernels' division of the work costs: CTAs that have nothing to do, waits for first
bytes, partial results and launches. Its constants are estimates, except where a measurement is named.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.chips import GpuChip
from pallas_kernels.gpu import combine, decode, device, prefill_tile, tile_list, tuning, work_list
from pallas_kernels.gpu.parts import MERGE_PARTS, NO_PARTS, Parts
from pallas_kernels.gpu.prefill_memory import KV8_STAGES
from pallas_kernels.spec import AttentionSpec
from scripts.lab.accounts.gpu_schedule import Launch, Unit
from scripts.lab.accounts.gpu_schedule import seconds as seconds_of
from scripts.lab.tables import Table

COPY_SHARE = 0.87  # of the data sheet's bandwidth that a large copy reaches: measured on an H100
LATENCY_S = 1.0e-6  # from a copy's start to its last byte, under load
LAUNCH_S = 2.0e-6  # between two kernels of a CUDA graph
CTA_START_S = 0.5e-6
BETWEEN_S = 0.5e-6  # from a persistent CTA's unit to its next, whose first copies have started before
MAX_LEN = 1 << 17  # keys of a row, for which the program is compiled
FEW_QUERIES = 8  # of each row in a program of drafts, which has no decode kernel

# One program of each shape, as in a step: operation by operation there would be dozens.
DECODE_ITEMS = jax.jit(work_list.decode_items, static_argnames=["block_kv", "parts"])
PREFILL_TILES = jax.jit(tile_list.prefill_tiles, static_argnames=["num_tokens", "tile_tokens", "block_kv", "parts"])

Rows = list[tuple[int, int]]  # (query length, KV length with the queries); decodes first
SHAPES: dict[str, Rows] = {
    "64 x 2k": [(1, 2048)] * 64,
    "1 x 32k": [(1, 32768)],
    "1 x 128k": [(1, 131072)],
    "256 x 512": [(1, 512)] * 256,
    "1 x 64k + 63 x 512": [(1, 65536)] + [(1, 512)] * 63,
    "32 on 100k": [(32, 100_000)],
    "4 queries, 64 x 2k": [(4, 2048)] * 64,
    "4 queries, 1 x 32k": [(4, 32768)],
}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one layer."""

    floor_s: float
    seconds: float
    units: int  # of the kernel that attends
    longest: int  # blocks of a unit
    launches: int
    limit_s: float  # of any kernels with so many launches: the bytes or the products, launches, and the first bytes

    @property
    def share(self) -> float:
        """The share of the data sheet's bandwidth."""
        return self.floor_s / self.seconds


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A chip and the form that the kernels have on it."""

    chip: GpuChip
    spec: AttentionSpec
    # Cycles of a multiprocessor in which the kernel issues a turn of its loop, as compiled; 0 where that is not known.
    decode_cycles: float = 0.0
    prefill_cycles: float = 0.0
    mma_only: bool = False

    @property
    def gpu(self) -> device.Gpu:
        """The chip as the kernels see it."""
        chip = self.chip
        return device.Gpu(arch=chip.arch, num_multiprocessors=chip.num_multiprocessors, mma_only=self.mma_only)

    def kv_bytes(self, keys: float) -> float:
        """The bytes of so many keys and values of one KV head."""
        return keys * self.spec.head_dim * 2 * jnp.dtype(self.spec.kv_dtype).itemsize

    def block_s(self, block_kv: int, rows: int, cycles: float, ctas: int, under_way: int = 1) -> float:
        """Seconds that a block takes a CTA at least, next to the others of its multiprocessor: by the latency of its
        copy, of which so many are under way, by its products, and by its instructions."""
        chip = self.chip
        products = 4 * rows * block_kv * self.spec.head_dim * chip.num_multiprocessors / chip.bf16_flops_per_s
        return max(LATENCY_S / under_way, ctas * products, ctas * cycles / chip.clock_hz)


def predict(machine: Machine, rows: Rows, *, cut: bool = True) -> Prediction:
    """The attention of one layer over `rows`, without the append. `cut`: whether short chunks may be cut into parts."""
    bandwidth = machine.chip.memory_bytes_per_s
    singles = [kv_len for query_len, kv_len in rows if query_len == 1]
    launches, merging = [], []
    if len(singles) == len(rows) or max(query_len for query_len, _ in rows) > FEW_QUERIES:
        attend, to_merge, longest = _decode(machine, singles, len(rows))
        launches.append(attend)
        merging += to_merge
    if len(singles) < len(rows):
        attend, to_merge, longest = _prefill(machine, rows, cut=cut)
        launches.append(attend)
        merging += to_merge
    if merging:
        launches.append(_merging(machine, merging))
    spec, chip = machine.spec, machine.chip
    kv_bytes = sum(machine.kv_bytes(kv_len) for _, kv_len in rows) * spec.num_kv_heads
    # A tile of tensor cores has at least 16 rows of a KV head.
    products = sum(max(query_len * spec.num_query_heads, 16 * spec.num_kv_heads) * kv_len for query_len, kv_len in rows)
    work_s = max(kv_bytes / (COPY_SHARE * bandwidth), 4 * products * spec.head_dim / chip.bf16_flops_per_s)
    return Prediction(
        floor_s=kv_bytes / bandwidth,
        seconds=sum(LAUNCH_S + seconds_of(launch, COPY_SHARE * bandwidth) for launch in launches),
        units=sum(unit.alone_s > 0 for unit in attend.units),
        longest=longest,
        launches=len(launches),
        limit_s=work_s + len(launches) * LAUNCH_S + CTA_START_S + LATENCY_S,
    )


def _decode(machine: Machine, kv_lens: list[int], num_rows: int) -> tuple[Launch, list[list[Unit]], int]:
    """The launch of the decode kernel, what is merged of it, and the blocks of the longest item."""
    gpu, spec = machine.gpu, machine.spec
    lens = jnp.asarray(kv_lens + [0] * (num_rows - len(kv_lens)), jnp.int32)
    block_kv, slots = tuning.decode_tiles(gpu, spec).block_kv, tuning.decode_ctas(gpu, spec)
    parts = tuning.decode_parts(gpu, spec, num_rows=num_rows, max_keys=MAX_LEN)
    work = DECODE_ITEMS(lens, lens > 0, block_kv=block_kv, parts=parts)
    blocks = np.asarray(work.items)[: int(work.num_items[0]), work_list.ITEM_NUM_BLOCKS].tolist()
    block_s = machine.block_s(block_kv, decode.TILE_M, machine.decode_cycles, slots // machine.chip.num_multiprocessors)
    attend = Launch(
        units=[_unit(machine, n, block_kv, block_s) for n in blocks for _ in range(spec.num_kv_heads)],
        slots=slots, start_s=CTA_START_S + LATENCY_S, between_s=BETWEEN_S,
    )  # fmt: skip
    return attend, _to_merge(machine, work.merges, work.num_merges, parts), max(blocks, default=0)


def blocks_under_way(gpu: device.Gpu, spec: AttentionSpec) -> int:
    """Blocks that are copied while the prefill kernel multiplies another one."""
    if not gpu.has_wgmma:
        return tuning.mma_prefill_tiles(gpu, spec).num_stages - 1
    if spec.has_kv_scales:
        return KV8_STAGES
    return tuning.hopper_prefill_tiles(spec).num_stages - 2  # the values of two blocks are in use


def _prefill(machine: Machine, rows: Rows, *, cut: bool) -> tuple[Launch, list[list[Unit]], int]:
    """The launch of the prefill kernel, what is merged of it, and the blocks of the longest unit."""
    gpu, spec = machine.gpu, machine.spec
    starts = np.cumsum([0, *(query_len for query_len, _ in rows)])
    tile_tokens, block_kv = tuning.prefill_tile_tokens(gpu, spec), tuning.prefill_block_kv(gpu, spec)
    num_tokens = max(tile_tokens, -(-int(starts[-1]) // tile_list.TOKEN_ALIGNMENT) * tile_list.TOKEN_ALIGNMENT)
    parts = NO_PARTS
    if cut:
        parts = tuning.prefill_parts(gpu, spec, num_rows=len(rows), num_tokens=num_tokens, max_keys=MAX_LEN)
    work = PREFILL_TILES(
        jnp.asarray([kv_len for _, kv_len in rows]), jnp.asarray(starts),
        jnp.int32(sum(query_len == 1 for query_len, _ in rows)), num_tokens=num_tokens, tile_tokens=tile_tokens,
        block_kv=block_kv, parts=parts,
    )  # fmt: skip
    tiles = np.asarray(work.tiles)[: int(work.num_tiles[0])]
    slots = tuning.prefill_ctas(gpu, spec)
    rows_of_cta = prefill_tile.TILE_M * (2 if gpu.has_wgmma else 1)
    ctas, under_way = slots // gpu.num_multiprocessors, blocks_under_way(gpu, spec)
    block_s = machine.block_s(block_kv, rows_of_cta, machine.prefill_cycles, ctas, under_way)
    shape = prefill_tile.TileShape(spec.num_query_heads // spec.num_kv_heads)
    units: list[Unit] = []
    last_read: dict[tuple[int, int, int], int] = {}  # the number of the unit that read the same keys last
    for tile in tiles:
        first, end = int(tile[tile_list.TILE_FIRST_BLOCK]), int(tile[tile_list.TILE_END_BLOCK])
        for heads in range(spec.num_kv_heads * shape.tiles_per_group):
            # Tiles that read the same keys at the same time find them in the L2 cache.
            keys = (int(tile[tile_list.TILE_ROW]), heads // shape.tiles_per_group, first)
            is_cached = len(units) - last_read.get(keys, -slots) < slots
            last_read[keys] = len(units)
            unit = _unit(machine, end - first, block_kv, block_s, from_memory=not is_cached)
            units.append(replace(unit, bytes=unit.bytes + _part_bytes(tile, shape, spec)))
    attend = Launch(units=units, slots=slots, start_s=CTA_START_S + LATENCY_S, between_s=BETWEEN_S)
    longest = int((tiles[:, tile_list.TILE_END_BLOCK] - tiles[:, tile_list.TILE_FIRST_BLOCK]).max())
    return attend, _to_merge(machine, work.merges, work.num_merges, parts), longest


def _part_bytes(tile: np.ndarray, shape: prefill_tile.TileShape, spec: AttentionSpec) -> int:
    """What a tile that is a part writes: whole runs of eight tokens."""
    if tile[tile_list.TILE_PART] < 0:
        return 0
    first, end = int(tile[tile_list.TILE_BEGIN]), int(tile[tile_list.TILE_END])
    runs = -(-end // tile_list.TOKEN_ALIGNMENT) - first // tile_list.TOKEN_ALIGNMENT
    return runs * tile_list.TOKEN_ALIGNMENT * shape.heads * spec.head_dim * 2


def _unit(machine: Machine, blocks: int, block_kv: int, block_s: float, *, from_memory: bool = True) -> Unit:
    return Unit(bytes=machine.kv_bytes(blocks * block_kv) if from_memory else 0.0, alone_s=blocks * block_s)


def _to_merge(machine: Machine, merges: Any, num_merges: Any, parts: Parts) -> list[list[Unit]]:
    """The units of one kernel's partial results, which are in the L2 cache; none if the program cuts no row."""
    if not parts.num_slots:
        return []
    spec = machine.spec
    counts = np.asarray(merges)[: int(num_merges[0]), MERGE_PARTS].tolist()
    slots = tuning.merging_ctas(machine.gpu)
    group = spec.num_query_heads // spec.num_kv_heads
    heads = combine.fewest_heads(group, spec.head_dim, parts.max_parts)
    of_all = num_merges[0], num_merges[1], spec.num_query_heads
    spread, together = (int(combine.trips(*of_all, n, spec.head_dim, slots)) for n in (heads, group))
    if spread >= together:
        heads = group
    at_once = combine.parts_at_once(heads, spec.head_dim)
    # One trip to the memory for the sums, and then those for the results.
    return [
        [
            Unit(bytes=0.0, alone_s=(1 - (-n // at_once)) * LATENCY_S)
            for n in counts
            for _ in range(spec.num_query_heads // heads)
        ]
    ]


def _merging(machine: Machine, kinds: list[list[Unit]]) -> Launch:
    """The one launch that merges the partial results of all kernels."""
    units = [unit for kind in kinds for unit in kind]
    slots = tuning.merging_ctas(machine.gpu)
    return Launch(units=units, slots=slots, start_s=CTA_START_S, between_s=0.0)


def table(machine: Machine) -> tuple[dict[str, Any], list[str]]:
    """The figures of all shapes, and their lines in Markdown."""
    micros = dict.fromkeys(("memory floor us", "limit us", "us"), ".1f")
    counts = dict.fromkeys(("units", "longest, blocks", "launches"), ">")
    columns = {"predicted by a model, one layer": "", **micros, "of the bandwidth": ".0%", **counts}
    table = Table({**columns, "short chunks not cut, us": ".1f"})
    figures = {}
    for name, rows in SHAPES.items():
        found = predict(machine, rows)
        whole = predict(machine, rows, cut=False) if any(query_len > 1 for query_len, _ in rows) else None
        figures[name] = vars(found) | {"share": found.share, "whole_s": whole.seconds if whole else None}
        times = [seconds * 1e6 for seconds in (found.floor_s, found.limit_s, found.seconds)]
        numbers = found.units, found.longest, found.launches
        table.row(name, *times, found.share, *numbers, whole and whole.seconds * 1e6)
    return figures, table.lines
