"""The number of chips that share a model, if no flag gives it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import pytest

from model.execution.device_memory import DeviceMemory, device_memory
from model.execution.memory_plan import (
    HOST_RESERVE,
    SELF_TEST_BYTES,
    DoesNotFitError,
    RunnerConfig,
    check_fits,
    memory_needs,
)
from model.loading.source import resolve
from pallas_kernels.spec import Backend
from scripts.building.chips import CONTEXT_STEP, ModelOnChips, choose_chips_and_context
from scripts.flags.settings import EngineSettings


def num_chips(asked: int | None, num_devices: int, check: Callable[[int], None], **options: int) -> int:
    """The choice for a context that is asked for."""
    return choose_chips_and_context(asked, num_devices, 64, 64, lambda number, _: check(number), **options)[0]


def fits_on(least: int):
    def check(num_chips: int) -> None:
        if num_chips < least:
            raise ValueError(f"{num_chips} do not do")

    return check


@pytest.mark.parametrize(("least", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8)])
def test_as_few_chips_as_the_model_fits_on(least, expected):
    assert num_chips(None, 8, fits_on(least)) == expected


def test_a_model_that_fits_nowhere_is_refused_with_the_largest_number():
    with pytest.raises(ValueError, match="4 do not do"):
        num_chips(None, 6, fits_on(16))


def test_several_hosts_share_a_model_over_all_their_chips():
    assert num_chips(None, 8, fits_on(1), num_hosts=2) == 8
    assert num_chips(8, 8, fits_on(1), num_hosts=2) == 8
    with pytest.raises(ValueError, match="2 hosts share a model over all their 8 chips"):
        num_chips(4, 8, fits_on(1), num_hosts=2)


def room_for(tokens_of_a_chip: int):
    """A chip has room for so many tokens; of several chips each has its share of a token's heads."""

    def check(num_chips: int, context: int) -> None:
        room = tokens_of_a_chip * num_chips
        if context > room:
            raise DoesNotFitError("no room", longest=room)

    return check


@pytest.mark.parametrize(
    ("room", "asked_chips", "expected"),
    [
        (131072, None, (1, 131072)),
        (65536, None, (2, 131072)),
        (10_000, None, (8, 80_000 // CONTEXT_STEP * CONTEXT_STEP)),
        (10_000, 1, (1, 9984)),
    ],
)
def test_the_longest_context_that_fits_is_taken_if_none_is_asked_for(room, asked_chips, expected):
    assert choose_chips_and_context(asked_chips, 8, None, 131072, room_for(room)) == expected


def test_a_context_that_is_asked_for_is_taken_or_refused_with_the_longest():
    assert choose_chips_and_context(None, 8, 4096, 131072, room_for(10_000)) == (1, 4096)
    with pytest.raises(DoesNotFitError, match="there is room for one request of 10000 tokens: --max-model-len 10000"):
        choose_chips_and_context(1, 8, 20_000, 131072, room_for(10_000))
    with pytest.raises(DoesNotFitError, match="no room"):
        choose_chips_and_context(None, 1, None, 131072, room_for(CONTEXT_STEP - 1))
    with pytest.raises(DoesNotFitError):
        choose_chips_and_context(None, 8, None, 131072, room_for(10_000), num_hosts=2)


@pytest.mark.parametrize("preset", ["llama-3.2-1b", "llama-3.1-8b"])
def test_a_start_fits_on_a_machine_whose_memory_has_no_room_for_the_trained_context(preset):
    """Half a GiB more than the weights and temporaries of one chip: the context becomes shorter, and is served."""
    config = resolve(f"preset:{preset}", weights=False).config
    settings = EngineSettings(device="cpu")

    def on_chips(number: int, context: int) -> ModelOnChips:
        limits = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=context, num_pages=None)
        return ModelOnChips(
            config, number, settings, limits, dtype="bfloat16", quantization=None, rounding=None, platform="cpu"
        )

    whole = on_chips(1, config.max_position_embeddings)
    attention = whole.attention(Backend.REFERENCE)
    needs = memory_needs(
        whole.planned,
        attention,
        RunnerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=config.max_position_embeddings),
    )
    total = needs.weights + needs.temporaries + needs.state + HOST_RESERVE + SELF_TEST_BYTES + (1 << 29)

    def check(number: int, context: int) -> None:
        limits = RunnerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=context, memory_utilization=1.0)
        own = on_chips(number, context)
        memory = DeviceMemory(total=total, free=total - needs.weights, is_host=True)
        of_own = memory_needs(own.planned, attention, limits)
        check_fits(memory, of_own, limits, page_size=attention.spec.page_size)

    chips, context = choose_chips_and_context(1, 1, None, config.max_position_embeddings, check)
    assert chips == 1
    of_a_token = attention.page_bytes() * config.num_layers / attention.spec.page_size
    assert 0.9 < context * of_a_token / (1 << 29) <= 1.01
    with pytest.raises(DoesNotFitError):
        check(1, context + 4 * CONTEXT_STEP)


def test_the_memory_plan_decides():
    """Of a machine whose share of memory is between what two and four chips would need."""
    config = resolve("preset:llama-3.2-1b", weights=False).config
    limits = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
    memory = device_memory(jax.local_devices()[0])

    def on(num_chips: int, limits: RunnerConfig) -> ModelOnChips:
        form = {"dtype": "bfloat16", "quantization": None, "rounding": None, "platform": "cpu"}
        return ModelOnChips(config, num_chips, EngineSettings(), limits, **form)

    def needed(num_chips: int) -> float:
        model = on(num_chips, limits)
        attention = model.attention(Backend.REFERENCE)
        needs = memory_needs(model.planned, attention, limits)
        pages = 1 + -(-limits.max_model_len // attention.spec.page_size)
        return needs.weights + needs.state + needs.temporaries + pages * needs.page

    def check(limits: RunnerConfig, num_chips: int) -> None:
        on(num_chips, limits).check_fits()

    share = (needed(2) + needed(4)) / 2 / memory.total
    limited = replace(limits, memory_utilization=share)
    assert num_chips(None, 8, partial(check, limited)) == 4
    too_many = partial(check, replace(limited, num_pages=10**9))
    with pytest.raises(ValueError, match=r"1000000000 K/V pages \(--num-pages\) do not fit: there is room for \d+"):
        num_chips(None, 8, too_many)


def test_one_chips_share_of_the_attention():
    config = resolve("preset:llama-3.2-1b", weights=False).config
    limits = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
    form = {"dtype": "bfloat16", "quantization": None, "rounding": None, "platform": "cpu"}
    whole = ModelOnChips(config, 4, EngineSettings(), limits, **form)
    share = whole.share_of_a_chip(Backend.REFERENCE)
    assert share.mesh is None
    assert (share.spec.num_query_heads, share.spec.num_kv_heads) == (config.num_heads // 4, config.num_kv_heads // 4)
