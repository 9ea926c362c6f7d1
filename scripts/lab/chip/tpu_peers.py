"""Other implementations of attention on a TPU, compared with the paged kernels in one run: see `gpu_peers`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from scripts.lab.chip.gpu_operands import Operands
from scripts.lab.chip.gpu_peers import PEERS as EVERYWHERE
from scripts.lab.chip.gpu_peers import Peer, Store

LANES = 128  # the kernel of jax stores every head dim in so many


def _combined_pages(operands: Operands) -> Store:
    """The form of jax's kernel: [P, page, 2 K, 128], keys and values of a head next to each other."""
    pages = operands.pages(with_new=True)  # [P, 2, K, page, H]
    num_pages, _, heads, page_size, head_dim = pages.shape
    combined = pages.transpose(0, 3, 2, 1, 4).reshape(num_pages, page_size, 2 * heads, head_dim)
    return (jnp.pad(combined, ((0, 0), (0, 0), (0, 0), (0, LANES - head_dim))),)


def _ragged_paged_attention(operands: Operands, queries: jax.Array, store: Store) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    head_dim, batch = operands.spec.head_dim, operands.batch
    flat = queries.reshape(-1, *queries.shape[2:])
    output = ragged_paged_attention(
        jnp.pad(flat, ((0, 0), (0, 0), (0, LANES - head_dim))),
        *store,
        batch.kv_lens,
        batch.page_table,
        batch.query_starts,
        batch.num_rows.reshape(1),
        sm_scale=operands.spec.scale,
    )
    return output[..., :head_dim].reshape(queries.shape)


PEERS = {
    **{name: EVERYWHERE[name] for name in ("gather everything", "jax.nn, xla, contiguous")},
    "jax's ragged paged attention": Peer(store=_combined_pages, attend=_ragged_paged_attention),
}
