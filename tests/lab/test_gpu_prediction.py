"""The model of a GPU's schedule: times by hand, and the shares that the kernels are built for."""

from __future__ import annotations

import pytest

from pallas_kernels.chips import GPUS
from scripts.lab.accounts.gpu_prediction import SHAPES, Machine, predict
from scripts.lab.accounts.gpu_schedule import Launch, Unit, seconds
from scripts.lab.accounts.specs import make_spec


def launch(units: list[Unit], slots: int) -> Launch:
    return Launch(units=units, slots=slots, start_s=1.0, between_s=0.5)


def test_a_unit_alone_is_bound_by_itself_or_by_the_memory():
    assert seconds(launch([Unit(bytes=10, alone_s=4)], 2), 100.0) == pytest.approx(1 + 4 + 0.5)
    assert seconds(launch([Unit(bytes=800, alone_s=4)], 2), 100.0) == pytest.approx(1 + 8 + 0.5)


def test_units_at_the_same_time_share_the_memory():
    """Both load 400 bytes until 9, or one has no bytes and does not wait for the other."""
    assert seconds(launch([Unit(bytes=400, alone_s=4)] * 2, 2), 100.0) == pytest.approx(1 + 8 + 0.5)
    mixed = [Unit(bytes=800, alone_s=4), Unit(bytes=0, alone_s=4)]
    assert seconds(launch(mixed, 2), 100.0) == pytest.approx(1 + 8 + 0.5)


def test_a_persistent_cta_starts_once():
    units = [Unit(bytes=0, alone_s=2)] * 4
    assert seconds(launch(units, 2), 100.0) == pytest.approx(1 + 2 * (2 + 0.5))


def test_rounds_of_alternating_direction():
    """One CTA takes 4 and 1, the other 3 and 2."""
    units = [Unit(bytes=0, alone_s=n) for n in (4, 3, 2, 1)]
    assert seconds(launch(units, 2), 100.0) == pytest.approx(1 + 5 + 2 * 0.5)


# Cycles of the kernels as compiled: results/2026-11-23-kernels.md.
H200_8B = Machine(chip=GPUS["h200"], spec=make_spec((32, 8, 128)), decode_cycles=261, prefill_cycles=734)
H200_70B_ON_8 = Machine(chip=GPUS["h200"], spec=make_spec((8, 1, 128)), decode_cycles=261, prefill_cycles=734)


@pytest.mark.parametrize(
    ("machine", "shape", "share"),
    [
        (H200_8B, "64 x 2k", 0.79),
        (H200_8B, "256 x 512", 0.79),
        (H200_8B, "1 x 128k", 0.79),
        (H200_8B, "1 x 64k + 63 x 512", 0.75),
        (H200_8B, "1 x 32k", 0.65),  # 43 us, of which 28 are the floor, and 6 starts of kernels and CTAs
        (H200_70B_ON_8, "1 x 128k", 0.52),
        (H200_70B_ON_8, "256 x 512", 0.63),
    ],
)
def test_decodes_on_an_h200_are_predicted_to_use_most_of_the_bandwidth(machine, shape, share):
    assert predict(machine, SHAPES[shape]).share > share


def test_the_limit_by_hand():
    """One KV head with 256 rows: products of 13.2 us take longer than bytes, and three launches 6 us."""
    products = 4 * 256 * 100_000 * 128 / GPUS["h200"].bf16_flops_per_s
    found = predict(H200_70B_ON_8, SHAPES["32 on 100k"])
    assert found.launches == 3
    assert found.limit_s == pytest.approx(products + 3 * 2e-6 + 1.5e-6)


def test_a_short_chunk_that_is_not_cut_leaves_most_of_the_chip_idle():
    assert predict(H200_8B, SHAPES["32 on 100k"], cut=False).share < 0.1
