"""How long a step takes, estimated from the bytes and the operations of its parts.

Every part of a step is limited by the memory or by the matrix units, and parts follow one another: the projections
read all weights and multiply the padded tokens, in 8 bits where the engine rounds their inputs; attention reads the K/V
of every row; the head multiplies the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from model.config import LlamaConfig
from model.quantization.forms import Rounding
from pallas_kernels.chips import EIGHT_BIT_SPEED
from scripts.building.step_times import WithAttention, pair_flops, products
from scripts.lab.planning.target import Target

# Of the host, per step and per row of it: scheduling, packing, dispatch and results (scripts.lab.host, and the
# dispatch of a program). They delay a step only if they take longer than the step before it.
HOST_STEP_S = 0.0005
HOST_ROW_S = 2e-6
# Rows -> the share of the data sheet's bandwidth that whole decode steps have reached on the chip: an 8B in bfloat16
# with 1,024 tokens a row (scripts/lab/results/2026-11-26-h100.md). Other chips are taken to reach `MEMORY_EFFICIENCY`.
MEASURED_SHARES: Mapping[str, Mapping[int, float]] = {"h100": {1: 0.736, 16: 0.733, 64: 0.701, 256: 0.610}}


@dataclass(frozen=True, kw_only=True)
class Roofline(WithAttention):
    """The seconds of a step on one replica. Sizes are of one device."""

    rounding: Rounding | None = None  # of the inputs of projections
    data_sheet_bytes_per_s: float = 0.0
    measured: Mapping[int, float] = field(default_factory=dict, hash=False)  # of `MEASURED_SHARES`; empty: none

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """The seconds of a decode of rows of one length."""
        tokens = num_rows * context
        return self.seconds(num_rows, num_rows, kv_tokens=tokens, pairs=tokens)

    def share_of_bandwidth(self, num_rows: int) -> float | None:
        """The measured share of the data sheet's bandwidth, or one between measured ones; None: none was measured."""
        if not self.measured:
            return None
        return float(np.interp(num_rows, list(self.measured), list(self.measured.values())))

    def _read_bytes_per_s(self, num_rows: int) -> float:
        share = self.share_of_bandwidth(num_rows)
        return self.memory_bytes_per_s if share is None else share * self.data_sheet_bytes_per_s

    def _speed(self, num_rows: int, *, is_head: bool = False) -> float:
        """The speed of a product with so many rows, as a multiple of bfloat16's."""
        rounding = self.rounding
        if rounding is None or num_rows < rounding.min_rows or (is_head and not rounding.with_head):
            return 1.0
        return EIGHT_BIT_SPEED


def roofline(
    config: LlamaConfig,
    target: Target,
    *,
    weights_read: float,
    weight_itemsize: float,
    kv_token_bytes: float,
    chips: int,
    rounding: Rounding | None = None,
) -> Roofline:
    """The roofline of a model in its stored form over `chips` devices.

    Args:
        weights_read: bytes of one device that a step reads (`step_bytes`).
        weight_itemsize: bytes of one weight of the projections and of the head.
        kv_token_bytes: of one device and all layers.
        rounding: of the inputs of projections, as the engine chooses it.
    """
    read = {"weights_read": weights_read, "weight_itemsize": weight_itemsize}
    return Roofline(
        **products(config, target.chip, **read, num_chips=chips),
        kv_token_bytes=kv_token_bytes,
        pair_flops=pair_flops(config, chips),
        rounding=rounding,
        data_sheet_bytes_per_s=target.chip.memory_bytes_per_s,
        measured=MEASURED_SHARES.get(target.chip.name, {}),
    )
