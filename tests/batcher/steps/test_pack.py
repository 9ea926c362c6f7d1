"""The packed buffer, number by number."""

from __future__ import annotations

import numpy as np

from batcher.grammar import num_mask_words
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import Chunk, StepPlan
from batcher.slots import SlotLayout
from batcher.step import MASK_BLOCK, PATCH_BLOCK, Bucket, PackedLayout, StepInput, Variant
from batcher.steps.pack import Packer
from tests.batcher.harness import make_capacity, make_request

CAPACITY = make_capacity(num_slots=4, page_size=4, max_model_len=64)
WIDTH = SlotLayout.width(CAPACITY.pages_per_seq)


def make_request_state(name: str, prompt: list[int], slot: int, pages: list[int], **sampling: object) -> RequestState:
    seq = RequestState(
        make_request(name, prompt, **sampling),
        np.array(prompt, np.int32),
        limit=10,
        stop_ids=frozenset({1, 2, *sampling.get("stop_token_ids", ())}),
        seed=sampling.get("seed", 0),
        arrived_s=0.0,
        on_output=lambda _output: None,
    )
    seq.slot, seq.pages = slot, pages
    return seq


def make_plan(rows: list[tuple[RequestState, int, int]], bucket: Bucket, **lists: list) -> StepPlan:
    return StepPlan(
        number=0,
        bucket=bucket,
        rows=[seq for seq, _, _ in rows],
        slots=np.array([seq.slot for seq, _, _ in rows]),
        q_lens=[q_len for _, q_len, _ in rows],
        emits=[emits for _, _, emits in rows],
        num_singles=sum(q_len == 1 for _, q_len, _ in rows),
        num_tokens=sum(q_len for _, q_len, _ in rows),
        **lists,
    )


def sections(step: StepInput) -> dict[str, list[int]]:
    return {name: step.packed[where].tolist() for name, where in PackedLayout(step.bucket).sections().items()}


def patches(step: StepInput) -> dict[tuple[int, int], int]:
    """(slot, column) -> value of all patches, in the order in which they are applied."""
    part = sections(step)
    pairs = [pair for block in step.patches for pair in block.T.tolist()]
    pairs += list(zip(part["patch_indices"], part["patch_values"], strict=True))
    end = CAPACITY.num_slots * WIDTH
    assert all(0 <= index <= end for index, _ in pairs)
    kept = [(divmod(index, WIDTH), value) for index, value in pairs if index < end]
    assert len(dict(kept)) == len(kept), "an index twice in one step"
    return dict(kept)


def test_a_mixed_step() -> None:
    decoding = make_request_state("a", [5, 6], slot=2, pages=[9])
    one = make_request_state("b", [30], slot=0, pages=[3])
    chunk = make_request_state("c", [40, 41, 42, 43, 44], slot=1, pages=[1, 7])
    plan = make_plan(
        [(decoding, 1, 1), (one, 1, 1), (chunk, 3, 0)],
        Bucket(8, 3, Variant.GREEDY),
        chunks=[Chunk(1, 1, 0, 1), Chunk(2, 2, 1, 3)],
    )
    part = sections(Packer(CAPACITY, 4).pack(plan))
    assert part["header"] == [2, 3, 5, 0, 0, 0, 0, 0]
    assert part["slots"] == [2, 0, 1]
    assert part["q_lens"] == [1, 1, 3]
    assert part["emits"] == [1, 1, 0]
    assert part["tokens"] == [-1, 30, 41, 42, 43, 0, 0, 0]
    assert set(part["patch_indices"]) == {4 * WIDTH}


def test_padding_rows_point_past_the_last_slot() -> None:
    plan = make_plan([(make_request_state("a", [5], 1, [1]), 1, 1)], Bucket(4, 4, Variant.GREEDY))
    part = sections(Packer(CAPACITY, 2).pack(plan))  # fewer rows in use than the device has slots
    assert part["slots"] == [1, 4, 4, 4]
    assert part["q_lens"] == [1, 0, 0, 0]
    assert part["emits"] == [1, 0, 0, 0]
    assert part["tokens"] == [-1, 0, 0, 0]


def test_the_next_owner_of_a_slot_sends_only_what_differs() -> None:
    packer = Packer(CAPACITY, 4)
    bucket = Bucket(1, 1, Variant.SAMPLE)
    first = make_request_state("a", [5, 6], slot=1, pages=[9, 8], top_k=7)
    packer.pack(make_plan([(first, 1, 1)], bucket, admitted=[first]))
    second = make_request_state("b", [5, 6], slot=1, pages=[9, 3], top_k=7, seed=5)
    step = packer.pack(make_plan([(second, 1, 1)], bucket, admitted=[second]))
    assert patches(step) == {
        (1, SlotLayout.KV_LEN): 0,  # the device has moved it on: always sent
        (1, SlotLayout.at("seed")): 5,
        (1, SlotLayout.PAGE_TABLE + 1): 3,
    }
    packer.forget()
    step = packer.pack(make_plan([(second, 1, 1)], bucket, admitted=[second]))
    assert len(patches(step)) == 19


def test_a_new_page_of_a_running_row_is_one_patch() -> None:
    packer = Packer(CAPACITY, 4)
    seq = make_request_state("a", [5, 6], slot=2, pages=[9, 8, 30])
    step = packer.pack(make_plan([(seq, 1, 1)], Bucket(1, 1, Variant.GREEDY), grown=[(seq, len(seq.pages) - 1)]))
    assert patches(step) == {(2, SlotLayout.PAGE_TABLE + 2): 30}
    assert step.patches == ()


def test_what_does_not_fit_goes_ahead_in_blocks() -> None:
    capacity = make_capacity(num_slots=4, page_size=1, max_model_len=10_000, num_pages=20_000)
    width = SlotLayout.width(10_000)
    pages = list(range(1, 9_001))
    seq = make_request_state("a", [5], slot=1, pages=pages)
    bucket = Bucket(1, 1, Variant.GREEDY)
    step = Packer(capacity, 4).pack(make_plan([(seq, 1, 1)], bucket, admitted=[seq]))
    assert [block.shape for block in step.patches] == [(2, PATCH_BLOCK)] * 3
    state = np.full(4 * width + 1, -1)
    part = sections(step)
    for indices, values in [*step.patches, (part["patch_indices"], part["patch_values"])]:
        state[np.array(indices)] = values  # padding lands in the last entry
    assert state[width + SlotLayout.PAGE_TABLE : width + SlotLayout.PAGE_TABLE + 9_000].tolist() == pages
    assert state[width + SlotLayout.KV_LEN] == 0
    assert (state[:width] == -1).all()
    num_patches = PackedLayout(bucket).num_patches
    assert len([i for i in part["patch_indices"] if i < 4 * width]) == num_patches  # the step's own room is used


def test_targets_are_the_tokens_that_follow() -> None:
    scored = make_request_state("a", [5, 6, 7, 8], slot=0, pages=[1], prompt_logprobs=1)
    other = make_request_state("b", [9, 10], slot=1, pages=[2])
    bucket = Bucket(8, 2, Variant.SCORE)
    plan = make_plan([(scored, 4, 1), (other, 2, 1)], bucket, chunks=[Chunk(0, 0, 0, 4), Chunk(1, 4, 0, 2)])
    assert sections(Packer(CAPACITY, 4).pack(plan))["targets"] == [6, 7, 8, -1, -1, -1, -1, -1]
    plan = make_plan([(other, 2, 1), (scored, 2, 0)], bucket, chunks=[Chunk(0, 0, 0, 2), Chunk(1, 2, 1, 2)])
    assert sections(Packer(CAPACITY, 4).pack(plan))["targets"] == [-1, -1, 7, 8, -1, -1, -1, -1]


def test_masks_travel_in_blocks_with_their_slots() -> None:
    words = num_mask_words(CAPACITY.vocab_size)
    capacity = make_capacity(num_slots=MASK_BLOCK + 4, page_size=4, max_model_len=64)
    rows = [make_request_state(str(i), [5], slot=i, pages=[i + 1]) for i in range(MASK_BLOCK + 3)]
    masks = [(seq, np.full(words, seq.slot + 100, np.int32)) for seq in rows[1:]]
    bucket = Bucket(MASK_BLOCK + 3, MASK_BLOCK + 3, Variant.SAMPLE)
    step = Packer(capacity, capacity.num_slots).pack(make_plan([(seq, 1, 1) for seq in rows], bucket, masks=masks))
    assert [block.shape for block in step.masks] == [(MASK_BLOCK, 1 + words)] * 2
    sent = np.concatenate(step.masks)
    real = sent[sent[:, 0] < capacity.num_slots]
    assert real[:, 0].tolist() == list(range(1, MASK_BLOCK + 3))
    assert (real[:, 1:] == real[:, :1] + 100).all()
    assert set(sent[:, 0]) - set(real[:, 0]) == {capacity.num_slots}
