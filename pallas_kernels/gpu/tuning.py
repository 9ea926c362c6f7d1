"""Tile sizes per GPU: they fit its shared memory and registers, without spills.

They were not tuned on a chip, and are chosen by the compiler's register and shared-memory report
(tests/pallas_kernels/gpu) and by the memory budget of a block. `block_kv` and `num_stages` should be tuned on a chip.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.chips import KIB, MIB
from pallas_kernels.gpu.decode import TILE_M as DECODE_ROWS
from pallas_kernels.gpu.decode import RingTiles
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_hopper import PrefillTiles
from pallas_kernels.gpu.prefill_memory import COMPUTE_WARPGROUPS
from pallas_kernels.gpu.prefill_tile import TILE_M, TileShape
from pallas_kernels.gpu.tile_list import TOKEN_ALIGNMENT
from pallas_kernels.spec import AttentionSpec

PARTIAL_RESULTS_BYTES = 64 * MIB  # of one kernel and layer: of prefill, 8,192 tokens of Llama 3 8B's heads


def decode_tiles(gpu: Gpu, spec: AttentionSpec) -> RingTiles:
    """64 keys per step; 32 where a multiprocessor has only 100 KiB and a head's tile is wide."""
    small = gpu.multiprocessor_shared_memory <= 100 * KIB and spec.head_dim > 64
    return RingTiles(block_kv=32 if small else 64, num_stages=2, use_tma=gpu.has_tma)


def decode_ctas(gpu: Gpu, spec: AttentionSpec) -> int:
    """Persistent CTAs of the decode kernel: as many as the chip runs at once, by shared memory and by registers."""
    # On a B200 some forms with wide heads take 175 registers; on the other chips only those with int8 take so many.
    takes_many = gpu.arch[0] == 10 or jnp.dtype(spec.kv_dtype) == jnp.int8
    by_registers = 2 if takes_many and spec.head_dim > 64 else 3  # or more
    result = 4 * DECODE_ROWS * spec.head_dim
    cta_bytes = _kv_bytes(decode_tiles(gpu, spec), spec) + result + 3 * KIB  # reductions and the driver's part
    return gpu.num_multiprocessors * min(by_registers, gpu.multiprocessor_shared_memory // cta_bytes)


MIN_DECODE_KEYS = 384  # of a part: by the model of scripts/lab/accounts/gpu_prediction.py, for the shapes there
LONG_DECODE_KEYS, MIN_LONG_DECODE_KEYS = 16384, 256  # of a long row, and of its parts
MAX_DECODE_PARTS = 192  # of a row: merging more takes longer than it gains, by the same model


def decode_parts(gpu: Gpu, spec: AttentionSpec, *, num_rows: int, max_keys: int) -> Parts:
    """How decodes are cut in a program of `num_rows` rows. `max_keys`: the most keys of a row."""
    of_a_chip = min(decode_ctas(gpu, spec) // spec.num_kv_heads, MAX_DECODE_PARTS)
    of_a_row = max_keys // (MIN_DECODE_KEYS if max_keys < LONG_DECODE_KEYS else MIN_LONG_DECODE_KEYS)
    max_parts = min(of_a_chip, of_a_row)
    if max_parts < 2:
        return NO_PARTS
    slots = min(num_rows * max_parts, PARTIAL_RESULTS_BYTES // (4 * spec.num_query_heads * spec.head_dim))
    return Parts(
        max_parts=max_parts, min_keys=MIN_DECODE_KEYS, max_slots=slots, long_row=LONG_DECODE_KEYS,
        min_keys_of_long=MIN_LONG_DECODE_KEYS,
    )  # fmt: skip


def _kv_bytes(tiles: RingTiles, spec: AttentionSpec) -> int:
    """Shared memory of the ring's tiles and, for 8-bit pages, of the converted ones."""
    per_element = tiles.num_stages * jnp.dtype(spec.kv_dtype).itemsize + (2 if spec.has_kv_scales else 0)
    return 2 * tiles.block_kv * spec.head_dim * per_element


def hopper_prefill_tiles(spec: AttentionSpec) -> PrefillTiles:
    """64 keys per step: the scores of two blocks, the weights of two and the accumulator fit into the registers."""
    if spec.has_kv_scales:
        return PrefillTiles(block_kv=64, num_stages=3)  # of blocks that have been converted
    return PrefillTiles(block_kv=64, num_stages=4 if spec.head_dim > 64 else 6)


def mma_prefill_tiles(gpu: Gpu, spec: AttentionSpec) -> RingTiles:
    """64 keys per step. 32 with wide heads, except on Blackwell, where 64 do not spill either; and 32 where a
    multiprocessor has only 100 KiB, which then holds two CTAs with narrow heads."""
    small = gpu.multiprocessor_shared_memory <= 100 * KIB
    narrow = small or (spec.head_dim > 64 and gpu.arch[0] != 10)
    return RingTiles(block_kv=32 if narrow else 64, num_stages=2, use_tma=gpu.has_tma)


def prefill_tile_tokens(gpu: Gpu, spec: AttentionSpec) -> int:
    """The number of tokens that one CTA takes at a time."""
    tokens = TileShape(spec.num_query_heads // spec.num_kv_heads).tokens
    return tokens * COMPUTE_WARPGROUPS if gpu.has_wgmma else tokens


def prefill_ctas(gpu: Gpu, spec: AttentionSpec) -> int:
    """Persistent CTAs: as many as the chip runs at once. More would run in a second, nearly empty wave."""
    if gpu.has_wgmma:
        return gpu.num_multiprocessors  # three warpgroups take all registers
    tiles = mma_prefill_tiles(gpu, spec)
    queries_and_softmax = 2 * TILE_M * (spec.head_dim + tiles.block_kv)
    cta_bytes = _kv_bytes(tiles, spec) + queries_and_softmax + 3 * KIB  # reductions and the driver's part
    by_shared_memory = gpu.multiprocessor_shared_memory // cta_bytes
    return gpu.num_multiprocessors * min(2, by_shared_memory)  # two by registers: up to 255 per thread


LONG_PREFILL_KEYS = 4096  # of a row whose parts may have half as many keys, by the same model


def prefill_parts(gpu: Gpu, spec: AttentionSpec, *, num_rows: int, num_tokens: int, max_keys: int) -> Parts:
    """How rows with few queries are cut in a program of `num_rows` rows and `num_tokens` tokens. `max_keys`: the most
    keys of a row."""
    shape = TileShape(spec.num_query_heads // spec.num_kv_heads)
    # A partial result is written and read once, 16 bits each. This is at most an eighth of the part's keys and values,
    # and a quarter in long rows.
    tile_rows = TILE_M * (COMPUTE_WARPGROUPS if gpu.has_wgmma else 1)
    min_keys = tile_rows * 16 // jnp.dtype(spec.kv_dtype).itemsize
    units = spec.num_kv_heads * shape.tiles_per_group
    of_a_row = max_keys // (min_keys if max_keys < LONG_PREFILL_KEYS else min_keys // 2)
    max_parts = min(prefill_ctas(gpu, spec) // units, of_a_row)
    if max_parts < 2:
        return NO_PARTS
    needed = max_parts * (num_tokens + 2 * TOKEN_ALIGNMENT * min(num_rows, num_tokens))
    slots = min(needed, PARTIAL_RESULTS_BYTES // (2 * spec.num_query_heads * spec.head_dim))
    return Parts(
        max_parts=max_parts, min_keys=min_keys, max_slots=slots // TOKEN_ALIGNMENT * TOKEN_ALIGNMENT,
        long_row=LONG_PREFILL_KEYS, min_keys_of_long=min_keys // 2,
    )  # fmt: skip


def prefill_block_kv(gpu: Gpu, spec: AttentionSpec) -> int:
    """Keys per step of the prefill kernel that the chip runs."""
    return hopper_prefill_tiles(spec).block_kv if gpu.has_wgmma else mma_prefill_tiles(gpu, spec).block_kv


def merging_ctas(gpu: Gpu) -> int:
    """Persistent CTAs that merge partial results: as many as the chip runs at once, by registers."""
    return 3 * gpu.num_multiprocessors
