"""Block sizes: those tuned, and the rule for everything else."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tuning
from pallas_kernels.backends import default_page_size
from pallas_kernels.chips import TPUS, tpu_name
from pallas_kernels.spec import AttentionSpec, Backend
from pallas_kernels.tpu import blocks, decode_memory, layout, mixed_memory
from pallas_kernels.tpu.decode_memory import DecodeBlocks
from pallas_kernels.tpu.tiles import FewBlocks, MixedBlocks

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
