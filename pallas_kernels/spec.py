"""The types of the operation, which every backend and everybody above them shares.

Shape legend of this room: `T` tokens in a step (padded), `S` sequences (rows) in a step (padded), `P` pages, `N` query
heads, `K` KV heads, `H` head dim, `G = N // K` query heads per KV head.

A step is a ragged batch: row `i` brings tokens `query_starts[i]:query_starts[i + 1]`, the last ones of a sequence that
is `kv_lens[i]` tokens long with them; its earlier K/V lie in the pages that `page_table[i]` lists. Attention is causal
within the sequence. Single-token rows, which bring exactly one token, stand first, so that a backend may treat them
apart: they are decodes, and the last token of a prompt where only that one is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import jax


class Backend(StrEnum):
    REFERENCE = "reference"  # plain jnp, any platform
    TPU = "tpu"
    TPU_INTERPRET = "tpu-interpret"  # the TPU kernel, interpreted on the CPU
    GPU = "gpu"
    GPU_INTERPRET = "gpu-interpret"  # the GPU kernel, interpreted on the CPU


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """What is static about the operation. Head counts are the whole model's; sharding divides them."""

    num_query_heads: int
    num_kv_heads: int  # as stored: after replication where there are fewer than chips
    head_dim: int
    page_size: int  # tokens
    dtype: Any  # of queries, new keys and values, and the output
    kv_dtype: Any  # of the pages. A hook for 8-bit K/V (see `kv_scales`): today it equals dtype

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def shard(self, num_shards: int) -> AttentionSpec:
        """The spec that one of `num_shards` chips sees. ValueError where the heads do not divide."""
        if num_shards < 1:
            raise ValueError(f"heads are split over one chip at least: {num_shards=}")
        if self.num_kv_heads % num_shards or self.num_query_heads % num_shards:
            raise ValueError(
                f"heads do not divide over the chips: {self.num_query_heads=} {self.num_kv_heads=} {num_shards=}"
            )
        return AttentionSpec(
            num_query_heads=self.num_query_heads // num_shards,
            num_kv_heads=self.num_kv_heads // num_shards,
            head_dim=self.head_dim,
            page_size=self.page_size,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
        )


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["page_table", "kv_lens", "query_starts", "num_singles", "num_rows"],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Which tokens of the step belong to which sequence. All of it is data: no value here ever recompiles."""

    page_table: jax.Array  # i32[S, pages_per_seq]; entries past a row's pages are the null page (0)
    kv_lens: jax.Array  # i32[S], this step's tokens included; 0 in padding rows
    query_starts: jax.Array  # i32[S + 1], non-decreasing; query_starts[num_rows:] all equal the number of real tokens
    num_singles: jax.Array  # i32[]; single-token rows: rows [0, num_singles) bring one token each
    num_rows: jax.Array  # i32[]; rows [num_rows, S) are padding
