"""The ragged paged attention that JAX ships for TPUs, in the place of this project's kernels inside a step.

`jax.experimental.pallas.ops.tpu.ragged_paged_attention` takes rotated queries. Keys and values of a head are neighbours
in its pages. It appends nothing, so a scatter of XLA writes the keys and values of a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import ragged_paged_attention as shipped
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.api import PagedAttention
from pallas_kernels.spec import RaggedBatch

LANES = 128  # of a stored head
PAGES_OF_BLOCK, QUERIES_OF_BLOCK = 8, 64
VMEM_BYTES = 64 << 20


class Metadata(NamedTuple):
    """What all layers of a step share."""

    batch: RaggedBatch
    page: jax.Array  # i32[T], of each token's keys and values; past the end for padding
    offset: jax.Array  # i32[T], of the token in its page


@dataclass(frozen=True)
class JaxAttention(PagedAttention):
    """`PagedAttention` over JAX's kernel, for head dims of up to 128 and pages in the type of the computation."""

    @property
    def takes_projection(self) -> bool:
        """It takes rotated queries and keys only."""
        return False

    def kv_pages(self, num_pages: int) -> jax.ShapeDtypeStruct:
        """[P, page, 2 K, 128]."""
        shape = (num_pages, self.spec.page_size, 2 * self.spec.num_kv_heads, LANES)
        assert self.mesh is not None
        return jax.ShapeDtypeStruct(shape, self.spec.kv_dtype, sharding=NamedSharding(self.mesh, self._kv_partition()))

    def page_bytes(self) -> int:
        """The bytes of a page of one layer on one chip."""
        one = self.kv_pages(1)
        return one.size * one.dtype.itemsize // self.num_shards

    def make_metadata(
        self, batch: RaggedBatch, *, num_tokens: int, decode_only: bool, spec_decode: bool = False
    ) -> Metadata:
        """The batch, and where the tokens' keys and values go."""
        index = jnp.arange(num_tokens, dtype=jnp.int32)
        row = jnp.sum(index[:, None] >= batch.query_starts[1:], axis=1, dtype=jnp.int32)
        known = jnp.minimum(row, batch.kv_lens.shape[0] - 1)
        position = batch.kv_lens[known] - batch.query_starts[known + 1] + index
        page = batch.page_table[known, position // self.spec.page_size]
        nowhere = jnp.iinfo(jnp.int32).max
        return Metadata(batch, jnp.where(row < batch.num_rows, page, nowhere), position % self.spec.page_size)

    def __call__(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        kv_pages: jax.Array,
        metadata: Any,
        first_page: jax.Array | int = 0,
        kv_scales: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """As `PagedAttention.__call__`; the pages are one layer's."""
        heads = P(None, self.axis, None)
        return jax.shard_map(
            self.append_and_attend,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, self._kv_partition(), P()),
            out_specs=(heads, self._kv_partition()),
            check_vma=False,
        )(queries, keys, values, kv_pages, metadata)

    def append_and_attend(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array, metadata: Metadata
    ) -> tuple[jax.Array, jax.Array]:
        """As `__call__`, of one chip's heads."""
        both = jnp.stack([keys, values], axis=2).reshape(keys.shape[0], -1, self.spec.head_dim)
        pages = pages.at[metadata.page, metadata.offset].set(padded(both), mode="drop")
        sizes = {"num_kv_pages_per_block": PAGES_OF_BLOCK, "num_queries_per_block": QUERIES_OF_BLOCK}
        return attend(queries, pages, metadata.batch, self.spec.scale, vmem_limit_bytes=VMEM_BYTES, **sizes), pages

    def _kv_partition(self) -> P:
        return P(None, None, self.axis, None)


def attend(queries: jax.Array, pages: jax.Array, batch: RaggedBatch, scale: float, **sizes: int) -> jax.Array:
    """JAX's kernel on queries [T, N, H] and pages [P, page, 2 K, 128]; `sizes`: of its blocks, and of VMEM."""
    output = shipped.ragged_paged_attention(
        padded(queries), pages, batch.kv_lens, batch.page_table, batch.query_starts, batch.num_rows.reshape(1),
        sm_scale=scale, **sizes,
    )  # fmt: skip
    return output[..., : queries.shape[-1]]


def padded(heads: jax.Array) -> jax.Array:
    """[..., H] in the lanes of a stored head."""
    return jnp.pad(heads, [(0, 0)] * (heads.ndim - 1) + [(0, LANES - heads.shape[-1])])
