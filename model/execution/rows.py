"""The rows of a step inside its program: the state of their slots before and after the step.

Shape legend: `T` tokens of the step (padded), `S` rows (padded), `W` columns of the slot state.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from batcher.slots import SlotLayout
from batcher.step import Bucket, PackedLayout
from pallas_kernels.spec import Backend, RaggedBatch


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class StepRows:
    """The rows of a step, after the patches."""

    slots: jax.Array  # i32[S]; num_slots in padding rows, whose writes are dropped
    state: jax.Array  # i32[S, W]
    starts: jax.Array  # i32[S + 1], index of each row's first token in the step; then the end of the last row
    past: jax.Array  # i32[S], tokens in pages before this step
    kv_lens: jax.Array  # i32[S], tokens in pages after this step; also the position of the token that the row draws
    emits: jax.Array  # bool[S]


def sections(packed: jax.Array, bucket: Bucket, backend: Backend) -> dict[str, jax.Array]:
    """The sections of the host's buffer i32[PackedLayout.size], by their names in `PackedLayout`.

    A GPU runs a step as a CUDA graph, and XLA updates every node of the graph whose arguments have moved. The host's
    buffer has a new address in each step. So GPUs read it once, into a temporary behind a barrier, and no layer refers
    to it. The temporary is one element longer: XLA would leave out a copy of the same shape.
    """
    if backend.is_of_gpus:
        packed = lax.optimization_barrier(jnp.pad(packed, (0, 1)))
    return {name: packed[part] for name, part in PackedLayout(bucket).sections().items()}


def step_rows(slots: jax.Array, sent: dict[str, jax.Array]) -> StepRows:
    """The rows of a step.

    Args:
        slots: i32[num_slots, W], patched.
        sent: the sections of the packed buffer.
    """
    state = slots.at[sent["slots"]].get(mode="clip")
    is_real = sent["slots"] < slots.shape[0]
    past = jnp.where(is_real, state[:, SlotLayout.KV_LEN], 0)
    starts = jnp.cumulative_sum(sent["q_lens"], include_initial=True)
    return StepRows(
        slots=sent["slots"],
        state=state,
        starts=starts,
        past=past,
        kv_lens=past + sent["q_lens"],
        emits=sent["emits"] != 0,
    )


def ragged_batch(rows: StepRows, header: jax.Array, page_size: int) -> RaggedBatch:
    """The batch of these rows for attention."""
    page_table = rows.state[:, SlotLayout.PAGE_TABLE :]
    num_pages = -(-rows.kv_lens // page_size)
    # After the row's own pages, the table may still hold page ids of the slot's previous request. These become the
    # null page.
    is_owned = jnp.arange(page_table.shape[1], dtype=jnp.int32) < num_pages[:, None]
    num_singles, num_rows = header[0], header[1]
    return RaggedBatch(
        page_table=jnp.where(is_owned, page_table, 0),
        kv_lens=rows.kv_lens,
        query_starts=rows.starts,
        num_singles=num_singles,
        num_rows=num_rows,
    )


def advance(slots: jax.Array, rows: StepRows, drawn: jax.Array, kv_lens: jax.Array) -> jax.Array:
    """Writes the LAST_TOKEN (`drawn`) and KV_LEN (`kv_lens`) of the rows, i32[S] each, to the slots. The columns are
    adjacent, so one scatter writes both."""
    token = jnp.where(rows.emits, drawn, rows.state[:, SlotLayout.LAST_TOKEN])
    # Without the barrier XLA reads the old state inside the scatter. On GPUs it then copies the whole state before and
    # after the scatter.
    values = lax.optimization_barrier(jnp.stack([token, kv_lens], axis=1))
    return slots.at[rows.slots, : SlotLayout.KV_LEN + 1].set(values, mode="drop")


def read_once(rows: StepRows) -> StepRows:
    """The rows behind a barrier, for a program that uses them after `advance`. Without the barrier, XLA would read the
    slots again there, and would copy them before they are written."""
    return lax.optimization_barrier(rows)


def row_of_tokens(rows: StepRows, num_tokens: int) -> tuple[jax.Array, jax.Array]:
    """The row i32[T] of each token, and whether the token is real, bool[T]. Padding tokens have the last row."""
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= rows.starts[1:], axis=1, dtype=jnp.int32)
    return jnp.minimum(row, rows.starts.shape[0] - 2), index < rows.starts[-1]
