"""The types of the operation, shared by every backend and by the callers.

Shape legend of `pallas_kernels`: `T` tokens in a step (padded), `S` sequences (rows) in a step (padded), `P` pages, `N`
query heads, `K` KV heads, `H` head dim, `G = N // K` query heads per KV head.

A step is a ragged batch. Row `i` has the tokens `query_starts[i]:query_starts[i + 1]`. They are the last tokens of a
sequence of `kv_lens[i]` tokens. The K/V of its earlier tokens are in the pages that `page_table[i]` lists. Attention is
causal within the sequence. Rows with exactly one token come first, so a backend may have a separate kernel for them.
These single-token rows are decodes, and prompts with one token left to compute.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp


class Backend(StrEnum):
    """An implementation of the operation. The value is the name in `--attention-backend`."""

    REFERENCE = "reference"  # plain jnp, any platform
    CPU = "cpu"  # in C, compiled for the CPU that it runs on
    TPU = "tpu"
    TPU_INTERPRET = "tpu-interpret"  # the TPU kernel, interpreted on the CPU
    TPU_JAX = "tpu-jax"  # the TPU kernel that JAX ships, which JAX's interpreters do not support
    GPU = "gpu"
    GPU_INTERPRET = "gpu-interpret"  # the GPU kernel, interpreted on the CPU
    GPU_MMA = "gpu-mma"  # the GPU kernels without Hopper's own instructions (wgmma); other GPUs always run these
    GPU_MMA_INTERPRET = "gpu-mma-interpret"

    @property
    def is_of_tpus(self) -> bool:
        """Whether the backend has kernels of TPUs, on a TPU or interpreted."""
        return self.value.startswith("tpu")

    @property
    def is_of_gpus(self) -> bool:
        """Whether the backend has the kernels of GPUs, on a GPU or interpreted."""
        return self.value.startswith("gpu")

    @property
    def is_interpreted(self) -> bool:
        """Whether the backend interprets a chip's kernels on the CPU."""
        return self.value.endswith("-interpret")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static part of the operation. Head counts are the whole model's; sharding divides them."""

    num_query_heads: int
    num_kv_heads: int  # the stored number: heads are repeated if there are fewer heads than chips
    head_dim: int
    page_size: int  # tokens
    dtype: Any  # dtype of queries, new keys and values, and the output
    kv_dtype: Any  # dtype of the pages: `dtype`, or an 8-bit dtype in `quantised.LARGEST`, which needs scales

    @property
    def has_kv_scales(self) -> bool:
        """Whether the pages have 8-bit values, which are multiplied by a scale."""
        return jnp.dtype(self.kv_dtype) != self.dtype

    @property
    def scale(self) -> float:
        """The factor of the scores before the softmax."""
        return self.head_dim**-0.5

    def shard(self, num_shards: int) -> AttentionSpec:
        """The spec of one of `num_shards` chips. Raises ValueError if the heads do not divide."""
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """The rows of a step. All fields are data: no value recompiles a program."""

    page_table: jax.Array  # i32[S, pages_per_seq]; entries past a row's pages are the null page (0)
    kv_lens: jax.Array  # i32[S], tokens of the sequence including this step's; 0 in padding rows
    query_starts: jax.Array  # i32[S + 1], non-decreasing; query_starts[num_rows:] all equal the number of real tokens
    num_singles: jax.Array  # i32[]; rows [0, num_singles) have one token each
    num_rows: jax.Array  # i32[]; rows [num_rows, S) are padding

    def destinations(self, num_tokens: int, page_size: int) -> tuple[jax.Array, jax.Array]:
        """The page and the place in it of every token of the step, i32[T] each; the page of a padding token is -1."""
        token = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.searchsorted(self.query_starts[1:], token, side="right", method="compare_all")
        is_real = token < self.query_starts[-1]
        row = jnp.minimum(row, self.kv_lens.shape[0] - 1)
        position = jnp.where(is_real, self.kv_lens[row] - self.query_starts[row + 1] + token, 0)
        page = self.page_table[row, position // page_size]
        return jnp.where(is_real, page, -1), position % page_size
