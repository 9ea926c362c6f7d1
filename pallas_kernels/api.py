"""The operation: append a step's new K/V to their pages, and attend over the pages. One signature, several backends.

`spec.py` has the types of the operation and the shape legend of `pallas_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import quantised, validate
from pallas_kernels.backends import implementation
from pallas_kernels.spec import AttentionSpec, Backend, RaggedBatch


@dataclass(frozen=True)
class PagedAttention:
    """The operation bound to a backend and, on several chips, to a mesh axis over which KV heads are split."""

    spec: AttentionSpec
    backend: Backend
    mesh: Mesh | None = None
    axis: str = "tensor"

    def __post_init__(self) -> None:
        if self.mesh is not None and self.axis not in self.mesh.shape:
            raise ValueError(f"the mesh has no such axis: {self.axis=} {self.mesh.axis_names=}")
        validate.spec(self.local_spec, self.backend)

    @property
    def num_shards(self) -> int:
        """The number of chips over which the KV heads are split."""
        return 1 if self.mesh is None else self.mesh.shape[self.axis]

    @property
    def local_spec(self) -> AttentionSpec:
        """The spec of the kernels on one chip."""
        return self.spec.shard(self.num_shards)

    def kv_pages(self, num_pages: int) -> jax.ShapeDtypeStruct:
        """The shape, dtype and sharding of one layer's K/V pages. `num_pages` includes the null page."""
        kernels = implementation(self.backend)
        local: jax.ShapeDtypeStruct = kernels.kv_pages(self.local_spec, num_pages)
        shape = tuple(n * self.num_shards if i == kernels.KV_HEAD_AXIS else n for i, n in enumerate(local.shape))
        sharding = None if self.mesh is None else NamedSharding(self.mesh, self._kv_partition())
        return jax.ShapeDtypeStruct(shape, local.dtype, sharding=sharding)

    @property
    def page_axis(self) -> int:
        """The axis of `kv_pages` along which the pages are."""
        return int(implementation(self.backend).PAGE_AXIS)

    def page_bytes(self) -> int:
        """The bytes of one page of one layer on one chip."""
        one = implementation(self.backend).kv_pages(self.local_spec, 1)
        return one.size * one.dtype.itemsize

    def make_metadata(
        self, batch: RaggedBatch, *, num_tokens: int, decode_only: bool, spec_decode: bool = False
    ) -> Any:
        """A pytree of the arrays that all layers of a step share. The program computes it once per step.

        `decode_only` and `spec_decode` are static. They let a backend compute the same results in another way.

        Args:
            num_tokens: T, the padded number of tokens.
            decode_only: every row of the program has at most one token (num_tokens == S).
            spec_decode: every row has a few tokens.

        Raises:
            ValueError: the shapes of `batch` do not fit together.
        """
        validate.batch(batch, num_tokens=num_tokens, decode_only=decode_only)
        static = {"num_tokens": num_tokens, "decode_only": decode_only, "spec_decode": spec_decode}
        return implementation(self.backend).make_metadata(batch, self.local_spec, **static, **_form(self.backend))

    def __call__(
        self,
        queries: jax.Array,  # [T, N, H]
        keys: jax.Array,  # [T, K, H], the keys of this step's tokens
        values: jax.Array,  # [T, K, H]
        kv_pages: jax.Array,  # the pages of one layer, or of all layers one after the other (first_page); donate it
        metadata: Any,
        first_page: jax.Array | int = 0,  # where this layer's pages begin in kv_pages
        kv_scales: jax.Array | None = None,  # f32[2, K], scales of K and V: the unit of each head's values
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the attention output [T, N, H] and the pages with the new K/V in them.

        Rows of the output past the last real token are undefined but finite. Raises ValueError if shapes or dtypes do
        not fit the spec. `kv_scales` is required for 8-bit pages, and only for them.
        """
        validate.operands(queries, keys, values, kv_scales, self.spec)
        append_and_attend: Callable[..., Any] = partial(
            implementation(self.backend).append_and_attend, spec=self.local_spec, **_options(self.backend)
        )
        if kv_scales is not None and not self._is_tpu:  # the TPU kernels round and scale themselves
            append_and_attend = quantised.with_scales(append_and_attend, self.spec.kv_dtype)
        scales = () if kv_scales is None else (kv_scales,)
        if self.mesh is None:
            return append_and_attend(queries, keys, values, kv_pages, metadata, first_page, *scales)
        heads = P(None, self.axis, None)
        return jax.shard_map(
            append_and_attend,
            mesh=self.mesh,
            in_specs=(heads, heads, heads, self._kv_partition(), P(), P(), *(P(None, self.axis) for _ in scales)),
            out_specs=(heads, self._kv_partition()),
            check_vma=False,
        )(queries, keys, values, kv_pages, metadata, jnp.int32(first_page), *scales)

    @property
    def takes_projection(self) -> bool:
        """Whether the backend supports `projected`: its kernels rotate queries and keys as they read them."""
        return self._is_tpu and implementation(self.backend).takes_projection(self.local_spec)

    def projected(
        self,
        columns: jax.Array,  # [T, (N + 2K) * H]: for each chip, the queries, keys and values of its heads
        cos: jax.Array,  # f32[T, 1, H / 2]: the rotation of each pair (i, i + H / 2) of a head
        sin: jax.Array,  # f32[T, 1, H / 2]
        kv_pages: jax.Array,
        metadata: Any,
        first_page: jax.Array | int = 0,
        kv_scales: jax.Array | None = None,  # f32[2, K]
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates queries and keys, appends the new K/V, and attends. Returns the output [T, N * H] and the pages.

        Raises ValueError if the backend does not support this for the spec (`takes_projection`), or if shapes or dtypes
        do not fit the spec.
        """
        if not self.takes_projection:
            raise ValueError(f"queries and keys must be rotated before: {self.backend=} {self.local_spec=}")
        validate.projection(columns, cos, sin, kv_scales, self.spec)
        append_and_attend: Callable[..., Any] = partial(
            implementation(self.backend).append_and_attend_projected, spec=self.local_spec, **_options(self.backend)
        )
        scales = () if kv_scales is None else (kv_scales,)
        if self.mesh is None:
            return append_and_attend(columns, cos, sin, kv_pages, metadata, first_page, *scales)
        by_head = P(None, self.axis)
        return jax.shard_map(
            append_and_attend,
            mesh=self.mesh,
            in_specs=(by_head, P(), P(), self._kv_partition(), P(), P(), *(by_head for _ in scales)),
            out_specs=(by_head, self._kv_partition()),
            check_vma=False,
        )(columns, cos, sin, kv_pages, metadata, jnp.int32(first_page), *scales)

    @property
    def _is_tpu(self) -> bool:
        return self.backend in (Backend.TPU, Backend.TPU_INTERPRET)

    def _kv_partition(self) -> P:
        axis = implementation(self.backend).KV_HEAD_AXIS
        return P(*(self.axis if i == axis else None for i in range(axis + 1)))


def candidates(requested: str | None, platform: str) -> tuple[Backend, ...]:
    """The backends for `platform` ('cpu', 'tpu', 'gpu' or 'cuda'), the preferred one first. If a backend is requested
    by name, it is the only one.

    Raises:
        ValueError: the name is unknown, or names a compiled kernel that the platform cannot run.
    """
    native = {
        "cpu": (Backend.CPU, Backend.REFERENCE),
        "tpu": (Backend.TPU, Backend.TPU_JAX, Backend.REFERENCE),
        "gpu": (Backend.GPU, Backend.GPU_MMA, Backend.REFERENCE),
    }
    native["cuda"] = native["gpu"]
    if platform not in native:
        raise ValueError(f"no attention backend for {platform=}; it can be one of {sorted(native)}")
    if requested is None or requested == "auto":
        return native[platform]
    names = [backend.value for backend in Backend]
    if requested not in names:
        raise ValueError(f"unknown attention backend {requested!r}; it can be 'auto' or one of {names}")
    backend = Backend(requested)
    if not backend.is_interpreted and backend is not Backend.REFERENCE and backend not in native[platform]:
        interpreted = f"{requested}-interpret"
        instead = f"{interpreted!r} to interpret it on a CPU (slow), or " if interpreted in names else ""
        raise ValueError(f"the attention backend {requested!r} cannot run on {platform=}; use {instead}'auto'")
    return (backend,)


def _options(backend: Backend) -> dict[str, bool]:
    has_interpreter = backend not in (Backend.REFERENCE, Backend.CPU, Backend.TPU_JAX)
    return _form(backend) | ({"interpret": backend.is_interpreted} if has_interpreter else {})


def _form(backend: Backend) -> dict[str, bool]:
    return {"mma_only": True} if backend in (Backend.GPU_MMA, Backend.GPU_MMA_INTERPRET) else {}
