"""Executes the batcher's steps: one program per bucket, compiled before the first request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from batcher.step import (
    MASK_BLOCK,
    PATCH_BLOCK,
    Bucket,
    Capacity,
    PackedLayout,
    PenaltyReset,
    StepHandle,
    StepInput,
    StepOutput,
    Variant,
)
from model.compiling.compilation import Compilation
from model.compiling.compile_cache import CompileCounter
from model.compiling.compiler_options import compiler_options
from model.compiling.traced_programs import Program, TracedPrograms, fingerprint
from model.execution import memory_plan, wide_copies
from model.execution.device_memory import device_memory
from model.execution.memory_plan import RunnerConfig
from model.execution.speculative_step import make_speculative_step
from model.execution.step import (
    HISTORY_BLOCK_SIZE,
    DeviceState,
    KvScales,
    OutputLayout,
    apply_patches,
    bring_masks,
    history_blocks,
    make_step,
    reset_history,
)
from model.network.llama import Llama
from model.network.sharding import sharding_of
from pallas_kernels.api import PagedAttention

CPU_FIRST_RUNS_S = 2.0
_PACKAGES = [Path(__file__).parents[2] / name for name in ("batcher", "model", "pallas_kernels")]  # the programs' code


class StepResult:
    """A dispatched step. The copy of its one output array to the host starts at dispatch."""

    def __init__(self, output: jax.Array, layout: OutputLayout) -> None:
        self._output = output
        self._layout = layout

    def result(self) -> StepOutput:
        """Blocks until the device is done. Call it from a thread that may block."""
        return self._layout.split(np.asarray(self._output))


class ModelRunner:
    """`batcher.step.Runner` over a Llama.

    Compiling needs shapes only, so a runner can be made before the weights are loaded. Make it from
    `abstract_model(...)`, call `start_compiling`, then `place` with the loaded model.

    Args:
        model: its weights are in place, or abstract with shape and sharding. They are on one device or sharded over
            `attention.mesh`.
        attention: the paged attention of the step, bound to its backend and mesh.
        config: the limits. Memory is planned at once; the K/V pages are allocated when the weights are in place.
        kv_scales: as for `place`, if the model's weights are in place.
        traced_folder: where traced programs are kept from one start to the next; None: each start traces all.

    Raises:
        ValueError: the model does not fit (see `memory_plan.plan_pages`).
    """

    def __init__(
        self,
        model: Llama,
        attention: PagedAttention,
        config: RunnerConfig,
        kv_scales: np.ndarray | None = None,
        *,
        traced_folder: Path | None = None,
    ) -> None:
        self._compiles = CompileCounter()
        self._model_config = model.config
        self._attention = attention
        self._config = config
        # Flattened once: walking the module tree at every call would take longer than dispatching the step.
        structure, weights = nnx.split(model)
        self._made_from = (repr(structure), attention)  # and from the arguments' shapes
        self._traced_folder = traced_folder
        self._traced: TracedPrograms | None = None
        self._tree: Any  # a PyTreeDef; jax does not export its type
        leaves, self._tree = jax.tree.flatten(weights)
        self._rebuild: Callable[[Any], Llama] = lambda x: nnx.merge(structure, jax.tree.unflatten(self._tree, x))
        self._weights_like: list[jax.ShapeDtypeStruct] = _described(leaves)
        if attention.mesh is None:
            (device,) = leaves[0].sharding.device_set
            self._everywhere: jax.sharding.Sharding = SingleDeviceSharding(device)
            self._by_vocab: jax.sharding.Sharding = self._everywhere
            by_head: jax.sharding.Sharding = self._everywhere
        else:
            self._everywhere = NamedSharding(attention.mesh, P())
            self._by_vocab = sharding_of(("rows", "vocab"), attention.mesh)
            by_head = sharding_of(("rows", "heads"), attention.mesh)
        scales: Any = jax.ShapeDtypeStruct((2, attention.spec.num_kv_heads), jnp.float32, sharding=by_head)
        self._kv_scales_like: list[Any] = [scales if attention.spec.has_kv_scales else None] * model.config.num_layers

        self._narrow_kernels = wide_copies.narrow_kernels(model, self._a_device().platform, attention.mesh)
        self._pages_per_seq = -(-config.max_model_len // attention.spec.page_size)
        self._num_pages = self._plan_pages(model) if config.num_pages is None else config.num_pages
        if self._num_pages < self._pages_per_seq:
            raise ValueError(
                f"one request of {config.max_model_len=} tokens needs {self._pages_per_seq} pages of "
                f"{attention.spec.page_size} tokens: {config.num_pages=}"
            )
        self._state_like = self._describe_state()
        self._programs: dict[Bucket, Any] = {}
        self._compilation: Compilation[Bucket | str] | None = None
        if _is_in_place(model):
            self.place(model, kv_scales)

    def place(self, model: Llama, kv_scales: np.ndarray | None = None) -> None:
        """Takes the loaded weights of the model that the runner was made for, and allocates the state.

        Args:
            kv_scales: f32[L, 2, K], the scales of keys and values in 8-bit pages; None for other pages.
        """
        self._weights, tree = jax.tree.flatten(nnx.split(model)[1])
        if self._tree != tree or _described(self._weights) != self._weights_like:
            raise ValueError("these are not the weights that the runner was made for: shapes or placement differ")
        if (kv_scales is not None) != self._attention.spec.has_kv_scales:
            raise ValueError(f"K/V scales come with pages of 8 bits only: {self._attention.spec.kv_dtype=}")
        self._kv_scales: KvScales = self._kv_scales_like
        if kv_scales is not None:
            self._kv_scales = [
                jax.device_put(scales, like.sharding)
                for scales, like in zip(kv_scales, self._kv_scales_like, strict=True)
            ]
        self._state = self._allocate()

    def capacity(self) -> Capacity:
        """The limits of the scheduler."""
        return Capacity(
            num_slots=self._config.max_num_seqs,
            num_pages=self._num_pages,
            page_size=self._attention.spec.page_size,
            max_model_len=self._config.max_model_len,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            vocab_size=self._model_config.vocab_size,
            pooling=self._config.pooling,
            keeps_text=self._config.lookup is not None,
        )

    @property
    def num_compiles(self) -> int:
        """Programs compiled, or read from the disk, by this process since the runner was made: unplanned ones, too."""
        return self._compiles.total

    def start_compiling(self, buckets: Iterable[Bucket]) -> None:
        """Starts compiling in threads; `warm_up` of the same buckets waits for the programs. A caller that does not
        reach `warm_up` must call `stop_compiling`; otherwise the process exits only after the last program."""
        programs: dict[Bucket | str, Program] = {bucket: self._step_program(bucket) for bucket in buckets}
        state = self._state_like
        reset = partial(reset_history, mesh=self._attention.mesh)
        block = (MASK_BLOCK, 1 + state.masks.shape[1])
        programs["patch"] = self._update_program(apply_patches, state.slots, (2, PATCH_BLOCK))
        programs["bring masks"] = self._update_program(bring_masks, state.masks, block)
        programs["reset history"] = self._update_program(reset, state.history, (HISTORY_BLOCK_SIZE,))
        device = self._a_device()
        lower = {key: program.lower for key, program in programs.items()}
        if self._traced_folder is not None:
            self._traced = TracedPrograms(self._traced_folder, fingerprint(_PACKAGES, self._made_from, device))
            lower = {key: partial(self._traced.lower, self._name(key), program) for key, program in programs.items()}
        self._compilation = Compilation(lower, compiler_options(device.platform), self._compiles)

    def stop_compiling(self) -> None:
        """Cancels the compilation that `start_compiling` began."""
        if self._compilation is not None:
            self._compilation.cancel()

    def warm_up(self, buckets: Iterable[Bucket], report: Callable[[str], None]) -> None:
        """`compile`, then `run_each`."""
        self.compile(buckets, report)
        self.run_each(self.execute, report)

    def compile(self, buckets: Iterable[Bucket], report: Callable[[str], None]) -> None:
        """Compiles every bucket's program, in parallel.

        Raises:
            ValueError: the temporaries of the programs need more memory than the device has free.
        """
        buckets, waiting_since = list(buckets), time.perf_counter()
        if self._compilation is None:
            self.start_compiling(buckets)
        compilation, self._compilation = self._compilation, None
        assert compilation is not None
        programs = compilation.result()
        self._patch, self._reset_history = programs.pop("patch"), programs.pop("reset history")
        self._bring_masks = programs.pop("bring masks")
        if programs.keys() != set(buckets):
            raise ValueError("start_compiling was given other buckets than warm_up")
        self._programs = {bucket: programs[bucket] for bucket in buckets}
        self._check_temporaries()
        for remark in wide_copies.check(self._programs, self._narrow_kernels, self._model_config, self._attention):
            report(remark)
        now = time.perf_counter()
        early = f", {now - waiting_since:.1f} s of them after loading" if waiting_since > compilation.started_s else ""
        before = "" if self._traced is None else f", {self._traced.num_found} were traced before"
        report(
            f"compiled {len(programs) + 3} programs in {now - compilation.started_s:.1f} s{early} "
            f"({compilation.num_from_disk} came from the disk; tracing took {compilation.tracing_s:.1f} s{before})"
        )

    def run_each(self, execute: Callable[[StepInput], StepHandle], report: Callable[[str], None]) -> None:
        """Runs every program once on padding, by `execute`: first calls are slow, and may fail. The smallest bucket
        runs first. On a CPU a first call is only a tenth of a second slower, and one call may take much longer than
        that: there, the runs stop after two seconds."""
        started = time.perf_counter()
        enough_s = CPU_FIRST_RUNS_S if self._a_device().platform == "cpu" else math.inf
        num_run = 0
        for bucket in sorted(self._programs):
            execute(self._padding(bucket)).result()
            num_run += 1
            if time.perf_counter() - started > enough_s:
                break
        report(f"ran {num_run} of {len(self._programs)} programs once in {time.perf_counter() - started:.1f} s")

    def execute(self, step: StepInput) -> StepResult:
        """Dispatches the step and returns. Do not change `step.packed` before the result is there: a CPU reads the
        buffer in place.

        Raises:
            KeyError: the bucket was not warmed up.
        """
        if step.bucket not in self._programs:
            raise KeyError(f"{step.bucket} has no program: warm_up was not given it")
        slots, history, masks = self._state.slots, self._state.history, self._state.masks
        for patches in step.patches:
            slots = self._patch(slots, patches)
        for reset in step.penalty_resets:
            vocab = self._model_config.vocab_size
            for block in history_blocks(reset.slot, reset.prompt, reset.output, vocab):
                history = self._reset_history(history, block)
        for block in step.masks:
            masks = self._bring_masks(masks, block)
        state = DeviceState(slots=slots, history=history, masks=masks, kv=self._state.kv, text=self._state.text)
        self._state, output = self._programs[step.bucket](self._weights, self._kv_scales, state, step.packed)
        output.copy_to_host_async()
        layout = OutputLayout(step.bucket, self._model_config.hidden_size, foretells=self._foretells(step.bucket))
        return StepResult(output, layout)

    def products_only(self, bucket: Bucket) -> Callable[[], jax.Array]:
        """Compiles a program of the bucket's matrix products and norms only, as a baseline for step times."""

        def forward(weights: Any, tokens: jax.Array) -> jax.Array:
            model = self._rebuild(weights)
            no_kv = [None] * self._model_config.num_layers
            hidden, _ = model(tokens, jnp.zeros_like(tokens), no_kv, lambda q, k, v, kv: (q + _spread(k + v, q), kv))
            return jnp.max(model.logits(hidden[: bucket.num_rows]), axis=-1)

        tokens = np.zeros(bucket.num_tokens, np.int32)
        program = jax.jit(forward, out_shardings=self._everywhere)
        lowered = program.lower(self._weights_like, self._sent(tokens.shape))
        compiled = lowered.compile(compiler_options=compiler_options(self._a_device().platform))
        return lambda: compiled(self._weights, tokens)

    def recover(self) -> None:
        """Allocates a new state after a failed step, with no step in flight: a failed program may have consumed the
        donated state. Slots, histories and pages are empty afterwards. Errors of the device are raised."""
        for array in jax.tree.leaves(self._state):
            if not array.is_deleted():
                array.delete()
        self._state = self._allocate()
        self.execute(self._padding(min(self._programs))).result()

    def _step_program(self, bucket: Bucket) -> Program:
        if bucket.num_drafts:
            assert self._config.lookup is not None, "the ladder has drafts and the runner looks none up"
            step = make_speculative_step(bucket, self._rebuild, self._attention, self._config.lookup)
        else:
            lookup = self._config.lookup if self._foretells(bucket) else None
            step = make_step(bucket, self._rebuild, self._attention, pooling=self._config.pooling, lookup=lookup)
        packed = self._sent((PackedLayout(bucket).size,))
        arguments = (self._weights_like, self._kv_scales_like, self._state_like, packed)
        # Explicit shardings: without them the compiler may return the state with another sharding, and the next
        # program would refuse it.
        kept = jax.tree.map(lambda x: x.sharding, self._state_like)
        return Program(step, arguments, donated=2, out_shardings=(kept, self._everywhere))

    def _update_program(self, update: Callable[..., Any], array: jax.Array, sent: tuple[int, ...]) -> Program:
        """`update(array, sent) -> array`, in place."""
        return Program(update, (array, self._sent(sent)), donated=0, out_shardings=array.sharding)

    def _name(self, key: Bucket | str) -> str:
        """Of a stored program. Pooling decides the EMBED programs only, and the lookup those that use it."""
        if isinstance(key, Bucket) and key.variant is Variant.EMBED:
            return f"{key} {self._config.pooling}"
        if isinstance(key, Bucket) and self._foretells(key):
            return f"{key} {self._config.lookup}"
        return str(key)

    def _foretells(self, bucket: Bucket) -> bool:
        """Whether the bucket's program looks drafts up. In plain steps this tells the scheduler whether they pay."""
        is_plain = bucket.decode_only and bucket.num_rows <= self._config.max_draft_rows
        return bucket.num_drafts > 0 or (is_plain and self._config.lookup is not None)

    def _sent(self, shape: tuple[int, ...]) -> Any:  # a ShapeDtypeStruct, which stands for an array
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self._everywhere)

    def _padding(self, bucket: Bucket) -> StepInput:
        """A step of padding rows with every update of the state. It clears the history of slot 0, so no request may
        hold a slot."""
        nowhere = self._config.max_num_seqs * self._state.slots.shape[1]
        patches = np.full((2, PATCH_BLOCK), nowhere, np.int32)
        nothing = PenaltyReset(slot=0, prompt=np.empty(0, np.int32), output=np.empty(0, np.int32))
        packed = np.zeros(PackedLayout(bucket).size, np.int32)
        parts = PackedLayout(bucket).sections()
        packed[parts["slots"]] = self._config.max_num_seqs
        packed[parts["patch_indices"]] = nowhere
        masks = np.full((MASK_BLOCK, 1 + self._state.masks.shape[1]), self._config.max_num_seqs, np.int32)
        return StepInput(bucket=bucket, packed=packed, patches=(patches,), penalty_resets=(nothing,), masks=(masks,))

    def _describe_state(self) -> DeviceState:
        """The shapes and shardings of the state."""
        slots, vocab = self._config.max_num_seqs, self._model_config.vocab_size
        pages = self._attention.kv_pages(self._num_pages + 1)  # and the null page
        kv: Any = jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=pages.sharding or self._everywhere)
        history: Any = jax.ShapeDtypeStruct((slots, vocab), jnp.int32, sharding=self._by_vocab)
        return DeviceState(
            slots=self._sent((slots, SlotLayout.width(self._pages_per_seq))),
            history=history,
            masks=self._sent((slots, num_mask_words(vocab))),
            kv=[kv] * self._model_config.num_layers,
            text=None
            if self._config.lookup is None
            else self._sent((self._num_pages + 1, self._attention.spec.page_size)),
        )

    def _allocate(self) -> DeviceState:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype, device=x.sharding), self._state_like)

    def _plan_pages(self, model: Llama) -> int:
        needs = memory_plan.memory_needs(model, self._attention, self._config)
        memory = device_memory(self._a_device())
        if not _is_in_place(model):
            memory = replace(memory, free=memory.free - needs.weights)
        return memory_plan.plan_pages(memory, needs, self._config, page_size=self._attention.spec.page_size)

    def _check_temporaries(self) -> None:
        """Raises ValueError if the largest temporaries, as the compiler reports them, exceed the free memory. The plan
        used only an upper bound from shapes."""
        if self._config.num_pages is not None:
            return  # the caller has chosen the memory
        largest = max(program.memory_analysis().temp_size_in_bytes for program in self._programs.values())
        free = device_memory(self._a_device()).free
        if largest > free:
            raise ValueError(
                f"the largest program needs {largest / memory_plan.GIB:.2f} GiB besides its arguments and only "
                f"{free / memory_plan.GIB:.2f} GiB are free: lower --memory-utilization or --max-num-batched-tokens"
            )

    def _a_device(self) -> jax.Device:
        devices: Iterable[Any] = self._everywhere.addressable_devices
        return min(devices, key=lambda device: device.id)


def _is_in_place(model: Llama) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))


def _described(arrays: Any) -> Any:
    """The arrays' shapes and shardings, from which programs are compiled."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)


def _spread(keys: jax.Array, queries: jax.Array) -> jax.Array:
    """[T, K, H] repeated to [T, N, H]. Used in place of attention: XLA would drop keys and values without a use."""
    return jnp.repeat(keys, queries.shape[1] // keys.shape[1], axis=1)
