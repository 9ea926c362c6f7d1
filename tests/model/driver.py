"""Drives a runner by hand: the smallest host that the contract of `batcher.step` allows, for the tests of this room."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from batcher.request import SamplingParams
from batcher.slots import SlotLayout
from batcher.step import (
    MASK_BLOCK,
    PATCH_BLOCK,
    AdapterWrite,
    Bucket,
    PackedLayout,
    PenaltyReset,
    StepInput,
    StepOutput,
)
from model.config import LlamaConfig
from model.execution.kv_range import measured_range
from model.execution.memory_plan import RunnerConfig
from model.execution.runner import ModelRunner
from model.network.llama import Llama
from pallas_kernels.api import PagedAttention
from pallas_kernels.quantised import scales_of
from pallas_kernels.spec import AttentionSpec, Backend
from tests.model import dense_attention

TINY = LlamaConfig(
    vocab_size=199,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    checkpoint_dtype="float32",
    bos_token_id=None,
    eos_token_ids=(1,),
)


def tiny_model(seed: int = 0, config: LlamaConfig = TINY) -> Llama:
    """Random weights, large enough that tokens depend on what was attended to."""
    graph, weights = _tiny_weights(seed, config)
    return nnx.merge(graph, jax.tree.map(jnp.array, weights))


@cache
def _tiny_weights(seed: int, config: LlamaConfig) -> tuple[Any, Any]:
    """The model's graph, and its state as NumPy arrays."""
    graph, state = nnx.split(_tiny_model(seed, config))
    return graph, jax.tree.map(np.array, state)


@partial(nnx.jit, static_argnames=("seed", "config"))  # one program, where each of its operations would be compiled
def _tiny_model(seed: int, config: LlamaConfig) -> Llama:
    model = Llama(config, dtype=jnp.float32, rngs=nnx.Rngs(seed))
    state = nnx.state(model)
    for _, variable in nnx.to_flat_state(state):
        if variable.get_value().ndim == 2:
            variable.set_value(variable.get_value() * 10)
    nnx.update(model, state)
    return model


def paged_attention(
    config: LlamaConfig = TINY, *, page_size: int = 8, kv_dtype=jnp.float32, **options
) -> PagedAttention:
    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=jnp.float32,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(spec, Backend.REFERENCE, **options)


def int8_scales(model: Llama) -> np.ndarray:
    """f32[L, 2, K], measured as at a start."""
    return np.asarray(scales_of(jnp.asarray(measured_range(model)), jnp.int8))


def tiny_runner(model: Llama | None = None, *, kv_dtype=jnp.float32, **limits) -> ModelRunner:
    settings = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_pages": 40} | limits
    model, attention = tiny_model() if model is None else model, paged_attention(kv_dtype=kv_dtype)
    kv_scales = int8_scales(model) if attention.spec.has_kv_scales else None
    return ModelRunner(model, attention, RunnerConfig(**settings), kv_scales)


def dense_logits(model: Llama, tokens: list[int]) -> np.ndarray:
    """f32[len(tokens), V] by one pass without pages."""
    return np.asarray(dense_attention.dense_logits(model, np.array(tokens, np.int32)))


@dataclass
class Row:
    """One request in a slot. `num_computed` counts tokens whose K/V are in pages."""

    slot: int
    prompt: list[int]
    pages: list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(max_tokens=64, temperature=0))
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    has_emitted: bool = False  # in this slot: its LAST_TOKEN is this row's
    mask: np.ndarray | None = None  # i32[num_mask_words] of every token that it draws
    adapter_slot: int = 0  # of its LoRA adapter; 0: it has none

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


def bits(*values: float) -> list[int]:
    return np.array(values, np.float32).view(np.int32).tolist()


def admission(row: Row, width: int) -> np.ndarray:
    """i32[2, n]: patches that set every column of the row's slot."""
    s, at = row.sampling, SlotLayout.at
    state = np.zeros(width, np.int32)
    state[SlotLayout.KV_LEN] = row.num_computed
    state[SlotLayout.ADAPTER] = row.adapter_slot
    state[at("top_k")] = s.top_k
    floats = bits(s.temperature, s.top_p, s.min_p, s.presence_penalty, s.frequency_penalty, s.repetition_penalty)
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    for name, value in zip(names, floats, strict=True):
        state[at(name)] = value
    seed = np.array([row.seed & 0xFFFFFFFF, row.seed >> 32], np.uint32)
    state[at("seed") : at("seed") + 2] = seed.view(np.int32)
    state[at("min_kv_len")] = len(row.prompt) + s.min_tokens
    state[at("num_stop_ids")] = len(row.stop_ids)
    state[at("stop_ids") : at("stop_ids") + len(row.stop_ids)] = row.stop_ids
    state[at("num_bias")] = len(s.logit_bias)
    for i, (token, value) in enumerate(s.logit_bias):
        state[at("bias_ids") + i], state[at("bias_values") + i] = token, bits(value)[0]
    state[at("has_mask")] = row.mask is not None
    state[at("wants_logprobs")] = s.logprobs is not None or bool(s.logprob_token_ids)
    state[at("logprob_token_ids") : at("logprob_token_ids") + len(s.logprob_token_ids)] = s.logprob_token_ids
    state[at("wants_sampled_logprobs")] = s.sampled_logprobs
    state[SlotLayout.PAGE_TABLE : SlotLayout.PAGE_TABLE + len(row.pages)] = row.pages
    return np.stack([row.slot * width + np.arange(width, dtype=np.int32), state])


def pack(
    bucket: Bucket,
    chunks: list[tuple[Row, int]],  # (row, tokens to compute)
    *,
    num_slots: int,
    width: int,
    admit: list[Row] = (),
    from_host: bool = False,  # send the tokens of decodes, too, instead of -1
    adapters: tuple[AdapterWrite, ...] = (),
) -> StepInput:
    """Decodes first. A row emits if its chunk reaches its last known token."""
    chunks = sorted(chunks, key=lambda chunk: chunk[1] != 1)
    layout = PackedLayout(bucket)
    packed, parts = np.zeros(layout.size, np.int32), layout.sections()
    view = {name: packed[part] for name, part in parts.items()}
    nowhere = num_slots * width
    view["slots"][:] = num_slots
    view["patch_indices"][:] = nowhere
    start = 0
    for i, (row, count) in enumerate(chunks):
        stop = row.num_computed + count
        view["slots"][i], view["q_lens"][i], view["emits"][i] = row.slot, count, stop == len(row.tokens)
        known = row.tokens[row.num_computed : stop]
        is_decode = stop == len(row.tokens) and count == 1 and row.has_emitted and not from_host
        view["tokens"][start : start + count] = -1 if is_decode else known
        if "targets" in view:
            following = row.prompt[row.num_computed + 1 : stop + 1]
            view["targets"][start : start + count] = following + [-1] * (count - len(following))
        start += count
    packed[:3] = sum(count == 1 for _, count in chunks), len(chunks), start
    patches = np.concatenate([admission(row, width) for row in admit], axis=1) if admit else np.zeros((2, 0), np.int32)
    blocks = []
    for i in range(0, patches.shape[1], PATCH_BLOCK):
        block = np.full((2, PATCH_BLOCK), nowhere, np.int32)
        part = patches[:, i : i + PATCH_BLOCK]
        block[:, : part.shape[1]] = part
        blocks.append(block)
    resets = tuple(
        PenaltyReset(slot=row.slot, prompt=np.array(row.prompt, np.int32), output=np.array(row.output, np.int32))
        for row in admit
    )
    masks = [np.array([row.slot, *row.mask], np.int32) for row, _ in chunks if row.mask is not None]
    block = np.stack(masks + [np.full_like(masks[0], num_slots)] * (MASK_BLOCK - len(masks))) if masks else None
    return StepInput(
        bucket=bucket,
        packed=packed,
        patches=tuple(blocks),
        penalty_resets=resets,
        masks=() if block is None else (block,),
        adapters=adapters,
    )


def run(
    runner: ModelRunner, bucket: Bucket, chunks: list[tuple[Row, int]], *, admit: list[Row] = (), **options
) -> StepOutput:
    """One step, its tokens appended to the rows that emit."""
    capacity = runner.capacity()
    width = SlotLayout.width(capacity.pages_per_seq)
    step = pack(bucket, chunks, num_slots=capacity.num_slots, width=width, admit=admit, **options)
    output = runner.execute(step).result()
    ordered = sorted(chunks, key=lambda chunk: chunk[1] != 1)
    for i, (row, count) in enumerate(ordered):
        row.num_computed += count
        if row.num_computed == len(row.tokens):
            row.output.append(int(output.tokens[i, 0]))
            row.has_emitted = True
    return output
