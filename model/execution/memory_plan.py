"""The memory plan of one device: the bytes of weights, state and temporaries, and the number of K/V pages that fit.

All sizes come from shapes, before weights are loaded or programs are compiled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from batcher.grammar import num_mask_words
from batcher.request import LogprobsMode, Pooling
from batcher.slots import SlotLayout
from batcher.step import MAX_PAGE_COPIES, MAX_STAGED_ADAPTERS
from model.config import LlamaConfig
from model.execution import adapter_arrays, page_copies
from model.execution.device_memory import DeviceMemory
from model.execution.prompt_lookup import PromptLookup
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import sharding_of
from model.sampling.threshold import PARTS_ON_CHIPS
from pallas_kernels.api import PagedAttention

GIB = 1 << 30

# On a CPU the K/V pages share memory with all other programs, and a CPU is too slow to make use of many more pages.
MAX_CPU_KV_BYTES = 4 * GIB
# The part of a machine's free memory that is kept for others: the compiler and its programs, weights while they are
# read, and the HTTP process. For Llama 3.2 1B these have taken 0.4 GiB.
HOST_RESERVE = GIB // 2
# The memory that the self-test takes between the choice of the context and the plan of the pages.
SELF_TEST_BYTES = GIB // 8
# Pages beyond what all running requests can need at once hold the prefix cache.
PREFIX_CACHE_SHARE = 1.0


@dataclass(frozen=True, kw_only=True)
class RunnerConfig:
    """The limits that shape the programs and the state."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int  # tokens of prompt and output of one request
    memory_utilization: float = 0.9  # the share of the device's memory for everything together
    num_pages: int | None = None  # None: as many as fit and are useful
    kv_bytes: int | None = None  # for all pages, if the device is shared with other models; None: what is left
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS
    max_models: int = 0  # models whose weights may be on the device at once; 0: there is one model only
    max_loras: int = 0  # LoRA adapters that may run at once
    max_lora_rank: int = 16  # the rank to which all adapters are padded
    moves_pages: bool = False  # pages may leave the device and come back
    pooling: Pooling | None = None  # pooling of embedding requests; None: there can be no such requests
    lookup: PromptLookup | None = None  # the lookup that gives drafts; None: there is none
    max_draft_rows: int = 0  # rows of the largest speculative step
    draft_pass_tokens: int = 64  # tokens of one pass of a draft network over tokens that it has not read
    max_drawn: int = 0  # most tokens that a speculative step draws; it needs the logits of all of them

    def __post_init__(self) -> None:
        if min(self.max_num_seqs, self.max_num_batched_tokens, self.max_model_len) < 1:
            raise ValueError(
                f"limits are positive: {self.max_num_seqs=} {self.max_num_batched_tokens=} {self.max_model_len=}"
            )
        if not 0 < self.memory_utilization <= 1:
            raise ValueError(f"a share of the memory is above 0 and at most 1: {self.memory_utilization=}")


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """The memory that a model needs on one device, in bytes."""

    weights: int
    state: int  # slot state, token histories, adapter slots, weights of other models, and copies of pages on their way
    temporaries: int  # an upper bound for the largest program
    page: int  # one page: the K/V of all layers and of a draft network, and the tokens if there are drafts


def memory_needs(
    model: Llama,
    attention: PagedAttention,
    limits: RunnerConfig,
    draft: tuple[Llama | EagleHead, PagedAttention] | None = None,
) -> MemoryNeeds:
    """The memory that a model needs on one device. Parameters may be abstract (`sharding.abstract_model`).

    Args:
        draft: a draft model or an EAGLE head, and its attention.
    """
    networks: list[tuple[Llama | EagleHead, PagedAttention]] = [(model, attention), *([] if draft is None else [draft])]
    page_size = attention.spec.page_size
    page = sum(own.page_bytes() * network.config.num_layers for network, own in networks)
    if draft is not None or limits.lookup is not None:
        page += 4 * page_size  # `DeviceState.text`
    if draft is not None:
        page += 4  # `DraftPages.filled`
        if isinstance(draft[0], EagleHead):
            page += page_size * draft[0].config.hidden_size * draft[0].dtype.itemsize // attention.num_shards
    state = state_bytes(
        model.config,
        num_slots=limits.max_num_seqs,
        pages_per_seq=-(-limits.max_model_len // page_size),
        num_shards=attention.num_shards,
    )
    return MemoryNeeds(
        weights=sum(weights_bytes(network) for network, _ in networks),
        state=state
        + adapter_bytes(model, attention, limits)
        + max(0, limits.max_models - 1) * weights_bytes(model)
        + copy_bytes(page, limits),
        temporaries=max(
            temporaries_bound(
                network.config,
                num_tokens=limits.max_num_batched_tokens,
                num_rows=max(limits.max_num_seqs, limits.max_drawn),
                itemsize=jnp.dtype(own.spec.dtype).itemsize,
                num_shards=own.num_shards,
            )
            for network, own in networks
        ),
        page=page,
    )


def adapter_bytes(model: Llama, attention: PagedAttention, limits: RunnerConfig) -> int:
    """The bytes of LoRA adapters on one device: of the slots, and of the adapters that are staged."""
    if not limits.max_loras:
        return 0
    held = adapter_arrays.describe(
        model.config,
        num_slots=limits.max_loras + MAX_STAGED_ADAPTERS,
        rank=limits.max_lora_rank,
        dtype=model.dtype,
        sharding=lambda axes: sharding_of(axes, attention.mesh),
    )
    return adapter_arrays.bytes_of(held)


def copy_bytes(page: int, limits: RunnerConfig) -> int:
    """The bytes on one device of the copies of pages that are on their way to the host or staged. `page`: the bytes of
    one page."""
    return 2 * MAX_PAGE_COPIES * page_copies.pages_of_copy(page) * page if limits.moves_pages else 0


def weights_bytes(model: Llama | EagleHead) -> int:
    """The bytes of the weights on one device."""
    leaves = jax.tree.leaves(nnx.state(model))
    bits_of = {x.dtype: 4 if x.dtype == jnp.int4 else 8 * x.dtype.itemsize for x in leaves}  # a host has int4 in bytes
    return -(-sum(math.prod(x.sharding.shard_shape(x.shape)) * bits_of[x.dtype] for x in leaves) // 8)


def state_bytes(config: LlamaConfig, *, num_slots: int, pages_per_seq: int, num_shards: int) -> int:
    """The bytes of slots, masks and token histories on one device. Every device holds all slots and masks, and its
    share of the histories."""
    row = SlotLayout.width(pages_per_seq) + num_mask_words(config.vocab_size) + config.vocab_size // num_shards
    return 4 * num_slots * row


def temporaries_bound(config: LlamaConfig, *, num_tokens: int, num_rows: int, itemsize: int, num_shards: int) -> int:
    """An upper bound, from shapes, of the bytes that the largest program needs besides its arguments on one device.

    `ModelRunner.warm_up` checks the compiler's own figure against the free memory.
    """
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_token = 6 * config.hidden_size + (3 * attention + 3 * config.intermediate_size) // num_shards
    bytes_per_logit = 6 * 4  # adjusted logits, weights, kept weights, and arrays that a partial fusion leaves
    if num_shards > 1:
        bytes_per_logit += PARTS_ON_CHIPS  # a byte per threshold, if the compiler stores the comparisons
    logits = num_rows * (config.vocab_size // num_shards) * bytes_per_logit
    return num_tokens * per_token * max(itemsize, 4) + logits + 64 * 2**20


class DoesNotFitError(ValueError):
    """The memory has no room for one request of `max_model_len` tokens, but for one of `longest` tokens."""

    def __init__(self, message: str, *, longest: int) -> None:
        room = f"; there is room for one request of {longest} tokens: --max-model-len {longest}" if longest else ""
        super().__init__(message + room)
        self.longest = longest


def fitting_pages(memory: DeviceMemory, needs: MemoryNeeds, limits: RunnerConfig) -> int:
    """The number of pages that fit, without the null page. It is negative if weights, state and temporaries do not
    fit."""
    free = memory.free - (HOST_RESERVE if memory.is_host else 0)
    beside_weights = min(int(memory.total * limits.memory_utilization) - needs.weights, free)
    room = beside_weights - needs.state - needs.temporaries
    return (room if limits.kv_bytes is None else min(room, limits.kv_bytes)) // needs.page - 1


def check_fits(memory: DeviceMemory, needs: MemoryNeeds, limits: RunnerConfig, *, page_size: int) -> None:
    """Checks the plan before the self-test. Raises ValueError if one request of max_model_len tokens, or
    `limits.num_pages` pages, do not fit."""
    if memory.is_host:
        memory = replace(memory, free=memory.free - SELF_TEST_BYTES)
    plan_pages(memory, needs, limits, page_size=page_size)
    fitting = fitting_pages(memory, needs, limits)
    if limits.num_pages is not None and limits.num_pages > fitting:
        raise ValueError(f"{limits.num_pages} K/V pages (--num-pages) do not fit: there is room for {fitting}")


def plan_pages(memory: DeviceMemory, needs: MemoryNeeds, limits: RunnerConfig, *, page_size: int) -> int:
    """The number of pages that requests can own: as many as fit, up to the number that is useful.

    With the useful number, every running request can reach max_model_len, and there are further pages for the prefix
    cache. On a CPU there is another limit.

    Args:
        memory: the device's memory, where `free` is what is left with the weights in place.
        page_size: tokens of a page.

    Raises:
        DoesNotFitError: not even one request of max_model_len tokens fits. The message lists the GiB of each part and
            the flags.
    """
    pages_per_seq = -(-limits.max_model_len // page_size)
    fitting = fitting_pages(memory, needs, limits)
    if fitting < pages_per_seq:
        raise DoesNotFitError(
            _does_not_fit(memory, needs, limits, pages_per_seq * needs.page), longest=max(0, fitting) * page_size
        )
    wanted = useful_pages(needs, limits, page_size=page_size, is_host=memory.is_host)
    return wanted if wanted <= fitting else max(_steady(fitting), pages_per_seq)


def useful_pages(needs: MemoryNeeds, limits: RunnerConfig, *, page_size: int, is_host: bool) -> int:
    """The most pages that are worth their memory."""
    pages_per_seq = -(-limits.max_model_len // page_size)
    wanted = int(pages_per_seq * limits.max_num_seqs * (1 + PREFIX_CACHE_SHARE))
    return min(wanted, max(MAX_CPU_KV_BYTES // needs.page, pages_per_seq)) if is_host else wanted


def _steady(num_pages: int) -> int:
    """The number rounded down to its eight leading bits, at most 1/128 less. The free memory differs a little from
    start to start, and another number of pages would change the shapes of all programs."""
    dropped = max(0, num_pages.bit_length() - 8)
    return num_pages >> dropped << dropped


def _does_not_fit(memory: DeviceMemory, needs: MemoryNeeds, limits: RunnerConfig, sequence_bytes: int) -> str:
    def gib(size: int) -> str:
        return f"{size / GIB:.2f} GiB"

    where = "this machine" if memory.is_host else "each device"
    kept = f". Of free memory, {gib(HOST_RESERVE)} is kept for the compiler" if memory.is_host else ""
    others = " and of the LoRA adapters" * bool(limits.max_loras)
    others += f", weights of {limits.max_models - 1} other models (--max-resident-models)" * (limits.max_models > 1)
    others += ", copies of pages that move" * limits.moves_pages
    state = f"state of the request slots{others}"
    return (
        f"the model does not fit: {where} has {gib(memory.total)}, of which {limits.memory_utilization:.0%} may be "
        f"used and {gib(max(memory.free, 0))} are free besides the weights{kept}. Needed: weights "
        f"{gib(needs.weights)}, temporaries of the largest step {gib(needs.temporaries)}, {state} {gib(needs.state)}, "
        f"K/V pages of one request of {limits.max_model_len} tokens {gib(sequence_bytes)}. Lower --max-model-len "
        f"(K/V), --max-num-batched-tokens (temporaries) or --max-num-seqs (state, temporaries), raise "
        f"--memory-utilization, take --dtype bfloat16 or --quantization, or spread the model over more devices with "
        f"--tensor-parallel-size"
    )
