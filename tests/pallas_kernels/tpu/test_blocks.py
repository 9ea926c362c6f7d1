"""Block sizes: those tuned, and the rule for everything else."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.chips import TPUS, tpu_name
from pallas_kernels.layout import default_page_size
from pallas_kernels.spec import AttentionSpec, Backend
from pallas_kernels.tpu import blocks, decode_memory, layout, mixed_memory
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.entries import entry_at
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks, Tiles

CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
LONG = 1024  # pages per sequence: no block is shortened


def geometry(
    num_query_heads: int, num_kv_heads: int, head_dim: int, dtype: object = jnp.bfloat16, kv_dtype: object = None
) -> layout.Geometry:
    spec = AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=128,
        dtype=dtype,
        kv_dtype=kv_dtype or dtype,
    )
    return layout.geometry(spec)


GEOMETRIES = [
    geometry(kv_heads * group, kv_heads, head_dim, dtype)
    for head_dim in (64, 128)
    for kv_heads in range(1, 9)
    for group in (1, 2, 3, 4, 5, 6, 7, 8, 16)
    for dtype in (jnp.bfloat16, jnp.float32)
]


def files() -> list[str]:
    return sorted(path.stem for path in tuning.FOLDER.glob("*.json"))


def test_every_file_is_named_after_a_chip_of_the_table() -> None:
    assert set(files()) <= set(TPUS)


def test_every_chip_of_the_table_is_one_that_jax_and_libtpu_name() -> None:
    assert {tpu_name(version.value) for version in pltpu.ChipVersion} >= set(TPUS) == set(CHIPS)


@pytest.mark.parametrize("chip", files())
def test_every_tuned_entry_is_reached_by_a_lookup(chip: str) -> None:
    reached = {}
    for g in GEOMETRIES:
        reached[blocks.key(g)] = blocks.choose(g, LONG, chip)
    for name, sizes in tuning.entries(chip).items():
        found = reached[name]
        for variant, fields in sizes.items():
            assert vars(getattr(found, variant)) == fields


@pytest.mark.parametrize("chip", files())
def test_the_llama_shapes_are_tuned(chip: str) -> None:
    shapes = {heads: blocks.key(geometry(*heads)) for heads in ((32, 8, 64), (24, 8, 128), (32, 8, 128), (8, 1, 128))}
    assert set(shapes.values()) == set(tuning.entries(chip))


def test_a_miss_takes_the_rule() -> None:
    g = geometry(40, 8, 128)
    assert blocks.choose(g, LONG, "v6e") == blocks.choose(g, LONG) == blocks.choose(g, LONG, "unheard of")


@pytest.mark.parametrize("chip", [None, *CHIPS])
def test_sizes_fit_together(chip: str | None) -> None:
    for g in GEOMETRIES:
        for pages_per_seq in (1, 3, LONG):
            sizes = blocks.choose(g, pages_per_seq, chip)
            sizes.validate(g)
            mixed = sizes.mixed
            assert mixed.q_block * g.queries_per_plane % mixed.tile_rows == 0
            assert mixed.tile_rows % 128 == mixed.tile_tokens % 128 == 0
            assert mixed.kv_block % mixed.tile_tokens == mixed.units_per_turn % 2 == 0
            for size in (mixed.tile_queries(g), mixed.tile_tokens, mixed.kv_block, sizes.decode.kv_block):
                assert size & (size - 1) == 0
            # A block's pages are named by one window of the page table.
            assert max(mixed.kv_block, sizes.decode.kv_block) <= 128 * g.page_size


@pytest.mark.parametrize(("queries", "slots"), [(1, 4), (4, 4), (5, 8), (16, 16), (40, 16)])
def test_rows_of_spec_decode_take_slots_for_them(queries: int, slots: int) -> None:
    """A row of 16 tokens fits its block of queries wherever it begins."""
    for g in GEOMETRIES:
        for chip in (None, *CHIPS):
            sizes = blocks.choose(g, LONG, chip, spec_decode=queries)
            sizes.validate(g)
            assert isinstance(sizes.mixed, FewBlocks)
            assert sizes.mixed.slots == slots
            assert sizes.mixed.q_block >= 2 * g.token_tile
            assert sizes.mixed.group_rows(g) % 16 == 0
            capacity = TPUS[chip].vmem_bytes if chip else 64 << 20
            assert mixed_memory.vmem_bytes(g, sizes.mixed) <= capacity


def test_slots_that_no_register_has_are_refused() -> None:
    g = geometry(32, 8, 128)
    sizes = blocks.choose(g, LONG, spec_decode=4)
    with pytest.raises(ValueError, match="slots"):
        replace(sizes, mixed=replace(sizes.mixed, slots=2)).validate(g)


@pytest.mark.parametrize("chip", [None, *CHIPS])
@pytest.mark.parametrize(
    ("num_kv_heads", "group", "head_dim"),
    [(8, 16, 128), (8, 17, 128), (1, 71, 128), (2, 128, 128), (8, 64, 64), (16, 24, 128), (32, 16, 128), (1, 256, 128)],
)
def test_blocks_of_large_groups_fit_the_chip(num_kv_heads: int, group: int, head_dim: int, chip: str | None) -> None:
    g = geometry(num_kv_heads * group, num_kv_heads, head_dim)
    sizes = blocks.choose(g, LONG, chip)
    sizes.validate(g)
    assert sizes.mixed.tile_rows % 128 == 0
    capacity = TPUS[chip].vmem_bytes if chip else 64 << 20
    assert mixed_memory.vmem_bytes(g, sizes.mixed) <= capacity
    assert decode_memory.vmem_bytes(g, sizes.decode, 64) <= capacity


def test_smaller_blocks_are_taken_only_where_the_rule_s_do_not_fit() -> None:
    """18 query heads in each of 8 planes take 71 MiB by the rule: they fit a v6e, and not a v5p."""
    g = geometry(144, 8, 128)
    large, small = blocks.choose(g, LONG, "v6e").mixed, blocks.choose(g, LONG, "v5p").mixed
    assert mixed_memory.vmem_bytes(g, large) > TPUS["v5p"].vmem_bytes
    assert (large.tile_tokens, small.tile_tokens) == (256, 128)
    assert large.tile_rows == small.tile_rows == 2304


def test_where_vmem_is_short_a_large_tile_is_halved_before_the_block_of_queries() -> None:
    """24 query rows in each of 4 planes: a tile of 3,072 rows spills most, and does not fit a tpu7x."""
    g = geometry(96, 8, 64)
    fits, halved = blocks.choose(g, LONG, "v6e").mixed, blocks.choose(g, LONG, "tpu7x").mixed
    assert (fits.q_block, fits.tile_rows) == (256, 3072)
    assert (halved.q_block, halved.tile_rows) == (256, 1536)


def test_heads_that_fit_no_block_are_refused_at_once() -> None:
    """An odd group: a tile of fewer queries would not fill whole registers."""
    with pytest.raises(
        ValueError, match=r"smallest blocks take \d+ MiB of VMEM for 71 query rows in each of 64 planes"
    ):
        blocks.validate_memory(geometry(64 * 71, 64, 128))


def test_more_decodes_than_vmem_holds_are_refused_at_once() -> None:
    g = geometry(64 * 16, 64, 128)
    blocks.choose(g, LONG, "v6e", max_decodes=64)
    with pytest.raises(ValueError, match=r"decode kernel takes \d+ MiB of VMEM for 512 rows.*take fewer sequences"):
        blocks.choose(g, LONG, "v6e", max_decodes=512)


def test_pages_by_generation() -> None:
    """More bandwidth, larger pages; on a CPU, which has no generation, and for a new one the middle size."""
    assert [default_page_size(Backend.TPU, 8192, chip) for chip in CHIPS] == [64, 256, 128, 256]
    assert default_page_size(Backend.TPU_INTERPRET, 8192) == default_page_size(Backend.TPU, 8192, "v9") == 128


def test_blocks_are_no_longer_than_the_longest_sequence_needs() -> None:
    g = geometry(32, 8, 128)
    assert blocks.choose(g, 2).decode.kv_block == blocks.choose(g, 2).mixed.kv_block == 256
    assert blocks.choose(g, 1).decode.kv_block == 128


def test_a_turn_has_no_more_units_than_a_block() -> None:
    """One plane, one page: one tile of queries against one of tokens, and a turn's units are even."""
    g = geometry(8, 1, 128)
    assert blocks.choose(g, 1).mixed.q_block == 128
    assert blocks.choose(g, 1).mixed.units_per_turn == 2
    assert blocks.choose(g, LONG).mixed.units_per_turn == 8


@pytest.mark.parametrize("tile_rows", [128, 1024, 6 * 3])
def test_a_tile_that_cuts_a_token_s_queries_apart_is_refused(tile_rows: int) -> None:
    sizes = MixedBlocks(q_block=64, kv_block=256, tile_rows=tile_rows, tile_tokens=128, units_per_turn=2)
    with pytest.raises(ValueError, match="a tile holds a power of two of queries"):
        sizes.tile_queries(geometry(6, 2, 64))


@pytest.mark.parametrize("group", [5, 17])
def test_given_sizes_that_do_not_suit_the_heads_are_refused_before_anything_is_traced(group: int) -> None:
    sizes = blocks.BlockSizes(
        decode=DecodeBlocks(kv_block=128, items_per_turn=2),
        mixed=MixedBlocks(q_block=64, kv_block=256, tile_rows=128, tile_tokens=128, units_per_turn=2),
    )
    g = geometry(group, 1, 128)
    with pytest.raises(ValueError, match=f"tile_rows=128 g.queries_per_plane={g.queries_per_plane}"):
        sizes.validate(g)
    sizes.validate(geometry(4, 1, 128))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_block": 96}, r"mixed\.q_block=96 queries=64"),
        ({"q_block": 8, "tile_rows": 16}, r"mixed\.q_block=8 g\.token_tile=16"),
        ({"kv_block": 64}, r"mixed\.kv_block=64 mixed\.tile_tokens=128"),
        ({"kv_block": 384}, r"kv_block=384"),
        ({"units_per_turn": 3}, r"mixed\.units_per_turn=3"),
        ({"items_per_turn": 0}, r"items_per_turn=0"),
        ({"decode_block": 200}, r"kv_block=200 g\.page_size=128"),
    ],
)
def test_sizes_that_do_not_fit_together_are_refused(changes: dict[str, int], message: str) -> None:
    usual = {"q_block": 64, "kv_block": 256, "tile_rows": 128, "tile_tokens": 128, "units_per_turn": 2}
    fields = usual | {"decode_block": 128, "items_per_turn": 2} | changes
    decode = DecodeBlocks(kv_block=fields.pop("decode_block"), items_per_turn=fields.pop("items_per_turn"))
    with pytest.raises(ValueError, match=message):
        blocks.BlockSizes(decode=decode, mixed=MixedBlocks(**fields)).validate(geometry(2, 1, 128))


def test_masks_by_hand() -> None:
    """Tiles of 128 queries and 256 tokens, phase 0: a mask each for distances 0 and 128; from 255 on none is needed."""
    g = geometry(64, 8, 128)
    sizes = MixedBlocks(q_block=256, kv_block=512, tile_rows=1024, tile_tokens=256, units_per_turn=2)
    tiles = Tiles.of(g, sizes, num_q=jnp.int32(256), position=jnp.int32(256))
    assert int(tiles.mask_phase) == 127
    assert [int(tiles.num_seen(t)) for t in range(2)] == [2, 2]
    masks = {(t, h): int(tiles.mask(t, h)) for t in range(2) for h in range(2)}
    assert masks[0, 0] == masks[1, 0] == 0
    assert [int(tiles.distance(masks[t, 1])) for t in range(2)] == [0, 128]
    assert max(masks.values()) < sizes.num_masks(g)


def test_units_in_order() -> None:
    """A KV block that begins 100 tokens behind the first query: the first tile of queries sees nothing of it."""
    g = geometry(16, 2, 128)
    sizes = MixedBlocks(q_block=256, kv_block=512, tile_rows=512, tile_tokens=128, units_per_turn=2)
    tiles = Tiles.of(g, sizes, num_q=jnp.int32(256), position=jnp.int32(-100))
    seen, unit = [], tiles.first
    while int(unit[0]) < g.num_k_planes:
        seen.append(tuple(int(i) for i in unit))
        unit = tiles.after(unit)
    by_plane = [(1, 0), (2, 0), (3, 0), (3, 1)]  # ends 28, 92 and 156 tokens into the block
    assert seen == [(p, q, kv) for p in range(2) for q, kv in by_plane]
    assert len(seen) == int(tiles.count)


def test_entries_in_order() -> None:
    """The example of `entries`: 600 tokens to 900 older ones, then a whole prompt of 200."""
    g = geometry(32, 8, 128)
    sizes = MixedBlocks(q_block=512, kv_block=1024, tile_rows=1024, tile_tokens=256, units_per_turn=2)
    kv_lens, query_starts = jnp.array([1500, 200]), jnp.array([3, 603, 803])
    cursor, walked = (jnp.int32(0),) * 3, []
    while int(cursor[0]) < 2:
        entry = entry_at(cursor, kv_lens, query_starts, g, sizes)
        words = tuple(int(word) for word in entry.kv_words)
        walked.append((int(entry.block.start), int(entry.block.num_q), words, bool(entry.is_last)))
        cursor = entry.next
    assert walked == [
        (0, 512, (0, 512), False),
        (0, 512, (512, 705), True),
        (512, 91, (0, 512), False),
        (512, 91, (512, 750), True),
        (592, 211, (0, 100), True),
    ]


@pytest.mark.parametrize(("q_block", "tile_tokens"), [(512, 128), (512, 512), (256, 512)])
@pytest.mark.parametrize("position", [0, 1, 127, 128, 300, 511, -1, -128, -200])
def test_every_unit_finds_the_mask_of_its_distance(position: int, q_block: int, tile_tokens: int) -> None:
    g = geometry(32, 8, 128)
    sizes = MixedBlocks(q_block=q_block, kv_block=512, tile_rows=1024, tile_tokens=tile_tokens, units_per_turn=2)
    tiles = Tiles.of(g, sizes, num_q=jnp.int32(q_block), position=jnp.int32(position))
    unit = tiles.first
    while int(unit[0]) == 0:
        _, q_tile, kv_tile = (int(i) for i in unit)
        distance = position + q_tile * 256 - kv_tile * tile_tokens
        number = int(tiles.mask(q_tile, kv_tile))
        assert number < sizes.num_masks(g)
        assert (number == 0) == (distance >= tile_tokens - 1)
        assert number == 0 or int(tiles.distance(number)) == distance
        unit = tiles.after(unit)
