"""A model's form on the chips, before weights are loaded: their number, the context, and the attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax

from model.config import LlamaConfig
from model.execution.device_memory import device_memory
from model.execution.memory_plan import DoesNotFitError, RunnerConfig, check_fits, memory_needs
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.packed import pack_for_cpu, pack_for_tpu, use_cpu_products
from model.network.sharding import abstract_model, make_mesh
from model.quantization.forms import EightBit, Rounding, WeightForm
from pallas_kernels.api import PagedAttention
from pallas_kernels.backends import default_page_size
from pallas_kernels.chips import arch_converts_fp8
from pallas_kernels.errors import UnavailableError
from pallas_kernels.spec import Backend
from scripts.building.attention_backend import BACKENDS, Backends, none_can_be_used
from scripts.flags.settings import EngineSettings

CONTEXT_STEP = 256  # tokens


class ModelOnChips:
    """A model's form on `num_chips` chips. Raises ValueError if the model cannot be divided over them.

    Args:
        config: the checkpoint's own config.
        limits: the limits of the engine.
        backends: the attention backends, of which the settings name the candidates.
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
        backends: Backends = BACKENDS,
        draft: ModelOnChips | None = None,
        plan: Callable[[Mapping[str, Any]], EagleHead] | None = None,
    ) -> None:
        self.num_chips = num_chips
        self._platform = platform
        self.draft = draft
        self.mesh = make_mesh(num_chips) if num_chips > 1 else None
        # The forms of weights for a CPU split a kernel's rows in another way than a mesh does.
        self.is_one_cpu = platform == "cpu" and self.mesh is None
        self.form: dict[str, Any] = {
            "dtype": dtype, "mesh": self.mesh, "quantization": quantization, "rounding": rounding
        }  # fmt: skip
        self.has_few_bits = quantization is not None and not isinstance(quantization, EightBit)
        self.planned: Any = abstract_model(config, **self.form) if plan is None else plan(self.form)
        self.config = self.planned.config  # with KV heads repeated if there are more chips than heads
        self.candidates = backends.candidates(settings.attention_backend, platform)
        self.limits = limits
        self._make = backends.make
        self._settings = settings

    def attention(self, backend: Backend) -> PagedAttention:
        """The attention over one backend. The dtype and the size of pages depend on it.

        Raises UnavailableError if the backend does not compute the attention of the model or of the draft.
        """
        self.draft_over(backend)
        return self._attention(backend, self.config, self.mesh)

    def share_of_a_chip(self, backend: Backend) -> PagedAttention:
        """The attention of one chip's heads, on one chip of this process."""
        heads = self.config.num_heads // self.num_chips, self.config.num_kv_heads // self.num_chips
        config = replace(self.config, num_heads=heads[0], num_kv_heads=heads[1])
        return self._attention(backend, config, None)

    def draft_over(self, backend: Backend) -> tuple[Llama | EagleHead, PagedAttention] | None:
        """The draft without weights, and its attention over the model's backend; None: there is no draft.

        Raises ValueError if the backend does not compute its attention.
        """
        return None if self.draft is None else (self.draft.planned, self.draft.attention(backend))

    def pack_for(self, backend: Backend, model: Llama | EagleHead) -> None:
        """Converts the model's weights and operations to the form of the platform, in place. On one CPU with the C
        code's attention, this also chooses the C code for all other operations of a step."""
        if self.is_one_cpu and backend == "cpu":
            pack_for_cpu(model)
        elif self.is_one_cpu:
            use_cpu_products(model)
        elif self._platform == "tpu":
            pack_for_tpu(model, self.mesh)

    def check_fits(self) -> None:
        """Raises ValueError if no candidate computes the attention, or if a chip of this process has too little
        memory."""

        attention = self.first_attention()
        needs = memory_needs(self.planned, attention, self.limits, self.draft_over(attention.backend))
        memory = device_memory(jax.local_devices()[0])
        memory = replace(memory, free=memory.free - needs.weights)
        check_fits(memory, needs, self.limits, page_size=attention.spec.page_size)

    def first_attention(self) -> PagedAttention:
        """The attention over the first candidate that computes it. Raises UnavailableError if there is none."""
        failures = dict[str, str]()
        for backend in self.candidates:
            try:
                return self.attention(backend)
            except UnavailableError as error:
                failures[backend] = str(error)
        raise UnavailableError(none_can_be_used(self._settings.attention_backend, failures))

    def _attention(self, backend: Backend, config: LlamaConfig, mesh: Any) -> PagedAttention:
        dtype = self.form["dtype"]
        kv_dtype, _ = choose_kv_dtype(self._settings.kv_cache_dtype, dtype, backend)
        page_size = self._settings.page_size or default_page_size(backend, self.limits.max_model_len)
        return self._make(config, backend, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, mesh=mesh)


def choose_kv_dtype(
    asked: str, dtype: str, backend: Backend, arch: tuple[int, int] | None = None
) -> tuple[str, str | None]:
    """The dtype of the K/V pages, and a remark if it is not the requested one.

    Args:
        asked: the value of --kv-cache-dtype.
        dtype: the dtype of the computation.
        arch: the compute capability of a GPU that is not attached.
    """
    if asked == "auto":
        return dtype, None
    if asked == "int8":
        return "int8", None
    if not backend.startswith("gpu"):
        return "int8", f"not {asked}: int8 is the 8-bit type of the {backend} attention"
    if arch is None:
        from pallas_kernels.gpu import device  # it imports Mosaic GPU

        arch = device.current().arch
    if arch_converts_fp8(arch):
        return "float8_e4m3fn", None
    return "int8", f"not {asked}: this GPU has no instruction that converts fp8"


def choose_chips_and_context(
    asked_chips: int | None,
    num_devices: int,
    asked_context: int | None,
    trained_context: int,
    check: Callable[[int, int], None],
    *,
    num_hosts: int = 1,
) -> tuple[int, int]:
    """The number of chips that share the model, and the tokens of the longest request.

    The chips are `asked_chips`, or else the least power of two on which the model fits. Several hosts use all their
    chips. If `asked_context` is None, the context is the one that the model was trained for, or else the longest that
    fits on as many chips as possible, in steps of CONTEXT_STEP tokens. Several hosts could find different contexts, so
    they need `asked_context`.

    Args:
        num_devices: the number of chips, on all hosts together.
        check: raises ValueError if the model cannot be divided over a number of chips, or DoesNotFitError if requests
            of a context do not fit on them.

    Raises:
        ValueError: the model fits on no number of chips (the error is that of the largest number, or the first about
            the attention backend), or `asked_chips` is not the number of all chips of several hosts.
    """
    context, numbers = choose_model_len(asked_context, trained_context), [asked_chips or num_devices]
    if num_hosts > 1 and numbers != [num_devices]:
        raise ValueError(
            f"--tensor-parallel-size {asked_chips}: {num_hosts} hosts share a model over all their {num_devices} chips"
        )
    if num_hosts == 1 and asked_chips is None:
        numbers = [2**power for power in range(num_devices.bit_length())]
    refusal = ValueError("there is no chip")
    for number in numbers:
        try:
            check(number, context)
        except ValueError as error:
            if not isinstance(refusal, UnavailableError):
                refusal = error
        else:
            return number, context
    if asked_context is not None or num_hosts > 1 or not isinstance(refusal, DoesNotFitError):
        raise refusal
    longest = refusal.longest // CONTEXT_STEP * CONTEXT_STEP
    if not longest:
        raise refusal
    check(numbers[-1], longest)
    return numbers[-1], longest


def describe_idle(num_chips: int, num_devices: int) -> str:
    """A remark on how many of the chips are used, and how to use the others."""
    used = f"{num_chips} of {num_devices} chip{'s' if num_devices > 1 else ''}"
    idle = num_devices - num_chips
    if not idle:
        return used
    engines = num_devices // num_chips
    more = [f"--tensor-parallel-size {num_devices} answers one request sooner"]
    if engines > 1:
        more.append(f"--data-parallel-size {engines} answers more requests at once")
    return f"{used}; {idle} {'is' if idle == 1 else 'are'} idle: {', '.join(more)}"


def choose_model_len(asked: int | None, trained: int) -> int:
    """The context length in tokens. Raises ValueError if it exceeds the length that the model was trained for."""
    if asked is not None and asked > trained:
        raise ValueError(f"--max-model-len {asked} is more than the {trained} tokens that the model was trained for")
    return asked or trained
