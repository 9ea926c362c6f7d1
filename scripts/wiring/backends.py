"""The attention backends that an engine may have, and the attention of a model over one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import Backend


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The attention backends that a start may choose from."""

    candidates: Callable[[str, str], tuple[Backend, ...]]  # as `pallas_kernels.api.candidates`
    make: Callable[..., PagedAttention]  # as `paged_attention`


def own_backends() -> Backends:
    """The candidates of `pallas_kernels.api`."""
    from pallas_kernels.api import candidates

    return Backends(candidates=candidates, make=paged_attention)


def paged_attention(
    config: LlamaConfig,
    backend: Backend,
    *,
    dtype: str,
    kv_dtype: str,
    page_size: int,
    mesh: Any,  # a Mesh; an AbstractMesh is enough for a plan; None for one chip
) -> PagedAttention:
    """The attention of a model in its stored form: `config` has the repeated KV heads (`sharding.stored_config`)."""
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import AttentionSpec

    spec = AttentionSpec(
        num_query_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )
    return PagedAttention(spec, backend, mesh)
