"""The table of step times: of which steps drafts pay on which chip."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from model.presets import preset
from pallas_kernels.chips import GPUS, TPUS
from scripts.building.step_times import CPU_TIMES, attached_chip, chip_times, choose_step_times

MODEL = preset("llama-3.1-8b")


@pytest.mark.parametrize(
    ("chip", "bits", "free", "dear"),
    [
        (TPUS["v6e"], 16, 256, 512),  # the chip computes 420 tokens in the time of reading bfloat16
        (TPUS["v6e"], 8, 128, 256),  # and half as many in that of reading int8
        (TPUS["v5e"], 16, 128, 256),
        (GPUS["h200"], 16, 128, 256),
        (GPUS["a100"], 16, 64, 128),
    ],
)
def test_tokens_cost_nothing_until_they_take_longer_than_the_weights(chip, bits, free, dear):
    times = chip_times(MODEL, chip, weight_bits=bits, num_chips=1)
    assert times(free) == pytest.approx(times(1))
    assert times(dear) > 1.1 * times(1)
    assert times(2 * dear) == pytest.approx(2 * times(dear), rel=0.01)


def test_seconds_are_those_of_reading_the_weights():
    chip = GPUS["h200"]
    times = chip_times(MODEL, chip, weight_bits=16, num_chips=1)
    assert times(1) == pytest.approx(2 * 7.504e9 / (0.8 * chip.memory_bytes_per_s), rel=0.01)


def test_chips_that_share_a_model_also_exchange_hidden_states():
    alone, shared = (chip_times(MODEL, TPUS["v6e"], weight_bits=16, num_chips=n) for n in (1, 8))
    assert alone(1) / 8 < shared(1) < alone(1)
    assert shared(256) / shared(1) > alone(256) / alone(1)


def test_a_cpu_has_a_measured_table():
    assert choose_step_times(MODEL, "cpu", weight_bits=32, num_chips=1) is CPU_TIMES
    assert CPU_TIMES(4) < 2 * CPU_TIMES(1)
    assert CPU_TIMES(32) > 2.5 * CPU_TIMES(8)


def test_an_unknown_gpu_is_taken_for_the_one_on_which_drafts_pay_least(monkeypatch):
    for kind, expected in (("NVIDIA H200", "h200"), ("NVIDIA A10G", "rtx5090")):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)])
        assert attached_chip("gpu").name == expected
