"""The work list of decode: integers by hand, and what must hold for any lengths."""

from __future__ import annotations

import jax
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.gpu import tuning, work_list
from pallas_kernels.gpu.device import Gpu
from pallas_kernels.gpu.parts import Parts
from scripts.lab.accounts.specs import make_spec

PARTS = Parts(max_parts=6, min_keys=128, max_slots=64)
H200 = Gpu(arch=(9, 0), num_multiprocessors=132)
compiled = jax.jit(work_list.decode_items, static_argnames=["block_kv", "parts"])


def decode_items(
    kv_lens: list[int], num_decodes: int | None = None, parts: Parts = PARTS
) -> tuple[list[list[int]], list[list[int]]]:
    """The used items and merges."""
    lens = np.asarray(kv_lens, np.int32)
    is_decode = np.arange(len(lens)) < (len(lens) if num_decodes is None else num_decodes)
    found = compiled(lens, is_decode, block_kv=64, parts=parts)
    items = np.asarray(found.items)[: int(found.num_items[0])].tolist()
    if found.merges is None:
        return items, []
    return items, np.asarray(found.merges)[: int(found.num_merges[0])].tolist()


def test_rows_from_the_first_that_does_not_fit_on_are_not_cut():
    items, merges = decode_items([512, 512, 256], parts=Parts(max_parts=6, min_keys=128, max_slots=6))
    assert sorted((item[0], item[work_list.ITEM_PART]) for item in items) == [(0, i) for i in range(4)] + [
        (1, -1), (2, -1),
    ]  # fmt: skip
    assert [merge[0] for merge in merges] == [0]


@settings(max_examples=40)
@given(kv_lens=st.lists(st.integers(0, 4000), min_size=16, max_size=16), num_decodes=st.integers(0, 16))
def test_every_block_is_in_exactly_one_item(kv_lens, num_decodes):
    items, merges = decode_items(kv_lens, num_decodes)
    blocks: dict[int, list[int]] = {}
    numbers: dict[int, list[int]] = {}
    for row, first, count, kv_len, part in items:
        assert kv_len == kv_lens[row]
        assert count >= 1
        blocks.setdefault(row, []).extend(range(first, first + count))
        if part >= 0:
            numbers.setdefault(row, []).append(part)
    assert blocks == {row: list(range(max(-(-kv_lens[row] // 64), 1))) for row in range(num_decodes)}
    lengths = [max(item[2] for item in items if item[0] == row) for row, *_ in items]
    assert lengths == sorted(lengths, reverse=True)
    assert numbers == {row: list(range(first, first + count)) for row, first, _, _, count, _ in merges}
    places = [number for row in numbers.values() for number in row]
    assert len(set(places)) == len(places)
    assert all(0 <= place < PARTS.num_slots for place in places)


@settings(max_examples=20)
@given(others=st.lists(st.integers(0, 2000), min_size=9, max_size=9), mine=st.integers(1, 4000))
def test_how_a_row_is_cut_does_not_depend_on_the_step(others, mine):
    parts = Parts(max_parts=6, min_keys=128, max_slots=1 << 10)
    cuts = []
    for kv_lens in ([mine] + [0] * 9, [*others[:5], mine, *others[5:]][:10]):
        items, _ = decode_items(kv_lens, parts=parts)
        row = kv_lens.index(mine)
        cuts.append([(item[1], item[2]) for item in items if item[0] == row])
    assert cuts[0] == cuts[1]


def test_the_memory_of_partial_results_is_bounded():
    parts = tuning.decode_parts(H200, make_spec((32, 8, 128)), num_rows=512, max_keys=1 << 17)
    assert parts.num_slots * 32 * 128 * 4 == tuning.PARTIAL_RESULTS_BYTES
