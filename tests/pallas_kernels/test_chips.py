"""The table of chips, against what jax knows of TPUs and what the kernels take of GPUs."""

from __future__ import annotations

import pytest
from jax._src import tpu_info  # jax exports the figures of the attached TPU only

from pallas_kernels.chips import GIB, GPUS, TPUS, tpu_name
from pallas_kernels.gpu.device import Gpu

VERSIONS = {tpu_name(version.value): version for version in tpu_info.ChipVersion}


@pytest.mark.parametrize("name", TPUS)
def test_a_tpu_has_the_vmem_and_the_memory_that_jax_knows(name: str) -> None:
    cores = 2 if VERSIONS[name].supports_megacore else 1  # of a device
    known = tpu_info.get_tpu_info_for_chip(VERSIONS[name], cores)
    assert TPUS[name].cores == cores
    assert TPUS[name].vmem_bytes == known.vmem_capacity_bytes
    # What libtpu keeps for itself.
    assert TPUS[name].memory_gib * GIB == pytest.approx(known.hbm_capacity_bytes * cores, rel=0.025)
    peak = TPUS[name].clock_hz * TPUS[name].flops_per_cycle
    assert peak == pytest.approx(known.bf16_ops_per_second * cores, rel=0.01)


@pytest.mark.parametrize("name", GPUS)
def test_there_are_kernels_for_every_gpu(name: str) -> None:
    chip = GPUS[name]
    gpu = Gpu(arch=chip.arch, num_multiprocessors=chip.num_multiprocessors)
    assert gpu.multiprocessor_shared_memory == chip.shared_memory.per_multiprocessor


def test_the_l4_is_planned_with_what_its_ecc_leaves() -> None:
    assert GPUS["l4"].memory_gib == pytest.approx(23034 / 1024, abs=0.01)  # MiB in nvidia-smi


@pytest.mark.parametrize(
    ("name", "devices", "of_a_host"),
    [("v5e", 8, 8), ("v5e", 16, 4), ("v6e", 1, 1), ("v6e", 64, 4), ("v5p", 4, 4), ("v5p", 8, 4), ("tpu7x", 2, 2),
     ("tpu7x", 8, 8), ("tpu7x", 32, 8)],
)  # fmt: skip
def test_a_slice_of_several_hosts_has_four_chips_on_each(name: str, devices: int, of_a_host: int) -> None:
    assert TPUS[name].devices_per_host(devices) == of_a_host
