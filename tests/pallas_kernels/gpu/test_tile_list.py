"""The work list of prefill: integers by hand, and what must hold for any lengths."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu import tile_list, tuning, work_list
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.parts import NO_PARTS, Parts
from pallas_kernels.gpu.prefill_tile import TileShape
from scripts.lab.accounts.specs import make_spec

PARTS = Parts(max_parts=6, min_keys=256, max_slots=1024, long_row=480, min_keys_of_long=128)
ROWS = 11  # in every list: one program for all of a test's examples
prefill_tiles = jax.jit(
    tile_list.prefill_tiles,
    static_argnames=["num_tokens", "tile_tokens", "block_kv", "parts"],
)
decode_items = jax.jit(work_list.decode_items, static_argnames=["block_kv", "parts"])


def make_list(
    query_lens: list[int],
    kv_lens: list[int],
    num_singles: int,
    num_tokens: int,
    tile_tokens: int,
    parts: Parts = NO_PARTS,
) -> tuple[list[list[int]], list[list[int]]]:
    """The used tiles and merges; the rest of ROWS are padding rows."""
    padding = [0] * (ROWS - len(query_lens))
    starts = np.concatenate([[0], np.cumsum(query_lens + padding)]).astype(np.int32)
    found = prefill_tiles(
        np.asarray(kv_lens + padding, np.int32), starts, np.int32(num_singles), num_tokens=num_tokens,
        tile_tokens=tile_tokens, block_kv=64, parts=parts,
    )  # fmt: skip
    tiles = np.asarray(found.tiles)[: int(found.num_tiles[0])].tolist()
    if found.merges is None:
        return tiles, []
    return tiles, np.asarray(found.merges)[: int(found.num_merges[0])].tolist()


def test_rows_from_the_first_that_does_not_fit_on_are_not_cut():
    small = Parts(max_parts=6, min_keys=128, max_slots=48)
    tiles, merges = make_list([8, 8, 8], [512, 512, 256], 0, num_tokens=24, tile_tokens=16, parts=small)
    parts = sorted((tile[0], tile[tile_list.TILE_PART]) for tile in tiles)
    assert parts == [(0, 0), (0, 1), (0, 2), (0, 3), (1, -1), (2, -1)]
    assert [merge[0] for merge in merges] == list(range(8))


@st.composite
def steps(draw):
    num_singles = draw(st.integers(0, 5))
    chunks = draw(st.lists(st.integers(1, 60), max_size=5))
    query_lens = [1] * num_singles + chunks + [0] * (10 - num_singles - len(chunks))
    return num_singles, query_lens, [q + draw(st.integers(0, 1500)) if q else 0 for q in query_lens]


@pytest.mark.parametrize("parts", [NO_PARTS, PARTS], ids=["whole", "cut"])
def test_every_token_and_its_keys_are_in_exactly_one_tile(parts):
    num_tokens, tile_tokens = 312, 32

    @settings(max_examples=40)
    @given(step=steps())
    def check(step):
        num_singles, query_lens, kv_lens = step
        tiles, merges = make_list(query_lens, kv_lens, num_singles, num_tokens, tile_tokens, parts)
        owner = np.full(num_tokens, -1)
        blocks: dict[int, list[int]] = {}
        places: dict[tuple[int, int], int] = {}
        for row, first, begin, end, position, kv_len, first_block, end_block, part, shift in tiles:
            assert first % 8 == 0
            assert first <= begin < end <= first + tile_tokens <= num_tokens
            assert shift % 8 == 0
            if part < 1 or first_block == 0:
                assert (owner[begin:end] == -1).all()
            owner[begin:end] = row if kv_len else ROWS
            for token in range(begin, end):
                blocks.setdefault(token, []).extend(range(first_block, end_block))
                if part >= 0:
                    places[token, part] = token + shift
            if kv_len:
                assert kv_len == kv_lens[row]
                assert position == kv_len - sum(query_lens[: row + 1])
                visible = -(-(end + position) // 64)
                for token in range(begin, end):
                    assert max(blocks[token], default=-1) < visible
        expected = np.repeat(np.arange(len(query_lens)), query_lens)
        expected[:num_singles] = -1
        assert owner[: len(expected)].tolist() == expected.tolist()
        assert (owner[len(expected) :] == ROWS).all()
        ends = np.cumsum(query_lens)
        for token in range(num_singles, len(expected)):
            seen = kv_lens[expected[token]] - ends[expected[token]] + token + 1
            assert sorted(blocks[token])[: -(-seen // 64)] == list(range(-(-seen // 64)))
            assert len(set(blocks[token])) == len(blocks[token])
        # Places do not collide, and the merges name all of them.
        assert len(set(places.values())) == len(places)
        assert all(0 <= place < parts.num_slots for place in places.values())
        named = {
            (token, first_part + i): slot + i * stride
            for token, slot, stride, first_part, count, _ in merges
            for i in range(count)
        }
        assert named == places

    check()


@pytest.mark.parametrize("parts", [NO_PARTS, PARTS], ids=["whole", "cut"])
@pytest.mark.parametrize(("num_tokens", "tile_tokens"), [(8, 8), (64, 16), (320, 64)])
@pytest.mark.parametrize("num_rows", [1, 4, 16])
def test_every_entry_names_a_row_of_the_page_table(num_rows, num_tokens, tile_tokens, parts):
    """Used or not, in full steps and in steps of padding only: kernels may fetch before they know that there is nothing
    to do."""
    block_kv, pages_per_seq = 64, 24

    @settings(max_examples=20)
    @given(data=st.data())
    def check(data):
        query_lens, left = [], num_tokens
        while left and len(query_lens) < num_rows and data.draw(st.booleans()):
            query_lens.append(data.draw(st.integers(1, left)))
            left -= query_lens[-1]
        query_lens.sort(key=lambda query_len: query_len != 1)
        singles = query_lens.count(1)
        query_lens += [0] * (num_rows - len(query_lens))
        longest = block_kv * pages_per_seq
        kv_lens = [min(q + data.draw(st.integers(0, longest)), longest) if q else 0 for q in query_lens]
        starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
        found = prefill_tiles(
            np.asarray(kv_lens, np.int32), starts, np.int32(singles), num_tokens=num_tokens, tile_tokens=tile_tokens,
            block_kv=block_kv, parts=parts,
        )  # fmt: skip
        tiles = np.asarray(found.tiles)
        items = np.asarray(
            decode_items(
                np.asarray(kv_lens, np.int32), np.arange(num_rows) < singles, block_kv=block_kv, parts=parts
            ).items
        )
        rows = np.concatenate([tiles[:, tile_list.TILE_ROW], items[:, work_list.ITEM_ROW]])
        assert ((rows >= 0) & (rows < num_rows)).all()
        used = tiles[: int(found.num_tiles[0])]
        first = used[:, tile_list.TILE_TOKEN]
        assert ((first >= 0) & (first <= num_tokens - tile_tokens)).all()
        padding = used[used[:, tile_list.TILE_BEGIN] >= sum(query_lens)]
        assert (padding[:, tile_list.TILE_KV_LEN] == 0).all()
        assert (padding[:, tile_list.TILE_FIRST_BLOCK] == padding[:, tile_list.TILE_END_BLOCK]).all()

    check()


def test_how_a_row_is_cut_does_not_depend_on_the_step():
    @settings(max_examples=30)
    @given(step=steps(), query_len=st.integers(2, 60), past=st.integers(0, 1500))
    def check(step, query_len, past):
        num_singles, query_lens, kv_lens = step
        cuts = []
        for before in (0, num_singles, 10):
            mine = [*query_lens[:before], query_len], [*kv_lens[:before], query_len + past]
            parts = replace(PARTS, max_slots=1 << 14)
            tiles, _ = make_list(*mine, min(before, num_singles), 512, 32, parts)
            row = [tile for tile in tiles if tile[0] == before and tile[tile_list.TILE_KV_LEN]]
            cuts.append({(tile[6], tile[7]) for tile in row if tile[3] == max(tile[3] for tile in row)})
        assert cuts[0] == cuts[1] == cuts[2]

    check()


def test_short_contexts_and_small_chips_need_no_parts():
    gpu, spec = Gpu(arch=(9, 0), num_multiprocessors=132), make_spec((32, 8, 128))
    assert tuning.prefill_parts(gpu, spec, num_rows=8, num_tokens=64, max_keys=1000) == NO_PARTS
    one = Gpu(arch=(9, 0), num_multiprocessors=8)
    assert tuning.prefill_parts(one, spec, num_rows=8, num_tokens=64, max_keys=1 << 17) == NO_PARTS


@pytest.mark.parametrize("group", range(1, 17))
def test_every_head_is_written_once_and_by_the_first_tile_that_has_it(group):
    shape = TileShape(group)
    writers = {
        int(shape.first_head(0, part)) + g: (part, g)
        for part in range(shape.tiles_per_group)
        for g in range(int(shape.first_own(part)), shape.heads)
    }
    assert list(writers) == list(range(group))
    for head, writer in writers.items():
        assert tuple(int(x) for x in shape.place(np.int32(head))) == writer
