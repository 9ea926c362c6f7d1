"""A model's form on a number of chips: shapes, placement and attention, before weights are loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from scripts.building.attention_backend import none_can_be_used
from scripts.building.choices import choose_kv_dtype
from scripts.flags.settings import EngineSettings

if TYPE_CHECKING:
    from model.config import LlamaConfig
    from model.execution.memory_plan import RunnerConfig
    from model.network.eagle import EagleHead
    from model.network.llama import Llama
    from model.quantization.forms import Rounding, WeightForm
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.spec import Backend

MakeAttention = Callable[..., "PagedAttention"]  # with the arguments of `attention_backend.paged_attention`


class ModelOnChips:
    """A model's form on `num_chips` chips. Raises ValueError if the model cannot be divided over them.

    Args:
        config: the checkpoint's own config.
        limits: the limits of the engine.
        draft: the draft model or head on the same chips; None: there is none.
        plan: describes the network in the form of these chips, if it is not a Llama of `config`.
    """

    def __init__(
        self,
        config: LlamaConfig,
        num_chips: int,
        settings: EngineSettings,
        limits: RunnerConfig,
        *,
        dtype: str,
        quantization: WeightForm | None,
        rounding: Rounding | None,
        platform: str,
        draft: ModelOnChips | None = None,
        plan: Callable[[Mapping[str, Any]], EagleHead] | None = None,
    ) -> None:
        from model.network.sharding import abstract_model, make_mesh

        self.num_chips = num_chips
        self._platform = platform
        self.draft = draft
        self.mesh = make_mesh(num_chips) if num_chips > 1 else None
        # The forms of weights for a CPU split a kernel's rows in another way than a mesh does.
        self.is_one_cpu = platform == "cpu" and self.mesh is None
        self.form: dict[str, Any] = {
            "dtype": dtype, "mesh": self.mesh, "quantization": quantization, "rounding": rounding
        }  # fmt: skip
        self.planned: Any = abstract_model(config, **self.form) if plan is None else plan(self.form)
        self.config = self.planned.config  # with KV heads repeated if there are more chips than heads
        self._settings = settings
        self._limits = limits

    def attention(self, make: MakeAttention, backend: Backend) -> PagedAttention:
        """The attention over one backend. The dtype and the size of pages depend on it.

        Raises UnavailableError if the backend does not compute the attention of the model or of the draft.
        """
        self.draft_over(make, backend)
        return self._attention(make, backend, self.config, self.mesh)

    def share_of_a_chip(self, make: MakeAttention, backend: Backend) -> PagedAttention:
        """The attention of one chip's heads, on one chip of this process."""
        heads = self.config.num_heads // self.num_chips, self.config.num_kv_heads // self.num_chips
        config = replace(self.config, num_heads=heads[0], num_kv_heads=heads[1])
        return self._attention(make, backend, config, None)

    def draft_over(self, make: MakeAttention, backend: Backend) -> tuple[Llama | EagleHead, PagedAttention] | None:
        """The draft without weights, and its attention over the model's backend; None: there is no draft.

        Raises ValueError if the backend does not compute its attention.
        """
        return None if self.draft is None else (self.draft.planned, self.draft.attention(make, backend))

    def pack_for(self, backend: Backend, model: Llama | EagleHead) -> None:
        """Converts the model's weights and operations to the form of the platform, in place. On one CPU with the C
        code's attention, this also chooses the C code for all other operations of a step."""
        from model.network.packed import pack, pack_for_tpu, use_cpu_products

        if self.is_one_cpu and backend == "cpu":
            pack(model)
        elif self.is_one_cpu:
            use_cpu_products(model)
        elif self._platform == "tpu":
            pack_for_tpu(model, self.mesh)

    def check_fits(self, make: MakeAttention, candidates: Sequence[Backend]) -> None:
        """Raises ValueError if no candidate computes the attention, or if a chip of this process has too little
        memory."""
        import jax

        from model.execution.device_memory import device_memory
        from model.execution.memory_plan import check_fits, memory_needs

        attention = self.first_attention(make, candidates)
        needs = memory_needs(self.planned, attention, self._limits, self.draft_over(make, attention.backend))
        memory = device_memory(jax.local_devices()[0])
        memory = replace(memory, free=memory.free - needs.weights)
        check_fits(memory, needs, self._limits, page_size=attention.spec.page_size)

    def first_attention(self, make: MakeAttention, candidates: Sequence[Backend]) -> PagedAttention:
        """The attention over the first candidate that computes it. Raises UnavailableError if there is none."""
        from pallas_kernels.spec import UnavailableError

        failures = dict[str, str]()
        for backend in candidates:
            try:
                return self.attention(make, backend)
            except UnavailableError as error:
                failures[backend] = str(error)
        raise UnavailableError(none_can_be_used(self._settings.attention_backend, failures))

    def _attention(self, make: MakeAttention, backend: Backend, config: LlamaConfig, mesh: Any) -> PagedAttention:
        from pallas_kernels.layout import default_page_size

        dtype = self.form["dtype"]
        kv_dtype, _ = choose_kv_dtype(self._settings.kv_cache_dtype, dtype, backend)
        page_size = self._settings.page_size or default_page_size(backend, self._limits.max_model_len)
        return make(config, backend, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, mesh=mesh)
