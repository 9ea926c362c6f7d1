"""The names of chips on the command line."""

from __future__ import annotations

import math
import re

from pallas_kernels.chips import GPUS, TPUS, GpuChip, TpuChip
from scripts.estimates.target import Target

CHIPS: dict[str, TpuChip | GpuChip] = {**TPUS, **GPUS}


def parse_target(text: str) -> Target:
    """`v6e:2x4`, `8xh100`, or a chip alone, such as `l4`, in any case. Raises ValueError for anything else."""
    lower = text.lower()
    tpu = re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", lower)
    gpu = re.fullmatch(r"(\d+)x(\w+)", lower)
    if tpu and tpu[1] in TPUS:
        name = tpu[1]
        num_devices = math.prod(map(int, tpu[2].split("x"))) * TPUS[name].devices_per_chip
    elif gpu and gpu[2] in GPUS:
        name, num_devices = gpu[2], int(gpu[1])
    elif lower in CHIPS:
        return Target(name=lower, chip=CHIPS[lower], num_devices=None)
    else:
        num_devices = 0
    if not num_devices:
        raise ValueError(
            f"--target {text}: it is a TPU and its topology (v6e:2x4; {', '.join(TPUS)}), GPUs (8xh100; "
            f"{', '.join(GPUS)}), or one of these names alone"
        )
    return Target(name=lower, chip=CHIPS[name], num_devices=num_devices)
