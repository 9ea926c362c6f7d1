"""How long a step takes, estimated from the bytes and the operations of its parts.

Every part of a step is limited by the memory or by the matrix units, and parts follow one another: the projections
read all weights and multiply the padded tokens, in 8 bits where the engine rounds their inputs; attention reads the K/V
of every row; the head multiplies the rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from batcher.scheduling.plan import StepPlan
from model.config import LlamaConfig
from model.quantization.forms import Rounding
from pallas_kernels.chips import EIGHT_BIT_SPEED
from scripts.estimates.target import Target

# The shares of the published figures that a step is expected to reach. Other engines' whole decode steps reach 0.77 of
# the memory's bandwidth (vLLM, 8B, one request, A100), and a ragged attention kernel 0.86 (arXiv 2604.15464).
MEMORY_EFFICIENCY = 0.8
FLOPS_EFFICIENCY = 0.6
LINK_EFFICIENCY = 0.5
# Of the host, per step and per row of it: scheduling, packing, dispatch and results (scripts.lab.host, and the
# dispatch of a program). They delay a step only if they take longer than the step before it.
HOST_STEP_S = 0.0005
HOST_ROW_S = 2e-6

ITEMSIZE = 2  # bytes of an activation


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """The seconds of a step on one replica. Sizes are of one device."""

    layers_bytes: float  # weights of all layers
    layers_flops: float  # per token
    head_bytes: float
    head_flops: float  # per row
    kv_token_bytes: float  # of all layers
    pair_flops: float  # of attention, per query and computed token
    memory_bytes_per_s: float  # efficiency included, as in the next two
    flops_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    hidden_bytes: float  # of one token's hidden state
    num_reduces: int  # per step
    num_devices: int
    rounding: Rounding | None = None  # of the inputs of projections

    def __call__(self, plan: StepPlan) -> float:
        pairs, tokens = 0.0, 0
        for seq, count in zip(plan.rows, plan.q_lens, strict=True):
            tokens += seq.num_computed
            pairs += count * (seq.num_computed - (count - 1) / 2)
        return self.seconds(plan.bucket.num_tokens, plan.bucket.num_rows, kv_tokens=tokens, pairs=pairs)

    def seconds(self, num_tokens: int, num_rows: int, *, kv_tokens: float, pairs: float) -> float:
        """Of a step.

        Args:
            num_tokens: padded, as `num_rows`.
            kv_tokens: tokens whose K/V are read, of all rows.
            pairs: of a query and a token that it attends to.
        """
        return (
            self._part(self.layers_bytes, num_tokens * self.layers_flops / self._speed(num_tokens))
            + self._part(kv_tokens * self.kv_token_bytes, pairs * self.pair_flops)
            + self._part(self.head_bytes, num_rows * self.head_flops / self._speed(num_rows, is_head=True))
            + self.num_reduces * self._reduce(num_tokens * self.hidden_bytes)
        )

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """Of a decode of rows of one length."""
        tokens = num_rows * context
        return self.seconds(num_rows, num_rows, kv_tokens=tokens, pairs=tokens)

    def _speed(self, num_rows: int, *, is_head: bool = False) -> float:
        """Of a product with so many rows, as a multiple of bfloat16's."""
        rounding = self.rounding
        if rounding is None or num_rows < rounding.min_rows or (is_head and not rounding.with_head):
            return 1.0
        return EIGHT_BIT_SPEED

    def _part(self, num_bytes: float, flops: float) -> float:
        return max(num_bytes / self.memory_bytes_per_s, flops / self.flops_per_s)

    def _reduce(self, num_bytes: float) -> float:
        sent = 2 * (self.num_devices - 1) / self.num_devices * num_bytes
        return self.link_latency_s + sent / self.link_bytes_per_s


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
    """Of a model in its stored form over `chips` devices.

    Args:
        weights_read: bytes of one device that a step reads (`step_bytes`).
        weight_itemsize: bytes of one weight of the projections and of the head.
        kv_token_bytes: of one device and all layers.
        rounding: of the inputs of projections, as the engine chooses it.
    """
    attention = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    head = config.vocab_size * config.hidden_size
    head_bytes = min(head * weight_itemsize / chips, weights_read)
    return Roofline(
        layers_bytes=weights_read - head_bytes,
        layers_flops=2 * config.num_layers * (attention + mlp) / chips,
        head_bytes=head_bytes,
        head_flops=2 * head / chips,
        kv_token_bytes=kv_token_bytes,
        pair_flops=4 * config.num_layers * config.num_heads * config.head_dim / chips,
        memory_bytes_per_s=target.chip.memory_bytes_per_s * MEMORY_EFFICIENCY,
        flops_per_s=target.flops_per_s * FLOPS_EFFICIENCY,
        link_bytes_per_s=target.link.bytes_per_s * LINK_EFFICIENCY,
        link_latency_s=target.link.latency_s,
        hidden_bytes=config.hidden_size * ITEMSIZE,
        num_reduces=2 * config.num_layers + 1 if chips > 1 else 0,
        num_devices=chips,
        rounding=rounding,
    )
