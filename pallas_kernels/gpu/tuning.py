"""Tile sizes per GPU: they fit its shared memory and registers, without spills.

They are not measured on a chip. They are chosen by the compiler's register and shared-memory report
(tests/pallas_kernels/gpu) and by the memory budget of a block. `block_kv` and `num_stages` should be tuned on a chip.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.chips import KIB
from pallas_kernels.gpu.decode import RingTiles
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.prefill_hopper import COMPUTE_WARPGROUPS, PrefillTiles
from pallas_kernels.gpu.prefill_tile import TILE_M, TileShape
from pallas_kernels.spec import AttentionSpec


def decode_tiles(gpu: Gpu, spec: AttentionSpec) -> RingTiles:
    """64 keys per step; 32 where a multiprocessor has only 100 KiB and a head's tile is wide."""
    small = gpu.multiprocessor_shared_memory <= 100 * KIB and spec.head_dim > 64
    return RingTiles(block_kv=32 if small else 64, num_stages=2, use_tma=gpu.has_tma)


def resident_decode_ctas(gpu: Gpu, spec: AttentionSpec) -> int:
    """CTAs of the decode kernel that the chip runs at once, by shared memory and by registers."""
    is_wide_int8 = jnp.dtype(spec.kv_dtype) == jnp.int8 and spec.head_dim > 64
    by_registers = 2 if is_wide_int8 else 3  # or more
    reserved = 6 * KIB  # softmax tile, reductions, and the driver's part
    cta_bytes = _kv_bytes(decode_tiles(gpu, spec), spec) + reserved
    return gpu.num_multiprocessors * min(by_registers, gpu.multiprocessor_shared_memory // cta_bytes)


def _kv_bytes(tiles: RingTiles, spec: AttentionSpec) -> int:
    """Shared memory of the ring's tiles and, for 8-bit pages, of the converted ones."""
    per_element = tiles.num_stages * jnp.dtype(spec.kv_dtype).itemsize + (2 if spec.has_kv_scales else 0)
    return 2 * tiles.block_kv * spec.head_dim * per_element


def hopper_prefill_tiles(spec: AttentionSpec) -> PrefillTiles:
    """128 keys per step, as large as the registers allow."""
    return PrefillTiles(block_kv=128, num_stages=2 if spec.head_dim > 64 else 3)


def mma_prefill_tiles(gpu: Gpu, spec: AttentionSpec) -> RingTiles:
    """64 keys per step. 32 with wide heads, except on Blackwell, where 64 do not spill either; and 32 where a
    multiprocessor has only 100 KiB, which then holds two CTAs with narrow heads."""
    small = gpu.multiprocessor_shared_memory <= 100 * KIB
    narrow = small or (spec.head_dim > 64 and gpu.arch[0] != 10)
    return RingTiles(block_kv=32 if narrow else 64, num_stages=2, use_tma=gpu.has_tma)


def prefill_tile_tokens(gpu: Gpu, spec: AttentionSpec) -> int:
    """Tokens that one CTA takes at a time."""
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
