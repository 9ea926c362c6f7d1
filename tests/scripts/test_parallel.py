"""The number of chips that share a model, if no flag gives it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import pytest

from model.execution.device_memory import device_memory
from model.execution.memory_plan import RunnerConfig, memory_needs
from model.loading.source import resolve
from pallas_kernels.api import candidates
from pallas_kernels.spec import Backend, UnavailableError
from scripts.wiring.backends import paged_attention
from scripts.wiring.model_on_chips import ModelOnChips
from scripts.wiring.parallel import choose_num_chips, describe_idle
from scripts.wiring.settings import EngineSettings


def fits_on(least: int):
    def check(num_chips: int) -> None:
        if num_chips < least:
            raise ValueError(f"{num_chips} do not do")

    return check


@pytest.mark.parametrize(("least", "expected"), [(1, 1), (2, 2), (3, 4), (8, 8)])
def test_as_few_chips_as_the_model_fits_on(least, expected):
    assert choose_num_chips(None, 8, fits_on(least)) == expected


def test_a_model_that_fits_nowhere_is_refused_with_the_largest_number():
    with pytest.raises(ValueError, match="4 do not do"):
        choose_num_chips(None, 6, fits_on(16))


def test_what_is_asked_for_is_taken():
    assert choose_num_chips(2, 8, fits_on(4)) == 2


def test_several_hosts_share_a_model_over_all_their_chips():
    assert choose_num_chips(None, 8, fits_on(1), num_hosts=2) == 8
    assert choose_num_chips(8, 8, fits_on(1), num_hosts=2) == 8
    with pytest.raises(ValueError, match="2 hosts share a model over all their 8 chips"):
        choose_num_chips(4, 8, fits_on(1), num_hosts=2)


def test_idle_chips_are_named():
    assert describe_idle(1, 1) == "1 of 1 chip"
    assert describe_idle(8, 8) == "8 of 8 chips"
    line = "2 of 8 chips; 6 are idle: --tensor-parallel-size 8 answers one request sooner, "
    assert describe_idle(2, 8) == line + "--data-parallel-size 4 answers more requests at once"


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
        attention = model.attention(paged_attention, Backend.REFERENCE)
        needs = memory_needs(model.planned, attention, limits)
        pages = 1 + -(-limits.max_model_len // attention.spec.page_size)
        return needs.weights + needs.state + needs.temporaries + pages * needs.page

    def check(limits: RunnerConfig, num_chips: int) -> None:
        on(num_chips, limits).check_fits(paged_attention, candidates(None, "cpu"))

    share = (needed(2) + needed(4)) / 2 / memory.total
    limited = replace(limits, memory_utilization=share)
    assert choose_num_chips(None, 8, partial(check, limited)) == 4
    too_many = partial(check, replace(limited, num_pages=10**9))
    with pytest.raises(ValueError, match=r"1000000000 K/V pages \(--num-pages\) do not fit: there is room for \d+"):
        choose_num_chips(None, 8, too_many)


def test_a_backend_that_does_not_compute_the_model_is_passed_over():
    config = resolve("preset:llama-3.2-1b", weights=False).config
    limits = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
    form = {"dtype": "bfloat16", "quantization": None, "rounding": None, "platform": "cpu"}
    model = ModelOnChips(config, 1, EngineSettings(page_size=8), limits, **form)
    with pytest.raises(UnavailableError, match="not 8"):
        model.attention(paged_attention, Backend.CPU)
    model.check_fits(paged_attention, candidates(None, "cpu"))


def test_one_chips_share_of_the_attention():
    config = resolve("preset:llama-3.2-1b", weights=False).config
    limits = RunnerConfig(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=256)
    form = {"dtype": "bfloat16", "quantization": None, "rounding": None, "platform": "cpu"}
    whole = ModelOnChips(config, 4, EngineSettings(), limits, **form)
    share = whole.share_of_a_chip(paged_attention, Backend.REFERENCE)
    assert share.mesh is None
    assert (share.spec.num_query_heads, share.spec.num_kv_heads) == (config.num_heads // 4, config.num_kv_heads // 4)
