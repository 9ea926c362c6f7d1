"""Block sizes of the TPU kernels: the tuned ones, a rule for all other cases, and the limits of both."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import chips, tuning
from pallas_kernels.errors import UnavailableError
from pallas_kernels.tpu import decode_memory, mixed_memory, paging
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.layout import LANES, Geometry
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks

DECODE_TURN_BYTES = 8 << 20  # K/V of one turn: enough to hide a copy's latency
UNKNOWN_PAGE_SIZE = 128  # tokens, on a generation that is not in the table: the table's middle value
FEW_TILE_TOKENS = 1024  # KV tokens that are computed on at a time, where every row has few queries
SLOTS = (4, 8, 16)  # queries of a row that are computed at a time, where every row has few
# Query rows of a tile. A larger one spills in a quarter of its bundles: where VMEM is short, tiles of half the rows
# take less time than a block of half the queries (scripts/lab/results/2026-11-25-spills.md).
LARGEST_TILE = 2304
LONGEST = 1 << 20  # tokens: no block is shortened for a sequence of this length
SMALLEST_VMEM = min(chip.vmem_bytes for chip in chips.TPUS.values())


@dataclass(frozen=True, kw_only=True)
class BlockSizes:
    """The block sizes of both kernels."""

    decode: DecodeBlocks
    mixed: MixedBlocks | FewBlocks

    def validate(self, g: Geometry) -> None:
        """Raises ValueError if the sizes do not fit each other or the heads."""
        mixed = self.mixed
        queries = mixed.slots if isinstance(mixed, FewBlocks) else mixed.tile_queries(g)
        if mixed.q_block < queries or mixed.q_block % queries:
            raise ValueError(f"a block of queries is a multiple of a tile's: {mixed.q_block=} {queries=}")
        if isinstance(mixed, FewBlocks):
            if mixed.slots not in SLOTS:
                raise ValueError(f"a chunk has {SLOTS} slots: {mixed.slots=}")
        elif mixed.units_per_turn < 2 or mixed.units_per_turn % 2:
            raise ValueError(f"a turn takes an even number of units: {mixed.units_per_turn=}")
        if mixed.q_block % g.token_tile:
            raise ValueError(f"a block of queries is a multiple of a tile of tokens: {mixed.q_block=} {g.token_tile=}")
        if mixed.kv_block < mixed.tile_tokens or mixed.kv_block % mixed.tile_tokens:
            raise ValueError(f"a KV block is a multiple of a tile: {mixed.kv_block=} {mixed.tile_tokens=}")
        if self.decode.items_per_turn < 1:
            raise ValueError(f"a turn takes at least one item: {self.decode.items_per_turn=}")
        for kv_block in (mixed.kv_block, self.decode.kv_block):
            if kv_block < 1 or kv_block & (kv_block - 1) or kv_block > paging.WINDOW * g.page_size:
                raise ValueError(
                    f"a KV block is a power of two of tokens in at most {paging.WINDOW} pages: {kv_block=} "
                    f"{g.page_size=}"
                )


def validate_memory(g: Geometry) -> None:
    """Raises UnavailableError if, with these heads, even the smallest blocks do not fit every chip's VMEM."""
    choose(g, LONGEST // g.page_size)


def this_chip() -> str:
    """The generation to compile for, by its name in `chips`: the mesh's, or the attached one."""
    return chips.tpu_name(pltpu.get_tpu_info().chip_version.value)


def default_page_size(chip: str | None) -> int:
    """Tokens of a page on a generation, by its name in `chips`; None: there is no TPU, as on a CPU."""
    return chips.TPUS[chip].page_size if chip in chips.TPUS else UNKNOWN_PAGE_SIZE


def choose(
    g: Geometry, pages_per_seq: int, chip: str | None = None, *, max_decodes: int = 1, spec_decode: int = 0
) -> BlockSizes:
    """The tuned sizes of `chip` (a name in `chips`) if there are any, otherwise sizes by rule.

    `spec_decode`: tokens of a row, if every row has a few; the mixed kernel then computes so many at a time. 0: rows
    have any number.

    Raises:
        UnavailableError: the chip's VMEM does not hold such blocks, or the rows of `max_decodes` decodes. A chip that
            is not in the table is assumed to have the smallest VMEM.
    """
    tuned = {} if chip is None else tuning.lookup(chip, key(g)) or {}
    vmem = chips.TPUS[chip].vmem_bytes if chip in chips.TPUS else SMALLEST_VMEM
    decode, mixed = _decode(g, pages_per_seq), _mixed(g, pages_per_seq, vmem, spec_decode)
    if "decode" in tuned:
        decode = _shorten(DecodeBlocks(**tuned["decode"]), g, pages_per_seq)
    if "mixed" in tuned and not spec_decode:
        mixed = _shorten(MixedBlocks(**tuned["mixed"]), g, pages_per_seq)
    needed = decode_memory.vmem_bytes(g, decode, decode_memory.max_rows(g, max_decodes))
    if needed > vmem:
        raise UnavailableError(
            f"the TPU decode kernel takes {needed >> 20} MiB of VMEM for {max_decodes} rows, {g.queries_per_plane} "
            f"query rows in each of {g.num_k_planes} planes of 128 lanes, and the chip has {vmem >> 20} MiB: take "
            f"fewer sequences in a step, or split the heads over more chips"
        )
    return BlockSizes(decode=decode, mixed=mixed)


def key(g: Geometry) -> str:
    """The key of tuned sizes: everything that they depend on."""
    return f"planes={g.num_planes} k_planes={g.num_k_planes} queries={g.queries_per_plane} packing={g.kv_packing}"


def _shorten[Blocks: (DecodeBlocks, MixedBlocks)](blocks: Blocks, g: Geometry, pages_per_seq: int) -> Blocks:
    """Limits blocks to the length that the longest sequence needs, and the units of a turn to those of a block."""
    kv_block = _kv_block(blocks.kv_block, g, pages_per_seq)
    if isinstance(blocks, DecodeBlocks):
        return replace(blocks, kv_block=kv_block)
    q_block = max(blocks.tile_queries(g), min(blocks.q_block, kv_block))
    shorter = replace(blocks, q_block=q_block, kv_block=kv_block, tile_tokens=min(blocks.tile_tokens, kv_block))
    units = g.num_k_planes * shorter.max_q_tiles(g) * (kv_block // shorter.tile_tokens)
    return replace(shorter, units_per_turn=min(blocks.units_per_turn, units + units % 2))


def _decode(g: Geometry, pages_per_seq: int) -> DecodeBlocks:
    # With few planes an item is little work next to its fixed costs, so items are longer.
    tokens = 512 if g.num_planes > 4 else 1024
    kv_block = _kv_block(2 * tokens if g.kv_dtype.itemsize == 1 else tokens, g, pages_per_seq)  # int8: as many bytes
    token_bytes = g.num_planes * LANES * 4 // g.kv_packing
    while kv_block > LANES and kv_block * token_bytes > DECODE_TURN_BYTES:
        kv_block //= 2
    items = DECODE_TURN_BYTES // (kv_block * token_bytes)
    return DecodeBlocks(kv_block=kv_block, items_per_turn=max(1, min(8, items)))


def _mixed(g: Geometry, pages_per_seq: int, vmem: int, spec_decode: int) -> MixedBlocks | FewBlocks:
    """The largest blocks of the rule with which the mixed kernel takes at most `vmem` bytes."""
    if spec_decode:
        return _of_spec_decode(g, pages_per_seq, vmem, spec_decode)
    # Powers of two of tokens, so whole tiles fill a block of queries. Two tiles if one is little work.
    tile_queries, tiles = 128, 2 if g.num_k_planes <= 4 else 1
    while tile_queries < 512 and 2 * tile_queries * g.queries_per_plane <= 1024:
        tile_queries *= 2
    sizes = MixedBlocks(
        q_block=tiles * tile_queries,
        kv_block=1024,
        tile_rows=tile_queries * g.queries_per_plane,
        tile_tokens=256,
        units_per_turn=8,
    )
    return _fitting(sizes, g, pages_per_seq, vmem)


def _of_spec_decode(g: Geometry, pages_per_seq: int, vmem: int, queries: int) -> FewBlocks:
    """Blocks of queries that hold a row of up to `token_tile` tokens wherever it begins in a tile of tokens."""
    kv_block = _kv_block(2048, g, pages_per_seq)
    sizes = FewBlocks(
        q_block=2 * g.token_tile,
        kv_block=kv_block,
        tile_tokens=min(FEW_TILE_TOKENS, kv_block),
        slots=next((slots for slots in SLOTS if slots >= queries), SLOTS[-1]),
    )
    while (needed := mixed_memory.vmem_bytes(g, sizes)) > vmem and sizes.kv_block > LANES:
        kv_block = sizes.kv_block // 2
        sizes = replace(sizes, kv_block=kv_block, tile_tokens=min(sizes.tile_tokens, kv_block))
    if needed > vmem:
        raise _too_large(needed, g, vmem)
    return sizes


def _too_large(needed: int, g: Geometry, vmem: int) -> UnavailableError:
    return UnavailableError(
        f"the TPU kernel's smallest blocks take {needed >> 20} MiB of VMEM for {g.queries_per_plane} query "
        f"rows in each of {g.num_k_planes} planes of 128 lanes, and the chip has {vmem >> 20} MiB: split the "
        f"heads over more chips"
    )


def _fitting(sizes: MixedBlocks, g: Geometry, pages_per_seq: int, vmem: int) -> MixedBlocks:
    """These blocks, or the next smaller ones with which the mixed kernel takes at most `vmem` bytes."""
    while (needed := mixed_memory.vmem_bytes(g, sizes)) > vmem:
        smaller = _smaller(sizes, g)
        if smaller == sizes:
            raise _too_large(needed, g, vmem)
        sizes = smaller
    return _shorten(sizes, g, pages_per_seq)


def _smaller(blocks: MixedBlocks, g: Geometry) -> MixedBlocks:
    """The next smaller blocks, or the same if there are none. Halves a tile of more than `LARGEST_TILE` rows.

    Then lowers a block of queries to one tile, then the tile's tokens, then its queries (their rows stay a multiple of
    128), then the KV block.
    """
    queries = blocks.tile_queries(g)
    if blocks.tile_rows > LARGEST_TILE and queries > 1 and blocks.tile_rows % (2 * LANES) == 0:
        return replace(blocks, tile_rows=blocks.tile_rows // 2)
    if blocks.q_block > max(queries, g.token_tile):
        return replace(blocks, q_block=max(queries, g.token_tile))
    if blocks.tile_tokens > LANES:
        return replace(blocks, tile_tokens=LANES)
    if queries > 1 and blocks.tile_rows % (2 * LANES) == 0:
        return replace(blocks, q_block=max(queries // 2, g.token_tile), tile_rows=blocks.tile_rows // 2)
    if blocks.kv_block > 2 * LANES:
        return replace(blocks, kv_block=blocks.kv_block // 2)
    return blocks


def _kv_block(wanted: int, g: Geometry, pages_per_seq: int) -> int:
    """A power of two between one register tile's lanes and `wanted`, no longer than the longest sequence needs.

    All its pages are named by one window of the page table."""
    longest = g.page_size * pages_per_seq
    size = 128
    while size < min(wanted, longest, paging.WINDOW * g.page_size):
        size *= 2
    return size
