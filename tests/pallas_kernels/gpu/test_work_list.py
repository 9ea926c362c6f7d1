"""The work lists: integers by hand, and what must hold for any lengths."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu import work_list
from pallas_kernels.gpu.append import destinations


def decode_items(kv_lens: list[int], *, block_kv: int = 64, num_kv_heads: int = 8, resident_ctas: int = 396):
    lens = jnp.asarray(kv_lens, jnp.int32)
    items, row_items = work_list.decode_items(
        lens, lens >= 0, block_kv=block_kv, max_blocks=2048, num_kv_heads=num_kv_heads, resident_ctas=resident_ctas
    )
    return np.asarray(items), np.asarray(row_items)


def test_a_batch_that_fills_the_chip_is_not_split():
    """99 equal sequences on 8 heads are two full waves of 396 CTAs."""
    items, row_items = decode_items([640] * 99)
    assert row_items.tolist() == [[i, 1] for i in range(99)]
    assert items[:99].tolist() == [[i, 0, 10, 640, 0] for i in range(99)]
    assert (items[99:, work_list.ITEM_ROW] == -1).all()


def test_one_long_sequence_is_spread_over_the_chip():
    """512 blocks over one wave of 396 / 8 = 49 places."""
    items, row_items = decode_items([32768])
    splits = row_items[0, 1]
    assert 40 <= splits <= 49
    assert items[:splits, work_list.ITEM_NUM_BLOCKS].sum() == 512
    assert items[:splits, work_list.ITEM_NUM_BLOCKS].max() <= 13


def test_one_long_sequence_among_short_ones_does_not_idle_the_chip():
    items, row_items = decode_items([131072] + [500] * 63)
    total = items[:, work_list.ITEM_NUM_BLOCKS].clip(0).sum()
    assert row_items[0, 1] > 32
    assert (row_items[1:, 1] == 1).all()
    # The longest item is no longer than what each of the 396 / 8 places has to do anyway.
    assert items[:, work_list.ITEM_NUM_BLOCKS].max() <= total / (396 / 8)


@settings(deadline=None, max_examples=40)
@given(kv_lens=st.lists(st.integers(0, 131072), min_size=16, max_size=16), heads=st.sampled_from([1, 2, 8]))
def test_every_block_is_in_exactly_one_item(kv_lens, heads):
    items, row_items = decode_items(kv_lens, num_kv_heads=heads)
    used = items[items[:, work_list.ITEM_ROW] >= 0]
    assert row_items[:, 1].sum() == len(used)
    for row, (first, count) in enumerate(row_items):
        mine = items[first : first + count]
        assert (mine[:, work_list.ITEM_ROW] == row).all()
        assert (mine[:, work_list.ITEM_KV_LEN] == kv_lens[row]).all()
        assert (mine[:, work_list.ITEM_IS_SPLIT] == (count > 1)).all()
        assert 1 <= count <= work_list.MAX_SPLITS
        covered = np.concatenate([np.arange(i[1], i[1] + i[2]) for i in mine])
        assert covered.tolist() == list(range(-(-kv_lens[row] // 64)))


def prefill_tiles(query_lens: list[int], kv_lens: list[int], num_singles: int, num_tokens: int, tile_tokens: int):
    starts = np.concatenate([[0], np.cumsum(query_lens)])
    tiles, count = work_list.prefill_tiles(
        jnp.asarray(kv_lens), jnp.asarray(starts), jnp.int32(num_singles), num_tokens=num_tokens,
        tile_tokens=tile_tokens,
    )  # fmt: skip
    return np.asarray(tiles)[: int(count[0])]


def test_tiles_of_a_mixed_step_by_hand():
    """Two decodes, then tokens [2, 12) of a 100 token sequence and [12, 30) of a new one; 2 padding tokens."""
    tiles = prefill_tiles([1, 1, 10, 18], [9, 9, 100, 18], 2, num_tokens=32, tile_tokens=16)
    assert tiles.tolist() == [
        # row, first token, begin, end, position - token, kv_len: the longest context first
        [2, 0, 2, 12, 88, 100],
        [3, 16, 24, 30, -12, 18],  # loaded from 16 on: a tile may not reach beyond the step
        [3, 8, 12, 24, -12, 18],
        [4, 16, 30, 32, 0, 0],  # padding
    ]


@st.composite
def steps(draw):
    num_singles = draw(st.integers(0, 5))
    chunks = draw(st.lists(st.integers(1, 60), max_size=5))
    query_lens = [1] * num_singles + chunks + [0] * (10 - num_singles - len(chunks))
    return num_singles, query_lens, [q + draw(st.integers(0, 500)) if q else 0 for q in query_lens]


@settings(deadline=None, max_examples=40)
@given(step=steps())
def test_every_token_of_a_chunk_and_of_the_padding_is_in_exactly_one_tile(step):
    num_singles, query_lens, kv_lens = step
    num_tokens = 312
    tiles = prefill_tiles(query_lens, kv_lens, num_singles, num_tokens, 32)
    owner = np.full(num_tokens, -1)
    for row, first, begin, end, position, kv_len in tiles.tolist():
        assert first % 8 == 0
        assert first <= begin < end <= first + 32
        assert first + 32 <= num_tokens
        assert (owner[begin:end] == -1).all()
        owner[begin:end] = row
        if row < len(query_lens):
            assert kv_len == kv_lens[row]
            assert position == kv_len - sum(query_lens[: row + 1])
    expected = np.repeat(np.arange(len(query_lens)), query_lens)
    expected[:num_singles] = -1
    assert owner[: len(expected)].tolist() == expected.tolist()
    assert (owner[len(expected) :] == len(query_lens)).all()


def test_destinations_of_new_tokens_by_hand():
    """Row 0 writes its 18th token, row 1 its tokens 15 and 16; one padding token."""
    table = jnp.asarray([[3, 5], [7, 2], [0, 0]])
    pages, slots = destinations(table, jnp.asarray([18, 17, 0]), jnp.asarray([0, 1, 3, 3]), num_tokens=4, page_size=16)
    assert pages.tolist() == [5, 7, 2, -1]
    assert slots.tolist()[:3] == [1, 15, 0]
