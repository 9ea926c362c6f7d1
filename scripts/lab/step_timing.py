"""Times a runner's steps with all rows in use, without engine or server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batcher.slots import SlotLayout
from batcher.step import PATCH_BLOCK, Bucket, Capacity, PackedLayout, StepInput

if TYPE_CHECKING:
    import jax

    from model.execution.runner import ModelRunner

MAX_STEPS_AHEAD = 2  # as in the engine: the next step is dispatched before the result of this one is read


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The times of one bucket in milliseconds; medians unless noted."""

    num_tokens: int
    num_rows: int
    context: int  # tokens in pages before the step
    step_ms: float  # from result to result; the next step is dispatched ahead
    slowest_ms: float
    dispatch_ms: float  # duration of execute()
    products_ms: float  # the step's matrix products and norms: no attention, pages, sampling or state

    @property
    def tokens_per_s(self) -> float:
        """The step's tokens in a second."""
        return self.num_tokens / self.step_ms * 1e3

    @property
    def ratio(self) -> float:
        """The step's time in units of its products'."""
        return self.step_ms / self.products_ms


def time_bucket(runner: ModelRunner, bucket: Bucket, *, context: int, steps: int, sampling: dict[str, float]) -> Timing:
    """Times `steps` full steps of the bucket. Sequences begin with `context` tokens, and the steps add to them."""
    capacity = runner.capacity()
    admit(runner, bucket, context, sampling)
    dispatch_s, arrivals, ahead = [], [], []
    for _ in range(steps + MAX_STEPS_AHEAD):
        step = full_step(bucket, capacity, context)
        before = time.perf_counter()
        ahead.append(runner.execute(step))
        dispatch_s.append(time.perf_counter() - before)
        if len(ahead) == MAX_STEPS_AHEAD:
            ahead.pop(0).result()
            arrivals.append(time.perf_counter())
    for handle in ahead:
        handle.result()
    step_s = np.diff(arrivals)[1:]
    return Timing(
        num_tokens=bucket.num_tokens,
        num_rows=bucket.num_rows,
        context=context,
        step_ms=float(np.median(step_s)) * 1e3,
        slowest_ms=float(np.max(step_s)) * 1e3,
        dispatch_ms=float(np.median(dispatch_s)) * 1e3,
        products_ms=_median_ms(products_only(runner, bucket), steps),
    )


def products_only(runner: ModelRunner, bucket: Bucket) -> Callable[[], jax.Array]:
    """Compiles a program of the matrix products and norms of the bucket's step and nothing else."""
    import jax
    import jax.numpy as jnp

    from model.compiling.compiler_options import compiler_options

    described, tokens = runner.described, np.zeros(bucket.num_tokens, np.int32)

    def products(weights: list[jax.Array], tokens: jax.Array) -> jax.Array:
        model = described.model_of(weights)
        no_kv = [None] * described.model_config.num_layers

        def attend(q: jax.Array, k: jax.Array, v: jax.Array, kv: None) -> tuple[jax.Array, None]:
            # In place of attention: XLA would drop keys and values without a use.
            return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), kv

        hidden, _ = model(tokens, jnp.zeros_like(tokens), no_kv, attend)
        return jnp.max(model.logits(hidden[: bucket.num_rows]), axis=-1)

    lowered = jax.jit(products, out_shardings=described.everywhere).lower(
        described.weights_like, described.sent(tokens.shape)
    )
    compiled = lowered.compile(compiler_options=compiler_options(described.device.platform))
    return lambda: compiled(runner.weights, tokens)


def admit(runner: ModelRunner, bucket: Bucket, context: int, sampling: dict[str, float]) -> None:
    """Gives every row its slot, `context` tokens, and pages for the further ones. The pages have no real content."""
    capacity = runner.capacity()
    width = SlotLayout.width(capacity.pages_per_seq)
    state = np.zeros((bucket.num_rows, width), np.int32)
    state[:, SlotLayout.KV_LEN] = context
    state[:, SlotLayout.at("top_k")] = sampling["top_k"]
    state[:, SlotLayout.at("temperature")] = np.float32(sampling["temperature"]).view(np.int32)
    state[:, SlotLayout.at("top_p")] = np.float32(sampling["top_p"]).view(np.int32)
    state[:, SlotLayout.at("repetition_penalty")] = np.float32(1).view(np.int32)
    pages = np.arange(bucket.num_rows * capacity.pages_per_seq) % capacity.num_pages + 1
    state[:, SlotLayout.PAGE_TABLE :] = pages.reshape(bucket.num_rows, -1)
    flat = np.stack([np.arange(state.size, dtype=np.int32), state.ravel()])
    padding = np.full((2, -state.size % PATCH_BLOCK), capacity.num_slots * width, np.int32)
    blocks = np.concatenate([flat, padding], axis=1).reshape(2, -1, PATCH_BLOCK).transpose(1, 0, 2)
    step = full_step(bucket, capacity, context)
    runner.execute(StepInput(bucket=bucket, packed=step.packed, patches=tuple(blocks.copy()))).result()


def full_step(bucket: Bucket, capacity: Capacity, context: int) -> StepInput:
    """A step whose rows are all in use. Prompt chunks have `context` tokens before them."""
    layout = PackedLayout(bucket)
    packed, parts = np.zeros(layout.size, np.int32), layout.sections()
    width = SlotLayout.width(capacity.pages_per_seq)
    rows = np.arange(bucket.num_rows)
    packed[:3] = (bucket.num_rows if bucket.decode_only else 0), bucket.num_rows, bucket.num_tokens
    packed[parts["slots"]] = rows
    packed[parts["q_lens"]] = bucket.num_tokens // bucket.num_rows
    packed[parts["emits"]] = 1
    packed[parts["tokens"]] = -1 if bucket.decode_only else np.arange(bucket.num_tokens) % capacity.vocab_size
    packed[parts["patch_indices"]] = capacity.num_slots * width
    if not bucket.decode_only:  # repeats the same chunk: prompts do not grow
        packed[parts["patch_indices"]][: bucket.num_rows] = rows * width + SlotLayout.KV_LEN
        packed[parts["patch_values"]][: bucket.num_rows] = context
    return StepInput(bucket=bucket, packed=packed)


def _median_ms(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        before = time.perf_counter()
        np.asarray(run())
        times.append(time.perf_counter() - before)
    return float(np.median(times)) * 1e3
