"""The program of several decode steps: every row draws up to `Bucket.num_steps` tokens, and the host is not asked
between them.

A row's tokens are those of as many single steps: each one reads the slot's last token, writes its K/V, and draws with
the row's parameters, seed and position. A row that draws fewer tokens than others is padding afterwards.

Shape legend: `S` rows of the step (padded), `N` num_steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from batcher.request import LogprobsMode
from batcher.slots import SlotLayout
from batcher.step import Bucket, Variant
from model.execution.rows import StepRows, advance, ragged_batch, sections, step_rows
from model.execution.step import (
    DeviceState,
    KvScales,
    OutputLayout,
    Step,
    apply_patches,
    draw,
    run_model,
    step_adapters,
    vocabulary_of,
)
from model.network.llama import Llama
from model.network.lora import AdapterSlots
from model.sampling.greedy import all_finite, greedy_and_finite
from pallas_kernels.api import PagedAttention

Outputs = dict[str, jax.Array]


def make_multi_step(
    bucket: Bucket,
    rebuild: Callable[[Any], Llama],
    attention: PagedAttention,
    *,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
    max_loras: int = 0,
) -> Step:
    """The steps of one bucket. A row draws as many tokens as it brings."""

    def step(
        weights: Any, kv_scales: KvScales, state: DeviceState, packed: jax.Array, slots_of_adapters: AdapterSlots = ()
    ) -> tuple[DeviceState, jax.Array]:
        assert state.text is None, "a program of several steps keeps no text"
        model = rebuild(weights)
        sent = sections(packed, bucket, attention.backend)
        slots = apply_patches(state.slots, jnp.stack([sent["patch_indices"], sent["patch_values"]]))
        vocabulary = vocabulary_of(state.history, model, attention)
        counts, num_rows = sent["q_lens"], sent["header"][1]
        layout = OutputLayout(bucket, 0)

        def one(number: jax.Array, carry: tuple[DeviceState, Outputs]) -> tuple[DeviceState, Outputs]:
            state, outputs = carry
            is_active = number < counts
            rows = step_rows(state.slots, sent | {"q_lens": is_active.astype(jnp.int32)})
            rows = replace(rows, emits=is_active)  # others keep their slots as they are
            batch = ragged_batch(_shown(rows, num_rows), jnp.stack([num_rows, num_rows]), attention.spec.page_size)
            metadata = attention.make_metadata(batch, num_tokens=bucket.num_tokens, decode_only=True)
            tokens = jnp.where(rows.emits, rows.state[:, SlotLayout.LAST_TOKEN], 0)
            positions = jnp.where(rows.emits, rows.past, 0)
            adapters = step_adapters(slots_of_adapters, rows, bucket, model, max_loras)
            hidden, kv, _ = run_model(
                model, tokens, positions, state.kv, kv_scales, attention, metadata, adapters=adapters
            )
            logits = model.logits(hidden)  # f32[S, V]
            history = state.history
            found: Outputs = {}
            if bucket.variant is Variant.GREEDY:
                drawn, is_finite = greedy_and_finite(logits)
            else:
                is_finite = all_finite(logits)
                drawn, found, history = draw(vocabulary, logits, history, state.masks, rows, logprobs_mode)
            slots = advance(state.slots, rows, drawn, rows.kv_lens)
            written = {
                name: lax.dynamic_update_index_in_dim(outputs[name], x, number, axis=1)
                for name, x in ({"tokens": drawn, "finite": is_finite.astype(jnp.int32)} | found).items()
            }
            return replace(state, slots=slots, history=history, kv=kv), written

        outputs = {name: jnp.zeros(shape, dtype) for name, (shape, dtype) in layout.shapes().items()}
        state, outputs = lax.fori_loop(0, jnp.max(counts), one, (replace(state, slots=slots), outputs))
        return state, layout.join(outputs)

    return step


def _shown(rows: StepRows, num_rows: jax.Array) -> StepRows:
    """The rows as attention takes them: those that are not active read and write the null page."""
    index = jnp.arange(rows.starts.shape[0], dtype=jnp.int32)
    return replace(
        rows,
        state=jnp.where(rows.emits[:, None], rows.state, 0),
        starts=jnp.minimum(index, num_rows),
        kv_lens=jnp.where(rows.emits, rows.kv_lens, jnp.where(index[:-1] < num_rows, 1, 0)),
    )
