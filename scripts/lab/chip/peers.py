"""Other implementations of attention on the same chip, timed next to the paged kernels in one run.

All take a batch of equal rows. Implementations without pages get contiguous K and V. A server does not have these, so
such implementations are a bound and no alternative.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels.tpu import jax_kernel
from scripts.lab.chip.operands import Operands

Store = tuple[jax.Array, ...]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another implementation of attention, for the same operands."""

    store: Callable[[Operands], Store]  # K and V in the peer's form
    attend: Callable[[Operands, jax.Array, Store], jax.Array]  # [B, Q, N, H] -> the same


def _contiguous(operands: Operands) -> Store:
    """Keys and values [B, L, K, H]."""
    batch = len(operands.rows)
    return tuple(x.reshape(batch, -1, *x.shape[1:]) for x in (operands.keys, operands.values))


def _dense(
    operands: Operands, queries: jax.Array, store: Store, *, implementation: Literal["xla", "cudnn"]
) -> jax.Array:
    """Dense attention. A decode reads every key. A prefill starts at the first token, so a causal mask is correct."""
    keys, values = store
    causal, scale = not operands.decode_only, operands.spec.scale
    return jax.nn.dot_product_attention(
        queries, keys, values, is_causal=causal, scale=scale, implementation=implementation
    )


def _pages(operands: Operands) -> Store:
    return (operands.pages(),)


def _gather(operands: Operands, queries: jax.Array, store: Store) -> jax.Array:
    """Dense attention after a gather of all pages into contiguous arrays."""
    gathered = store[0][operands.batch.page_table]  # [B, pages, 2, K, page, H]
    kv_len = operands.rows[0][1]
    batch, _, _, heads, _, head_dim = gathered.shape
    halves = (gathered[:, :, kind].swapaxes(2, 3).reshape(batch, -1, heads, head_dim)[:, :kv_len] for kind in (0, 1))
    return _dense(operands, queries, tuple(halves), implementation="xla")


def _cudnn_pages(operands: Operands) -> Store:
    """cuDNN's form: separate keys and values [P, K, page, H], without the null page."""
    pages = operands.pages()[1:]
    return pages[:, 0], pages[:, 1]


def _cudnn_paged(operands: Operands, queries: jax.Array, store: Store) -> jax.Array:
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # private: jax has no public name for it

    keys, values = store
    rows = operands.batch.kv_lens.shape[0]
    table = (operands.batch.page_table - 1)[:, None, :, None]  # [B, 1, pages, 1]
    query_lens = jnp.full((rows,), operands.rows[0][0], jnp.int32)
    mask = cudnn.MaskType.PADDING if operands.decode_only else cudnn.MaskType.PADDING_CAUSAL
    output = cudnn.paged_attention(
        queries.swapaxes(1, 2), keys, values, query_lens, operands.batch.kv_lens, table, table,
        scale=operands.spec.scale, mask_type=mask, qkv_layout="BNTH",
    )  # fmt: skip
    return output.swapaxes(1, 2)


GPU_PEERS = {
    "gather everything": Peer(store=_pages, attend=_gather),
    "jax.nn, xla, contiguous": Peer(store=_contiguous, attend=partial(_dense, implementation="xla")),
    "jax.nn, cudnn, contiguous": Peer(store=_contiguous, attend=partial(_dense, implementation="cudnn")),
    "cudnn, paged": Peer(store=_cudnn_pages, attend=_cudnn_paged),
}


def _combined_pages(operands: Operands) -> Store:
    """The form of jax's kernel: [P, page, 2 K, 128], keys and values of a head next to each other."""
    pages = operands.pages()  # [P, 2, K, page, H]
    num_pages, _, heads, page_size, head_dim = pages.shape
    return (jax_kernel.padded(pages.transpose(0, 3, 2, 1, 4).reshape(num_pages, page_size, 2 * heads, head_dim)),)


def _ragged_paged_attention(operands: Operands, queries: jax.Array, store: Store) -> jax.Array:
    flat = queries.reshape(-1, *queries.shape[2:])
    return jax_kernel.attend(flat, store[0], operands.batch, operands.spec).reshape(queries.shape)


TPU_PEERS = {
    **{name: GPU_PEERS[name] for name in ("gather everything", "jax.nn, xla, contiguous")},
    "jax's ragged paged attention": Peer(store=_combined_pages, attend=_ragged_paged_attention),
}
