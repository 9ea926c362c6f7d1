"""The memory of each chip: what a model needs there, and how many K/V pages fit besides."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pallas_kernels.chips import GPUS
from scripts.flags.settings import EngineSettings
from scripts.lab.planning.roofline import Roofline, roofline
from scripts.lab.planning.target import Target

if TYPE_CHECKING:
    from jax.sharding import AbstractMesh, Mesh

    from batcher.buckets import BucketConfig
    from model.config import LlamaConfig
    from model.execution.device_memory import DeviceMemory
    from model.execution.memory_plan import MemoryNeeds
    from model.network.llama import Llama
    from model.quantization.forms import Rounding
    from pallas_kernels.api import PagedAttention

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """The parts of one chip's memory, in bytes."""

    needs: MemoryNeeds
    num_pages: int
    page_size: int  # tokens
    max_model_len: int
    buckets: BucketConfig
    num_models: int = 1
    max_models: int = 0  # on the device at once; 0: there is one model only
    others: int = 0  # of `needs.state`, the weights of other models

    @property
    def kv_bytes(self) -> int:
        """The bytes of all pages, with the null page."""
        return (self.num_pages + 1) * self.needs.page

    @property
    def total(self) -> int:
        """The bytes of all parts."""
        return self.needs.weights + self.kv_bytes + self.needs.temporaries + self.needs.state

    @property
    def pages_per_seq(self) -> int:
        """The pages of a request of full length."""
        return -(-self.max_model_len // self.page_size)


@dataclass(frozen=True, kw_only=True)
class Account:
    """The memory of the largest step on one chip, in bytes."""

    num_layers: int
    num_pages: int  # of its arguments
    arguments: int  # weights, K/V pages and the state of the request slots
    temporaries: int
    code: int | None  # None: not known
    cpu_s: float  # that tracing and compiling took; of several programs, the sum
    is_extrapolated: bool = False


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A model in its stored form, split over `chips` devices of the target."""

    name: str
    settings: EngineSettings
    target: Target
    chips: int
    device_gib: float
    config: LlamaConfig
    model: Llama
    attention: PagedAttention
    dtype: str
    kv_dtype: str
    quantization: str | None  # as `forms.form_named` reads it
    rounding: Rounding | None  # of the inputs of projections
    max_model_len: int
    pool_share: float  # of the device's memory that is JAX's

    def memory(self, settings: EngineSettings, account: Account | None = None) -> MemoryPlan:
        """The memory for the limits of `settings`. Raises ValueError, with the GiB of each part, if not even one
        request fits.

        Args:
            account: the compiler's, of the largest step; None: the weights are counted from shapes, and of the
                temporaries an upper bound.
        """
        from model.execution.memory_plan import memory_needs, plan_pages, weights_bytes
        from scripts.building.limits import bucket_config, runner_config

        buckets = bucket_config(settings, self.target.platform, self.chips)
        limits = runner_config(settings, buckets, self.max_model_len)
        needs = memory_needs(self.model, self.attention, limits)
        others = max(0, limits.max_models - 1) * weights_bytes(self.model)
        if account is not None:
            weights = account.arguments - (needs.state - others) - (account.num_pages + 1) * needs.page
            needs = replace(needs, weights=weights, temporaries=account.temporaries)
        page_size = self.attention.spec.page_size
        return MemoryPlan(
            needs=needs,
            num_pages=settings.num_pages or plan_pages(self._device(needs), needs, limits, page_size=page_size),
            page_size=page_size,
            max_model_len=self.max_model_len,
            buckets=buckets,
            num_models=limits.max_models if settings.models_folder else 1 + len(settings.named_models),
            max_models=limits.max_models,
            others=others,
        )

    def with_models(self, settings: EngineSettings) -> EngineSettings:
        """The settings with a number of models on the device. As in an engine it is by default the largest that leaves
        half of the K/V pages of one model, and at least 2."""
        from model.execution.memory_plan import fitting_pages, memory_needs
        from scripts.building.limits import LEAST_MODELS, bucket_config, runner_config

        if not settings.has_models or settings.max_resident_models is not None:
            return settings
        limits = runner_config(settings, bucket_config(settings, self.target.platform, self.chips), self.max_model_len)

        def num_pages(num_models: int) -> int:
            counted = replace(limits, max_models=num_models)
            needs = memory_needs(self.model, self.attention, counted)
            return fitting_pages(self._device(needs), needs, counted)

        half, counts = num_pages(1) // 2, range(LEAST_MODELS, len(settings.named_models) + 2)
        most = max((count for count in counts if num_pages(count) >= half), default=LEAST_MODELS)
        return replace(settings, max_resident_models=most)

    def _device(self, needs: MemoryNeeds) -> DeviceMemory:
        from model.execution.device_memory import DeviceMemory

        total = int(self.device_gib * GIB * self.pool_share)
        return DeviceMemory(total=total, free=total - needs.weights, is_host=False)

    @cached_property
    def bring_s(self) -> float:
        """The seconds in which a model comes from the host's memory, at the published bandwidth of the link."""
        from model.execution.memory_plan import weights_bytes

        return weights_bytes(self.model) / self.target.host_bytes_per_s

    @cached_property
    def roofline(self) -> Roofline:
        """The seconds of its steps."""
        import jax.numpy as jnp

        from scripts.lab.accounts.compile_step import step_bytes

        page_bytes = self.attention.page_bytes() * self.config.num_layers
        return roofline(
            self.config,
            self.target,
            weights_read=step_bytes(self.model, self.attention, num_rows=1, context=1)["weights_read"],
            weight_itemsize=1 if self.quantization else jnp.dtype(self.dtype).itemsize,
            kv_token_bytes=page_bytes / self.attention.spec.page_size,
            chips=self.chips,
            rounding=self.rounding,
        )


def size_up(
    settings: EngineSettings,
    target: Target,
    chips: int,
    device_gib: float | None = None,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    num_layers: int | None = None,
) -> Sizes:
    """The sizes from the checkpoint's config and files, or a preset. Needs neither the chip nor the weights' bytes.

    Args:
        device_gib: memory of a device, in place of the chip's own.
        mesh: of `chips` devices, if programs are compiled for them.
        num_layers: in place of the model's own.

    Raises:
        ValueError: the model cannot be used, or does not divide over the chips.
    """
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.sharding import AbstractMesh

    from model.loading.merged import weights_of
    from model.loading.source import resolve
    from model.loading.stored_weights import has_weights
    from model.network.sharding import TENSOR_AXIS, abstract_model
    from pallas_kernels.backends import default_page_size
    from pallas_kernels.chips import GPU_POOL_SHARE
    from pallas_kernels.spec import Backend
    from scripts.building.attention_backend import paged_attention
    from scripts.building.chips import choose_kv_dtype, choose_model_len
    from scripts.building.weights import choose_dtype, choose_quantization, choose_rounding

    platform, chip = target.platform, target.chip
    source = resolve(settings.model, revision=settings.revision, weights=False)
    config, stored = source.config, None
    held = (source.base or source).weights
    if settings.load_format != "dummy" and held is not None and has_weights(held):
        stored = weights_of(source, settings.load_format)
        config = stored.config
    products: dict[str, Any] = {"reads": chip.reads, "rounded_rows": chip.rounded_rows}
    quantization, _ = choose_quantization(settings.weight_form, stored, config, **products)
    rounding, _ = choose_rounding(quantization, stored, **products)
    if num_layers is not None:
        config = replace(config, num_layers=num_layers)
    mesh = mesh or AbstractMesh((chips,), (TENSOR_AXIS,))
    dtype, _ = choose_dtype(settings.dtype, config.checkpoint_dtype, platform)
    max_model_len = choose_model_len(settings.max_model_len, config.max_position_embeddings)
    model = abstract_model(config, dtype=dtype, mesh=mesh, quantization=quantization, rounding=rounding)
    backend = Backend(platform)
    arch = GPUS[chip.name].arch if platform == "gpu" else None
    kv_dtype, _ = choose_kv_dtype(settings.kv_cache_dtype, dtype, backend, arch)
    page_size = settings.page_size or default_page_size(backend, max_model_len, chip.name)
    return Sizes(
        name=source.name,
        settings=settings,
        target=target,
        chips=chips,
        device_gib=device_gib or chip.memory_gib,
        config=model.config,
        model=model,
        attention=paged_attention(
            model.config, backend, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, mesh=mesh
        ),
        dtype=dtype,
        kv_dtype=kv_dtype,
        quantization=None if quantization is None else str(quantization),
        rounding=rounding,
        max_model_len=max_model_len,
        pool_share=GPU_POOL_SHARE if platform == "gpu" else 1.0,
    )
