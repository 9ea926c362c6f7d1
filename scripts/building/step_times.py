"""The step times by which the scheduler decides whether drafts pay, and by which it keeps latency targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batcher.step_times import PerTokenEstimate, StepEstimate, StepTimes
from model.config import LlamaConfig
from model.eagle_config import EagleConfig, EagleForm
from pallas_kernels.chips import GPUS, TPUS, GpuChip, TpuChip

MOST_TOKENS = 1024  # in the table of a chip
# The shares of the published figures that a step is expected to reach. Other engines' whole decode steps reach 0.77 of
# the memory's bandwidth (vLLM, 8B, one request, A100), and a ragged attention kernel 0.86 (arXiv 2604.15464).
MEMORY_EFFICIENCY = 0.8
FLOPS_EFFICIENCY = 0.6
LINK_EFFICIENCY = 0.5
ITEMSIZE = 2  # bytes of an activation
# Milliseconds of the demo on two cores, with products in C: plain steps of one and two rows, and steps of one, two and
# four rows with three drafts each (scripts/lab/results/2026-11-22-speculative.md). Where the weights do not fit
# into a cache, longer steps take less of a short one's time than these, so the table is a cautious one.
DEMO_MULTIPLIED = 3_145_728  # its weights
CPU_TIMES = StepTimes(num_tokens=(1, 2, 4, 8, 16), times=(0.26, 0.28, 0.36, 0.42, 0.66))


@dataclass(frozen=True)
class Link:
    """A device's bandwidth to its neighbours, and the least time of a collective."""

    bytes_per_s: float  # in one direction, over all of the device's links
    latency_s: float  # the least time of an all-reduce


# Published bandwidths of both directions, halved. TPUs: "ICI bandwidth per chip" on Google Cloud's page of the
# generation; a device of tpu7x is half a chip. GPUs: NVLink or PCIe of NVIDIA's data sheets. Latencies are estimates:
# a few hops between TPUs, a launch of NCCL between GPUs.
LINKS = {
    "v5e": Link(200e9, 8e-6),
    "v5p": Link(600e9, 8e-6),
    "v6e": Link(400e9, 8e-6),
    "tpu7x": Link(300e9, 8e-6),
    "a100": Link(300e9, 15e-6),
    "a10": Link(32e9, 25e-6),
    "l4": Link(32e9, 25e-6),
    "h100": Link(450e9, 15e-6),
    "h200": Link(450e9, 15e-6),
    "b200": Link(900e9, 15e-6),
    "b300": Link(900e9, 15e-6),
    "rtx5090": Link(64e9, 25e-6),
}


@dataclass(frozen=True, kw_only=True)
class Products:
    """The seconds of a step's matrix products, and of the sums between chips. Sizes are of one device."""

    layers_bytes: float  # weights of all layers
    layers_flops: float  # per token
    last_flops: float  # per row, of the part of the last layer after its attention
    head_bytes: float
    head_flops: float  # per row
    memory_bytes_per_s: float  # efficiency included, as in the next two
    flops_per_s: float
    link_bytes_per_s: float
    link_latency_s: float
    hidden_bytes: float  # the bytes of one token's hidden state
    num_reduces: int  # per step
    num_devices: int

    def products_seconds(self, num_tokens: int, num_rows: int) -> float:
        """The seconds of a step of padded sizes."""
        sent = 2 * (self.num_devices - 1) / self.num_devices * num_tokens * self.hidden_bytes  # by one sum
        last = num_rows * self.last_flops / self._speed(num_rows)
        return (
            self._part(self.layers_bytes, num_tokens * self.layers_flops / self._speed(num_tokens) + last, num_rows)
            + self._part(self.head_bytes, num_rows * self.head_flops / self._speed(num_rows, is_head=True), num_rows)
            + self.num_reduces * (self.link_latency_s + sent / self.link_bytes_per_s)
        )

    def _speed(self, num_rows: int, *, is_head: bool = False) -> float:
        """The speed of a product with so many rows, as a multiple of bfloat16's."""
        return 1.0

    def _read_bytes_per_s(self, num_rows: int) -> float:
        """The bandwidth that a step with so many rows reaches."""
        return self.memory_bytes_per_s

    def _part(self, num_bytes: float, flops: float, num_rows: int) -> float:
        return max(num_bytes / self._read_bytes_per_s(num_rows), flops / self.flops_per_s)


@dataclass(frozen=True, kw_only=True)
class WithAttention(Products):
    """The seconds of a whole step. It is a `batcher.step_times.StepEstimate`."""

    kv_token_bytes: float  # of all layers
    pair_flops: float  # of attention, per query and computed token

    def seconds(self, num_tokens: int, num_rows: int, *, kv_tokens: float, pairs: float) -> float:
        """The seconds of a step.

        Args:
            num_tokens: padded, as `num_rows`.
            kv_tokens: tokens whose K/V are read, of all rows.
            pairs: of a query and a token that it attends to.
        """
        attention = self._part(kv_tokens * self.kv_token_bytes, pairs * self.pair_flops, num_rows)
        return self.products_seconds(num_tokens, num_rows) + attention


def pair_flops(config: LlamaConfig, num_chips: int) -> float:
    """The operations of attention on one device, per query and token that it attends to."""
    return 4 * config.num_layers * config.num_heads * config.head_dim / num_chips


def products(
    config: LlamaConfig, chip: TpuChip | GpuChip, *, weights_read: float, weight_itemsize: float, num_chips: int
) -> dict[str, Any]:
    """The fields of `Products` for a model in its stored form.

    Args:
        weights_read: bytes of weights that a step reads on one device.
        weight_itemsize: bytes of one weight of the projections and of the head.
    """
    qkv = config.hidden_size * (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    others = config.hidden_size * (config.num_heads * config.head_dim + 3 * config.intermediate_size)
    head, link = config.vocab_size * config.hidden_size, LINKS[chip.name]
    head_bytes = min(head * weight_itemsize / num_chips, weights_read)
    return {
        "layers_bytes": weights_read - head_bytes,
        "layers_flops": 2 * (config.num_layers * qkv + (config.num_layers - 1) * others) / num_chips,
        "last_flops": 2 * others / num_chips,
        "head_bytes": head_bytes,
        "head_flops": 2 * head / num_chips,
        "memory_bytes_per_s": chip.memory_bytes_per_s * MEMORY_EFFICIENCY,
        "flops_per_s": flops_per_s(chip) * FLOPS_EFFICIENCY,
        "link_bytes_per_s": link.bytes_per_s * LINK_EFFICIENCY,
        "link_latency_s": link.latency_s,
        "hidden_bytes": config.hidden_size * ITEMSIZE,
        "num_reduces": 2 * config.num_layers + 1 if num_chips > 1 else 0,
        "num_devices": num_chips,
    }


def num_multiplied(network: LlamaConfig | EagleConfig) -> int:
    """The number of weights that a pass multiplies: all but the embedding."""
    config = network if isinstance(network, LlamaConfig) else network.layer
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    of_layer = config.hidden_size * (2 * queries + 2 * keys + 3 * config.intermediate_size)
    if isinstance(network, LlamaConfig):
        return config.num_layers * of_layer + config.vocab_size * config.hidden_size
    of_head = network.draft_vocab_size * config.hidden_size
    if network.form is EagleForm.EAGLE:
        return of_layer + of_head + 2 * config.hidden_size**2
    return of_layer + of_head + config.hidden_size * (queries + 2 * keys)  # the inputs of attention are twice as wide


def flops_per_s(chip: TpuChip | GpuChip) -> float:
    """The bfloat16 operations per second of one device."""
    return chip.clock_hz * chip.flops_per_cycle if isinstance(chip, TpuChip) else chip.bf16_flops_per_s


def choose_step_times(config: LlamaConfig, platform: str, *, weight_bits: int, num_chips: int) -> StepTimes:
    """The step times of the model on the attached devices.

    Args:
        platform: the platform of these devices.
        weight_bits: the bits of a weight in its stored form.
        num_chips: the number of chips that share the model.
    """
    if platform == "cpu":
        return CPU_TIMES
    return chip_times(config, attached_chip(platform), weight_bits=weight_bits, num_chips=num_chips)


def choose_step_estimate(
    config: LlamaConfig, platform: str, *, weight_bits: int, kv_bits: int, num_chips: int
) -> StepEstimate:
    """The estimate of all steps of the model on the attached devices. The other arguments are as in
    `choose_step_times`."""
    if platform == "cpu":  # in proportion to the demo; what steps really take is learnt
        scale = num_multiplied(config) / DEMO_MULTIPLIED / 1000
        first_s, token_s = CPU_TIMES(1) * scale, (CPU_TIMES(16) - CPU_TIMES(1)) / 15 * scale
        pair_s = token_s * pair_flops(config, 1) / (2 * num_multiplied(config))
        return PerTokenEstimate(first_s - token_s, token_s, pair_s)
    chip, read = attached_chip(platform), num_multiplied(config) * weight_bits / 8 / num_chips
    shares = products(config, chip, weights_read=read, weight_itemsize=weight_bits / 8, num_chips=num_chips)
    kv_bytes = 2 * config.num_layers * config.num_kv_heads * config.head_dim * kv_bits / 8 / num_chips
    return WithAttention(**shares, kv_token_bytes=kv_bytes, pair_flops=pair_flops(config, num_chips))


def chip_times(config: LlamaConfig, chip: TpuChip | GpuChip, *, weight_bits: int, num_chips: int) -> StepTimes:
    """The seconds of reading the weights, or of computing with them if that takes longer.

    K/V are left out. They are read once with and without drafts, so drafts pay a little more often than this says.
    """
    read, itemsize = num_multiplied(config) * weight_bits / 8 / num_chips, weight_bits / 8
    estimate = Products(**products(config, chip, weights_read=read, weight_itemsize=itemsize, num_chips=num_chips))
    sizes = tuple(range(1, MOST_TOKENS + 1))
    return StepTimes(num_tokens=sizes, times=tuple(estimate.products_seconds(n, n) for n in sizes))


def attached_chip(platform: str) -> TpuChip | GpuChip:
    """The chip of the attached devices. For an unknown one it is the chip that computes the fewest tokens in the time
    of reading a weight, because there drafts pay least often."""
    import jax

    if platform == "tpu":
        from pallas_kernels.tpu.blocks import this_chip

        return TPUS.get(this_chip()) or min(
            TPUS.values(), key=lambda chip: chip.clock_hz * chip.flops_per_cycle / chip.memory_bytes_per_s
        )
    kind = jax.devices()[0].device_kind
    known = {chip.device_kind: chip for chip in GPUS.values()}
    return known.get(kind) or min(known.values(), key=lambda chip: chip.bf16_flops_per_s / chip.memory_bytes_per_s)
