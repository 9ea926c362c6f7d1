"""Tile sizes per GPU: what fits its shared memory twice or more, so that one CTA's copies hide behind another's products.

Not measured on a chip: chosen by the compiler's register and shared-memory report (tests/pallas_kernels/gpu) and by the
memory budget of a block. `num_stages` and `block_kv` are the knobs to turn once a chip is at hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pallas_kernels.gpu.decode import DecodeTiles
from pallas_kernels.gpu.device import Gpu

if TYPE_CHECKING:
    from pallas_kernels.api import AttentionSpec


def decode_tiles(gpu: Gpu, spec: AttentionSpec) -> DecodeTiles:
    """64 keys per step; 32 where a multiprocessor has only 100 KiB and a head's tile is wide."""
    small = gpu.multiprocessor_shared_memory <= 100 * 1024 and spec.head_dim > 64
    return DecodeTiles(block_kv=32 if small else 64, num_stages=2, use_tma=gpu.has_tma)


def resident_decode_ctas(gpu: Gpu, spec: AttentionSpec) -> int:
    """How many CTAs of the decode kernel the chip runs at once, by shared memory (registers allow three or more)."""
    tiles = decode_tiles(gpu, spec)
    ring = 2 * tiles.num_stages * tiles.block_kv * spec.head_dim * 2
    reserved = 5 * 1024  # softmax tile, reductions, and what the driver takes
    return gpu.num_multiprocessors * min(3, gpu.multiprocessor_shared_memory // (ring + reserved))
