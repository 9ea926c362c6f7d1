"""The layout of each backend's pages. Only `pallas_kernels` knows it: the model and the batcher know pages and
counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.spec import AttentionSpec, Backend


def kv_pages(spec: AttentionSpec, backend: Backend, num_pages: int) -> jax.ShapeDtypeStruct:
    """The shape and dtype of one layer's pages on one chip."""
    family = backend.split("-")[0]
    if family in ("reference", "cpu"):
        # Heads before tokens: the tokens of one head in a page are contiguous, as XLA's CPU products need them. The C
        # code cuts a page's keys of one head into pieces of 16 tokens, each [H, 16], in the same memory.
        shape = (2, num_pages, spec.num_kv_heads, spec.page_size, spec.head_dim)
    elif family == "gpu":
        # One page of one head is one box of the copy engine: contiguous, and the head axis splits over chips.
        shape = (num_pages, 2, spec.num_kv_heads, spec.page_size, spec.head_dim)
    elif backend is Backend.TPU_JAX:
        from pallas_kernels.tpu import jax_kernel

        return jax_kernel.kv_pages(spec, num_pages)
    else:
        from pallas_kernels.tpu import layout as tpu_layout

        return tpu_layout.kv_pages(spec, num_pages)
    return jax.ShapeDtypeStruct(shape, jnp.dtype(spec.kv_dtype))


def page_axis(backend: Backend) -> int:
    """The axis of `kv_pages` that counts the pages."""
    return 1 if backend in (Backend.REFERENCE, Backend.CPU) else 0


def kv_head_axis(backend: Backend) -> int:
    """The axis of `kv_pages` that is split over chips."""
    if backend in (Backend.TPU, Backend.TPU_INTERPRET):
        from pallas_kernels.tpu import layout as tpu_layout

        return tpu_layout.KV_HEAD_AXIS
    return 2


def default_page_size(backend: Backend, max_model_len: int, chip: str | None = None) -> int:
    """The number of tokens of a page if the user gives none. `chip`: a TPU's name in `chips`; None: the attached
    TPU."""
    family = backend.split("-")[0]
    if family == "tpu":
        from pallas_kernels.tpu import blocks

        return blocks.default_page_size(chip or (blocks.this_chip() if not backend.is_interpreted else None))
    if family == "gpu":
        return 64
    return 16 if max_model_len <= 2048 else 64
