"""Block sizes of the TPU kernels: what fits, and a choice where nothing was tuned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips, tuning
from pallas_kernels.tpu import mixed_memory, paging
from pallas_kernels.tpu.decode import DecodeBlocks
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.tiles import MixedBlocks

DECODE_TURN_BYTES = 8 << 20  # K/V of one turn: enough to hide a copy's latency
UNKNOWN_PAGE_SIZE = 128  # tokens, on a generation that the table lacks: the middle one
LONGEST = 1 << 20  # tokens: no block is shortened for a sequence of so many
LARGEST_VMEM = max(chip.vmem_bytes for chip in chips.TPUS.values())


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    decode: DecodeBlocks
    mixed: MixedBlocks

    def validate(self, g: Geometry) -> None:
        """ValueError for sizes that do not fit together, or do not fit the heads."""
        mixed, queries = self.mixed, self.mixed.tile_queries(g)
        if mixed.q_block < queries or mixed.q_block % queries:
            raise ValueError(f"a block of queries is a multiple of a tile's: {mixed.q_block=} {queries=}")
        if mixed.kv_block < mixed.tile_tokens or mixed.kv_block % mixed.tile_tokens:
            raise ValueError(f"a KV block is a multiple of a tile: {mixed.kv_block=} {mixed.tile_tokens=}")
        if mixed.units_per_turn < 2 or mixed.units_per_turn % 2:
            raise ValueError(f"a turn takes an even number of units: {mixed.units_per_turn=}")
        if self.decode.items_per_turn < 1:
            raise ValueError(f"a turn takes at least one item: {self.decode.items_per_turn=}")
        for kv_block in (mixed.kv_block, self.decode.kv_block):
            if kv_block < 1 or kv_block & (kv_block - 1) or kv_block > paging.WINDOW * g.page_size:
                raise ValueError(
                    f"a KV block is a power of two of tokens in at most {paging.WINDOW} pages: {kv_block=} "
                    f"{g.page_size=}"
                )


def validate_memory(g: Geometry) -> None:
    """ValueError for heads whose blocks fit no chip's VMEM."""
    size = mixed_memory.vmem_bytes(g, _mixed(g, LONGEST // g.page_size))
    if size > LARGEST_VMEM:
        raise ValueError(
            f"the TPU kernel's blocks take {size >> 20} MiB of VMEM for {g.queries_per_plane} query rows in each of "
            f"{g.num_k_planes} planes of 128 lanes; a chip has {LARGEST_VMEM >> 20} MiB at most: split the heads over "
            f"more chips"
        )


def this_chip() -> str:
    """The generation that is compiled for, by its name in `chips`: the attached one, or that of the mesh."""
    return chips.tpu_name(pltpu.get_tpu_info().chip_version.value)


def default_page_size(chip: str | None) -> int:
    """Tokens, for a generation by its name in `chips`; None where there is none, as on a CPU."""
    return chips.TPUS[chip].page_size if chip in chips.TPUS else UNKNOWN_PAGE_SIZE


def choose(g: Geometry, pages_per_seq: int, chip: str | None = None) -> BlockSizes:
    """The tuned sizes of `chip` (a name in `chips`) where there are some, otherwise by rule."""
    tuned = {} if chip is None else tuning.lookup(chip, key(g)) or {}
    decode, mixed = _decode(g, pages_per_seq), _mixed(g, pages_per_seq)
    if "decode" in tuned:
        decode = _shorten(DecodeBlocks(**tuned["decode"]), g, pages_per_seq)
    if "mixed" in tuned:
        mixed = _shorten(MixedBlocks(**tuned["mixed"]), g, pages_per_seq)
    return BlockSizes(decode=decode, mixed=mixed)


def key(g: Geometry) -> str:
    """What tuned sizes depend on."""
    return f"planes={g.num_planes} k_planes={g.num_k_planes} queries={g.queries_per_plane} packing={g.packing}"


def _shorten[Blocks: (DecodeBlocks, MixedBlocks)](blocks: Blocks, g: Geometry, pages_per_seq: int) -> Blocks:
    """No block longer than the longest sequence needs, and no more units in a turn than there are in a block."""
    kv_block = _kv_block(blocks.kv_block, g, pages_per_seq)
    if isinstance(blocks, DecodeBlocks):
        return replace(blocks, kv_block=kv_block)
    q_block = max(blocks.tile_queries(g), min(blocks.q_block, kv_block))
    shorter = replace(blocks, q_block=q_block, kv_block=kv_block, tile_tokens=min(blocks.tile_tokens, kv_block))
    units = g.num_k_planes * shorter.max_q_tiles(g) * (kv_block // shorter.tile_tokens)
    return replace(shorter, units_per_turn=min(blocks.units_per_turn, units + units % 2))


def _decode(g: Geometry, pages_per_seq: int) -> DecodeBlocks:
    # With few planes an item is little work, and its fixed costs weigh more: longer items, more of them.
    kv_block = _kv_block(512 if g.num_planes > 4 else 1024, g, pages_per_seq)
    item_bytes = g.num_planes * (kv_block // g.packing) * LANES * 4
    return DecodeBlocks(kv_block=kv_block, items_per_turn=max(1, min(8, DECODE_TURN_BYTES // item_bytes)))


def _mixed(g: Geometry, pages_per_seq: int) -> MixedBlocks:
    # Powers of two of tokens, so that whole tiles fill a block of queries; two tiles where they are little work.
    tile_queries, tiles = 128, 2 if g.num_k_planes <= 4 else 1
    while tile_queries < 512 and tile_queries * g.queries_per_plane < 1024:
        tile_queries *= 2
    sizes = MixedBlocks(
        q_block=tiles * tile_queries,
        kv_block=1024,
        tile_rows=tile_queries * g.queries_per_plane,
        tile_tokens=256,
        units_per_turn=8,
    )
    return _shorten(sizes, g, pages_per_seq)


def _kv_block(wanted: int, g: Geometry, pages_per_seq: int) -> int:
    """A power of two between one register tile's lanes and `wanted`, no longer than the longest sequence needs.

    All its pages are named by one window of the page table."""
    longest = g.page_size * pages_per_seq
    size = 128
    while size < min(wanted, longest, paging.WINDOW * g.page_size):
        size *= 2
    return size
