"""The backends' modules, which `api` calls. Only `pallas_kernels` knows how a backend lays out its pages.

Each module has

- `validate(spec)`: raises UnavailableError, before tracing, if the backend does not support the spec of one chip;
- `kv_pages(spec, num_pages)`: the shape and dtype of one layer's pages on one chip;
- `PAGE_AXIS`, `KV_HEAD_AXIS`: the axes of `kv_pages` that count the pages, and that are split over chips;
- `make_metadata` and `append_and_attend`: see `PagedAttention`.
"""

from __future__ import annotations

from typing import Any

from pallas_kernels import reference
from pallas_kernels.spec import Backend


def implementation(backend: Backend) -> Any:
    """The backend's module. It is imported only when it is used, because the toolchains of the kernels take seconds to
    import."""
    if backend is Backend.REFERENCE:
        return reference
    if backend is Backend.CPU:
        from pallas_kernels.cpu import attention as cpu

        return cpu
    if backend is Backend.TPU_JAX:
        from pallas_kernels.tpu import jax_kernel

        return jax_kernel
    if backend.is_of_tpus:
        from pallas_kernels.tpu import attention as tpu

        return tpu
    from pallas_kernels.gpu import attention as gpu

    return gpu


def default_page_size(backend: Backend, max_model_len: int, chip: str | None = None) -> int:
    """The number of tokens of a page if the user gives none. `chip`: a TPU's name in `chips`; None: the attached
    TPU."""
    if backend.is_of_tpus:
        from pallas_kernels.tpu import blocks

        return blocks.default_page_size(chip or (blocks.this_chip() if not backend.is_interpreted else None))
    if backend.is_of_gpus:
        return 64
    return 16 if max_model_len <= 2048 else 64
