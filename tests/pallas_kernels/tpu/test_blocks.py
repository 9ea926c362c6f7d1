"""Block sizes: those tuned, and the rule for everything else."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.api import AttentionSpec
from pallas_kernels.tpu import blocks, layout

CHIPS = ("v5e", "v5p", "v6e", "7x")  # as jax names generations
LONG = 1024  # pages per sequence: no block is shortened


def geometry(num_query_heads: int, num_kv_heads: int, head_dim: int, dtype: object = jnp.bfloat16) -> layout.Geometry:
    spec = AttentionSpec(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=128,
        dtype=dtype,
        kv_dtype=dtype,
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
    return sorted(path.stem for path in tuning.FOLDER.glob("tpu_*.json"))


def test_every_file_is_a_chip_that_jax_knows() -> None:
    assert set(files()) <= {f"tpu_{chip}" for chip in CHIPS}


@pytest.mark.parametrize("device", files())
def test_every_tuned_entry_is_reached_by_a_lookup(device: str) -> None:
    reached = {}
    for g in GEOMETRIES:
        reached[blocks.key(g)] = blocks.choose(g, LONG, device.removeprefix("tpu_"))
    for name, sizes in tuning.entries(device).items():
        found = reached[name]
        for variant, fields in sizes.items():
            assert vars(getattr(found, variant)) == fields


def test_a_miss_takes_the_rule() -> None:
    g = geometry(40, 8, 128)
    assert blocks.choose(g, LONG, "v6e") == blocks.choose(g, LONG) == blocks.choose(g, LONG, "unheard of")


@pytest.mark.parametrize("chip", [None, *CHIPS])
def test_sizes_fit_together(chip: str | None) -> None:
    for g in GEOMETRIES:
        for pages_per_seq in (1, 3, LONG):
            sizes = blocks.choose(g, pages_per_seq, chip)
            assert sizes.mixed.q_block * g.queries_per_plane % sizes.mixed.tile_rows == 0
            assert sizes.mixed.tile_rows % 128 == 0
            assert sizes.mixed.units_per_turn % 2 == 0
            assert sizes.mixed.kv_block % 128 == sizes.decode.kv_block % 128 == 0


def test_blocks_are_no_longer_than_the_longest_sequence_needs() -> None:
    g = geometry(32, 8, 128)
    assert blocks.choose(g, 2).decode.kv_block == blocks.choose(g, 2).mixed.kv_block == 256
    assert blocks.choose(g, 1).decode.kv_block == 128
