"""The table of step times by which the scheduler decides whether drafts pay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from batcher.step_times import StepTimes
from pallas_kernels.chips import GPUS, TPUS, GpuChip, TpuChip
from scripts.building.draft import num_multiplied
from scripts.estimates.roofline import roofline
from scripts.estimates.target import Target

if TYPE_CHECKING:
    from model.config import LlamaConfig

MOST_TOKENS = 1024  # in the table of a chip
# Milliseconds of the demo on two cores, with products in C: plain steps of one and two rows, and steps of one, two and
# four rows with three drafts each (scripts/lab/results/2026-11-22-speculative.md). Where the weights do not fit
# into a cache, longer steps take less of a short one's time than these, so the table is a cautious one.
CPU_TIMES = StepTimes(num_tokens=(1, 2, 4, 8, 16), times=(0.26, 0.28, 0.36, 0.42, 0.66))


def choose_step_times(config: LlamaConfig, platform: str, *, weight_bits: int, num_chips: int) -> StepTimes:
    """Of the model on the attached devices.

    Args:
        platform: of these devices.
        weight_bits: of a weight in its stored form.
        num_chips: that share the model.
    """
    if platform == "cpu":
        return CPU_TIMES
    return chip_times(config, attached_chip(platform), weight_bits=weight_bits, num_chips=num_chips)


def chip_times(config: LlamaConfig, chip: TpuChip | GpuChip, *, weight_bits: int, num_chips: int) -> StepTimes:
    """Seconds as the planner estimates them: of reading the weights, or of computing with them if that takes longer.
    K/V are left out. They are read once with and without drafts, so with them drafts would pay rather more often."""
    estimate = roofline(
        config,
        Target(name=chip.name, chip=chip, num_devices=num_chips),
        weights_read=num_multiplied(config) * weight_bits / 8 / num_chips,
        weight_itemsize=weight_bits / 8,
        kv_token_bytes=0,
        chips=num_chips,
    )
    sizes = tuple(range(1, MOST_TOKENS + 1))
    return StepTimes(num_tokens=sizes, times=tuple(estimate.seconds(n, n, kv_tokens=0, pairs=0) for n in sizes))


def attached_chip(platform: str) -> TpuChip | GpuChip:
    """The chip of the attached devices. In place of a GPU that is not in the table stands the one that computes the
    fewest tokens in the time of reading a weight: on it, drafts pay least often."""
    import jax

    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        return TPUS[this_chip()]
    kind = jax.devices()[0].device_kind
    known = {chip.device_kind: chip for chip in GPUS.values()}
    return known.get(kind) or min(known.values(), key=lambda chip: chip.bf16_flops_per_s / chip.memory_bytes_per_s)
