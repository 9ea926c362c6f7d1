"""Planning of the K/V pages, in numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from batcher.slots import SlotLayout
from model.execution import memory_plan
from model.execution.device_memory import DeviceMemory
from model.execution.memory_plan import (
    GIB,
    HOST_RESERVE,
    SELF_TEST_BYTES,
    MemoryNeeds,
    RunnerConfig,
    check_fits,
    plan_pages,
)
from model.execution.prompt_lookup import PromptLookup
from tests.model.driver import TINY, paged_attention, tiny_model

MIB = 1 << 20
NEEDS = MemoryNeeds(weights=8 * GIB, state=1 * GIB, temporaries=2 * GIB, page=8 * MIB)


def plan(*, total=24 * GIB, free=16 * GIB, is_host=False, needs=NEEDS, utilization=0.75, seqs=64, length=4096):
    limits = RunnerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=2048, max_model_len=length, memory_utilization=utilization
    )
    return plan_pages(DeviceMemory(total=total, free=free, is_host=is_host), needs, limits, page_size=64)


def test_pages_fill_what_weights_state_and_temporaries_leave():
    # 24 * 0.75 - 8 - 1 - 2 = 7 GiB of 8 MiB pages, one of which is the null page. Of 895, eight leading bits are 892.
    assert plan() == 892


def test_what_others_use_is_not_planned_with():
    # 5 - 1 - 2: nothing of the state is there yet either.
    assert plan(free=5 * GIB) == 2 * 128 - 1


def test_no_more_pages_than_can_be_of_use():
    # Two requests of 64 pages each, and as much again for the prefix cache.
    assert plan(seqs=2) == 256


def test_a_host_keeps_its_memory_for_others_unless_one_request_needs_it():
    assert plan(is_host=True) == 4 * 128
    assert plan(is_host=True, length=64 * 600) == 600


def test_a_host_keeps_memory_for_the_compiler():
    free = 3 * GIB + 8 * MIB + 100 * 8 * MIB  # state, temporaries, the null page and 100 others
    assert plan(is_host=True, free=free + HOST_RESERVE, length=6400) == 100
    with pytest.raises(ValueError, match=r"0.50 GiB is kept for the compiler.*room for one request of 6336 tokens"):
        plan(is_host=True, free=free + HOST_RESERVE - MIB, length=6400)
    memory = DeviceMemory(total=24 * GIB, free=free + HOST_RESERVE, is_host=True)
    limits = RunnerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=6400)
    with pytest.raises(ValueError, match="does not fit"):  # the self-test takes its part before the pages are planned
        check_fits(memory, NEEDS, limits, page_size=64)
    check_fits(replace(memory, free=memory.free + SELF_TEST_BYTES), NEEDS, limits, page_size=64)


def test_a_model_that_does_not_fit_is_told_the_parts_and_the_flags():
    with pytest.raises(ValueError, match="does not fit") as error:
        plan(length=64 * 896)
    text = str(error.value)
    for part in ("24.00 GiB", "75%", "16.00 GiB are free", "weights 8.00 GiB", "step 2.00 GiB", "slots 1.00 GiB"):
        assert part in text
    assert "57344 tokens 7.00 GiB" in text
    for flag in ("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs", "--memory-utilization", "--dtype"):
        assert flag in text
    assert plan(length=64 * 895) == 895


def test_the_bound_of_the_temporaries_grows_with_the_step():
    def bound(tokens, rows):
        return memory_plan.temporaries_bound(TINY, num_tokens=tokens, num_rows=rows, itemsize=4, num_shards=1)

    # 24 bytes a row and token of the vocabulary; a token's activations.
    assert bound(64, 9) - bound(64, 8) == 24 * TINY.vocab_size
    assert bound(65, 8) - bound(64, 8) == 4 * (6 * 32 + 3 * (4 + 2 * 2) * 16 + 3 * 48)


def test_drafts_need_the_tokens_of_the_pages_and_their_own_logits():
    def needs(**options):
        limits = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, **options)
        return memory_plan.memory_needs(tiny_model(), paged_attention(), limits)

    plain, drafts = needs(), needs(lookup=PromptLookup(min_tokens=2, max_tokens=4), max_drawn=8)
    assert drafts.page - plain.page == 4 * 8  # tokens of a page
    assert drafts.temporaries - plain.temporaries == 24 * TINY.vocab_size * (8 - 2)


def test_chips_share_the_logits_and_the_histories():
    llama = replace(TINY, vocab_size=128256)

    def bound(rows, chips):
        return memory_plan.temporaries_bound(llama, num_tokens=64, num_rows=rows, itemsize=4, num_shards=chips)

    def state(chips):
        return memory_plan.state_bytes(llama, num_slots=1024, pages_per_seq=64, num_shards=chips)

    # 24 bytes of a logit, and 16 more where chips look for thresholds together.
    assert [bound(9, chips) - bound(8, chips) for chips in (1, 8)] == [24 * 128256, 40 * 16032]
    assert state(1) - state(8) == 1024 * 4 * 128256 * 7 // 8  # 438 MiB of 517
    assert state(8) == 1024 * 4 * (SlotLayout.width(64) + 4008 + 16032)
