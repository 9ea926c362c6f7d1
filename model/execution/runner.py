"""Executes the batcher's steps: one program per bucket, compiled before the first request."""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from batcher.step import Bucket, Capacity, StepHandle, StepInput, StepOutput, WeightsKind
from model.execution import adapter_arrays, memory_plan
from model.execution.compiled_programs import CompiledPrograms
from model.execution.device_memory import device_memory
from model.execution.host_copy import DEVICE, copied
from model.execution.memory_plan import RunnerConfig
from model.execution.page_copies import NULL_PAGE, PageCopies, PagesRead, StagedPages
from model.execution.step import DeviceState, KvScales, OutputLayout, history_blocks
from model.execution.step_programs import StepPrograms, device_of
from model.inputs.paths import Place
from model.inputs.words import one_line
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.lora import AdapterSlots, LoraWeights
from model.page_files.page_file import PageIdentity
from pallas_kernels.api import PagedAttention
from pallas_kernels.cpu.zeros import zeros

logger = logging.getLogger(__name__)

CPU_FIRST_RUNS_S = 0.3


class StepResult:
    """A dispatched step. The copy of its output array to the host starts at dispatch."""

    def __init__(self, output: jax.Array, layout: OutputLayout, free: deque[jax.Array] | None = None) -> None:
        self._output = output
        self._layout = layout
        self._free = free  # takes the output's buffer when the host has read it; None: the buffer is not used again

    def result(self) -> StepOutput:
        """The output of the step. Blocks until the device is done, so call it from a thread that may block."""
        values = np.asarray(self._output)
        if self._free is not None:
            self._free.append(self._output)
        return self._layout.split(values)


class ModelRunner:
    """Executes the steps of a Llama. It implements `batcher.step.Runner`.

    Compiling needs only shapes, so a runner can be made before the weights are loaded: make it from
    `abstract_model(...)`, call `start_compiling`, and then call `place` with the loaded model.

    Args:
        model: the model. Its weights are arrays, or abstract with shape and sharding. They are on one device or sharded
            over `attention.mesh`.
        attention: the paged attention of the step, bound to its backend and mesh.
        config: the limits. Memory is planned at once; the K/V pages are allocated when the weights are in place.
        kv_scales: the argument of `place`, if the model's weights are arrays.
        program_folder: the folder that keeps programs for later starts (`ProgramStore`); None: none are kept.
        keeps_executables: if False, only traces are kept there: executables of several hosts cannot be loaded.
        draft: a small model with the same vocabulary or an EAGLE head, and its attention over pages of the same size.
            Its weights are arrays or abstract, like those of `model`.
        adapter_weights: gives the weights of a LoRA adapter by its identity, for `stage`; None: there are no
            adapters.
        model_weights: gives another model's weights on the devices, by their paths, with its K/V scales, by its
            identity, for `stage`; None: there is one model only.

    Attributes:
        described: the shapes of the programs' arguments.
        programs: the compiled programs.
        weights: the arrays of the model and of its draft network, which are the first argument of a program.
        state: the state on the device. Each step's program takes it and returns a new one.
        adapters: the slots of LoRA adapters. An `AdapterWrite` updates them.

    Raises:
        ValueError: the model does not fit (`memory_plan.plan_pages`), or others may write to `program_folder`.
    """

    def __init__(
        self,
        model: Llama,
        attention: PagedAttention,
        config: RunnerConfig,
        kv_scales: np.ndarray | None = None,
        *,
        program_folder: Place | None = None,
        keeps_executables: bool = True,
        draft: tuple[Llama | EagleHead, PagedAttention] | None = None,
        adapter_weights: Callable[[int], LoraWeights] | None = None,
        model_weights: Callable[[int], tuple[Mapping[str, jax.Array], np.ndarray | None]] | None = None,
    ) -> None:
        self._attention = attention
        self._adapter_weights, self._model_weights = adapter_weights, model_weights
        self._config = config
        self._pages_per_seq = -(-config.max_model_len // attention.spec.page_size)
        self._num_pages, planned_room = config.num_pages or 0, math.inf
        if config.num_pages is None:
            self._num_pages, planned_room = self._plan_pages(model, draft)
        if self._num_pages < self._pages_per_seq:
            raise ValueError(
                f"one request of {config.max_model_len=} tokens needs {self._pages_per_seq} pages of "
                f"{attention.spec.page_size} tokens: {config.num_pages=}"
            )
        self.described = StepPrograms(model, attention, config, self._num_pages, draft)
        self.programs = CompiledPrograms(
            self.described, folder=program_folder, keeps_executables=keeps_executables, planned_room=planned_room
        )
        programs = self.programs
        self.start_compiling, self.stop_compiling = programs.start_compiling, programs.stop_compiling
        self.compile, self.compile_later = programs.compile, programs.compile_later
        self.state: DeviceState
        self.adapters: AdapterSlots
        self._make_state = _maker_of(self.described.state_like, when_used=model.ops.are_in_c)
        self._make_adapters = _maker_of(self.described.adapters_like, when_used=False)
        self._staging = threading.Lock()
        # Buffers of outputs that the host has read, oldest first. As many are made as there are steps in flight.
        self._outputs: defaultdict[Bucket, deque[jax.Array]] = defaultdict(deque)
        self._staged: dict[int, AdapterSlots] = {}  # identity of an adapter -> its weights on the device
        self._others: dict[int, tuple[list[jax.Array], KvScales]] = {}  # identity of another model -> its weights
        if _is_in_place(model):
            self.place(model, kv_scales, draft=None if draft is None else draft[0])

    def place(
        self,
        model: Llama,
        kv_scales: np.ndarray | None = None,
        *,
        draft: Llama | EagleHead | None = None,
        with_state: bool = True,
    ) -> None:
        """Takes the loaded weights of the models that the runner was made for, and allocates the state.

        Args:
            kv_scales: f32[L, 2, K], the scales of keys and values in 8-bit pages; None for other pages.
            draft: the draft model or head, if the runner was made with one.
            with_state: allocates the state. If False, `allocate` must be called before the next step.

        Raises:
            ValueError: there are `kv_scales` and the pages are not in 8 bits, or the other way around.
        """
        weights = self.described.weights_of([model] if draft is None else [model, draft])
        scales_of_layers = self._placed_scales(kv_scales)
        if with_state:
            self.allocate()
        self.weights, self._kv_scales = weights, scales_of_layers

    def model(self) -> Llama:
        """The model with its weights. Its arrays are the runner's own, and an update of the weights deletes them."""
        return self.described.model_of(self.weights)

    def replace(self, values: Mapping[str, jax.Array]) -> None:
        """Replaces parameters of the model, by their paths, and deletes the old ones. No step may be in flight. The K/V
        in pages are not updated: they belong to the old weights."""
        numbers, likes = self.described.numbers, self.described.weights_like
        for path, value in values.items():
            like = likes[numbers[path]]
            assert (value.shape, value.dtype, value.sharding) == (like.shape, like.dtype, like.sharding), path
        for path, value in values.items():
            old, self.weights[numbers[path]] = self.weights[numbers[path]], value
            old.delete()

    def replace_kv_scales(self, kv_scales: np.ndarray) -> None:
        """Replaces the scales f32[L, 2, K] of keys and values after an update of the weights. No step may be in
        flight."""
        self._kv_scales = self._placed_scales(kv_scales)

    def _placed_scales(self, kv_scales: np.ndarray | None) -> KvScales:
        if (kv_scales is not None) != self._attention.spec.has_kv_scales:
            raise ValueError(f"K/V scales come with pages of 8 bits only: {self._attention.spec.kv_dtype=}")
        if kv_scales is None:
            return self.described.kv_scales_like
        likes = self.described.kv_scales_like
        return [jax.device_put(scales, like.sharding) for scales, like in zip(kv_scales, likes, strict=True)]

    def release(self, *, weights: bool = True, state: bool = True) -> None:
        """Frees the memory of the weights and of the state on the device. No step may be in flight, and none may run
        before both are restored."""
        if weights:
            for array in self.weights:
                array.delete()
            for model in list(self._others):
                self.drop(WeightsKind.MODEL, model)
        if state:
            self._free_state()

    def restore(self, weights: Sequence[jax.Array], *, with_state: bool = True) -> None:
        """Copies the weights, which are in the host's memory, back to the device, and allocates an empty state.

        Raises RuntimeError if the device has no room. It then frees what it has copied.
        """
        restored: list[jax.Array] = []
        try:
            for array in weights:
                restored.append(copied(array, DEVICE))
            jax.block_until_ready(restored)
            if with_state:
                self.allocate()
        except BaseException:
            for array in restored:
                array.delete()
            raise
        self.weights = restored

    def allocate(self) -> None:
        """Allocates an empty state and empty adapter slots. Raises RuntimeError if the device has no room."""
        self.state, self.adapters = self._make_state(), self._make_adapters()

    def capacity(self) -> Capacity:
        return Capacity(
            num_slots=self._config.max_num_seqs,
            num_pages=self._num_pages,
            page_size=self._attention.spec.page_size,
            max_model_len=self._config.max_model_len,
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            vocab_size=self.described.model_config.vocab_size,
            pooling=self._config.pooling,
            keeps_text=self.described.has_drafts,
            max_loras=self._config.max_loras,
            max_models=self._config.max_models,
            page_bytes=0 if (copies := self.described.page_copies) is None else copies.page_bytes,
            pages_of_copy=0 if copies is None else copies.most,
        )

    @property
    def num_compiles(self) -> int:
        return self.programs.num_compiles

    def warm_up(
        self, buckets: Iterable[Bucket], report: Callable[[str], None], may_wait: Collection[Bucket] = ()
    ) -> list[Bucket]:
        """Compiles the programs of the buckets and runs each once. Returns the buckets that are left for
        `compile_later`. The arguments and errors are those of `CompiledPrograms.compile`."""
        self.compile(buckets, report, may_wait)
        self.run_each(self.execute, report)
        return self.programs.left

    def run_each(self, execute: Callable[[StepInput], StepHandle], report: Callable[[str], None]) -> None:
        """Runs every program once on padding, by `execute`, because a first call is slow and may fail. The smallest
        bucket runs first. If a program from the disk fails, all programs are compiled.

        On a CPU the runs stop after `CPU_FIRST_RUNS_S`: one call may take seconds there, and a first call is only a
        tenth of a second slower. The first step of a program from the disk that has not run then waits until it is
        done.
        """
        started = time.perf_counter()
        try:
            num_run = self._run_each(execute)
        except jax.errors.JaxRuntimeError as error:
            if not self.programs.from_disk:
                raise
            report(f"a program from the disk fails, and all are compiled: {one_line(str(error))}")
            self.programs.compile_anew(report)
            self._reallocate()
            num_run = self._run_each(execute)
        report(f"ran {num_run} of {len(self.programs.steps)} programs once in {time.perf_counter() - started:.1f} s")
        if self.programs.read_pages:
            size = self._copies.most
            out, back = (size * self._copies.page_bytes / 1e9 / took_s for took_s in self._copy_null_page(size))
            report(f"pages leave at {out:.2f} GB/s and come back at {back:.2f} GB/s, {size} of them at once")

    def _run_each(self, execute: Callable[[StepInput], StepHandle]) -> int:
        """Runs the programs, as many as there is time for. Returns their number."""
        started, num_run = time.perf_counter(), 0
        enough_s = CPU_FIRST_RUNS_S if self.described.device.platform == "cpu" else math.inf
        for bucket in sorted(self.programs.steps):
            if num_run == 0 or time.perf_counter() - started <= enough_s:
                # The second run makes a program's CUDA graph.
                for _ in range(2 if self.described.has_graphs else 1):
                    execute(self.described.padding(bucket)).result()
                num_run += 1
            elif bucket in self.programs.from_disk:
                self.programs.untried.add(bucket)
        for size in self.programs.read_pages:
            self._copy_null_page(size)
        return num_run

    def _copy_null_page(self, size: int) -> tuple[float, float]:
        """Copies the null page `size` times to the host and back. Returns the seconds of each way."""
        start_s = time.perf_counter()
        pages = list(np.zeros((size, self._copies.page_bytes), np.uint8))
        self.read_pages([NULL_PAGE] * size).copy_to(pages)
        turn_s = time.perf_counter()
        self.write_pages(self.stage_pages(pages), [NULL_PAGE])
        jax.block_until_ready(self.state)
        return turn_s - start_s, time.perf_counter() - turn_s

    def execute(self, step: StepInput) -> StepResult:
        """Dispatches the step and returns. Do not change `step.packed` before the result has arrived: a CPU reads the
        buffer in place.

        Raises:
            KeyError: the bucket was not warmed up.
        """
        described, programs = self.described, self.programs
        if step.bucket not in programs.steps:
            raise KeyError(f"{step.bucket} has no program: warm_up was not given it")
        for write in step.adapters:
            with self._staging:
                staged = self._staged.pop(write.adapter)
            self.adapters = programs.write_adapter(self.adapters, staged, np.array([write.slot], np.int32))
        state = self.state
        slots, history, masks = state.slots, state.history, state.masks
        for patches in step.patches:
            slots = programs.patch(slots, patches)
        for reset in step.penalty_resets:
            vocab = described.model_config.vocab_size
            for block in history_blocks(reset.slot, reset.prompt, reset.output, vocab):
                history = programs.reset_history(history, block)
        for block in step.masks:
            masks = programs.bring_masks(masks, block)
        state = DeviceState(slots=slots, history=history, masks=masks, kv=state.kv, text=state.text, draft=state.draft)
        adapters = (self.adapters,) if step.bucket.has_adapters else ()
        weights, kv_scales = self._others[step.model] if step.model else (self.weights, self._kv_scales)
        arguments: tuple[Any, ...] = (weights, kv_scales, state, step.packed, *adapters)
        free = self._outputs[step.bucket] if described.has_graphs else None
        if free is not None:
            arguments += (free.popleft() if free else self._output_buffer(step.bucket),)
        run = self._run_first if step.bucket in programs.untried else self._run
        output = run(step.bucket, arguments)
        output.copy_to_host_async()
        return StepResult(output, described.output_layout(step.bucket), free)

    def _output_buffer(self, bucket: Bucket) -> jax.Array:
        like = self.described.output_like(bucket)
        return jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)

    def stage(self, kind: WeightsKind, identity: int) -> None:
        if kind is WeightsKind.MODEL:
            self._stage_model(identity)
            return
        assert self._adapter_weights is not None, "the runner was made without adapters"
        like = self.described.staged_like
        staged = adapter_arrays.staged(self._adapter_weights(identity), like, self.described.model_config.head_dim)
        jax.block_until_ready(staged)
        with self._staging:
            self._staged[identity] = staged

    def _stage_model(self, identity: int) -> None:
        assert self._model_weights is not None, "the runner was made for one model"
        try:
            model, kv_scales = self._model_weights(identity)
            weights = self.described.weights_with(model, self.weights)
            self._others[identity] = jax.block_until_ready((weights, self._placed_scales(kv_scales)))
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"the device has no room for them: {one_line(str(error))}") from error

    def drop(self, kind: WeightsKind, identity: int) -> None:
        if kind is WeightsKind.ADAPTER:
            with self._staging:
                self._staged.pop(identity, None)
            return
        weights, _ = self._others.pop(identity, ([], []))
        for number in self.described.numbers.values() if weights else ():
            weights[number].delete()

    def read_pages(self, pages: Sequence[int]) -> PagesRead:
        return self._copies.read(self.programs.read_pages, self.state, pages)

    def stage_pages(self, pages: Sequence[np.ndarray]) -> StagedPages:
        return self._copies.stage(pages)

    def write_pages(self, staged: Any, pages: Sequence[int]) -> None:
        """Dispatches a copy of the staged pages to `pages`, and returns at once. Pages that were staged before
        `recover` can be written, too."""
        self.state = self._copies.write(self.programs.write_pages, self.state, staged, pages)

    def page_identity(self, weights: str, draft_weights: str) -> PageIdentity:
        """The identity of the pages that this runner writes to files.

        Args:
            weights: the digest of the model's weights.
            draft_weights: the digest of the weights of the network that drafts; "" if there is none.
        """
        scales = hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in self._kv_scales if x is not None))
        return PageIdentity(
            weights=weights,
            draft_weights=draft_weights,
            computation=self.programs.fingerprint(),
            contents=f"{self._copies.contents} {self._attention.spec.kv_dtype} {scales.hexdigest()}",
            layout=f"{self._attention.num_shards} shards",
            page_size=self._attention.spec.page_size,
            page_bytes=self._copies.page_bytes,
        )

    @property
    def _copies(self) -> PageCopies:
        copies = self.described.page_copies
        assert copies is not None, "the runner was made without moves_pages"
        return copies

    def _run(self, bucket: Bucket, arguments: tuple[Any, ...]) -> jax.Array:
        self.state, output = self.programs.steps[bucket](*arguments)
        return output

    def _run_first(self, bucket: Bucket, arguments: tuple[Any, ...]) -> jax.Array:
        """Runs a program from the disk for the first time, and waits for it. If the program fails, it is compiled while
        all requests wait. JAX's error is then raised: the failed program has consumed the state, so the step fails."""
        self.programs.untried.discard(bucket)
        try:
            return jax.block_until_ready(self._run(bucket, arguments))
        except jax.errors.JaxRuntimeError as error:
            logger.warning("a program from the disk fails, and is compiled: %s: %s", bucket, one_line(str(error)))
            self.programs.compile_in_place(bucket)
            raise

    def recover(self) -> None:
        """Allocates a new state after a failed step, because the failed program may have consumed the donated state. No
        step may be in flight. Slots, histories and pages are empty afterwards. Raises the device's errors."""
        self._reallocate()
        smallest = min(tuple(self.programs.steps))  # another thread may be adding one
        self.execute(self.described.padding(smallest)).result()

    def _reallocate(self) -> None:
        self._free_state()
        self.allocate()

    def _free_state(self) -> None:
        with self._staging:
            staged = list(self._staged.values())
            self._staged.clear()
        self._outputs.clear()
        for array in jax.tree.leaves((self.state, self.adapters, staged)):
            if not array.is_deleted():
                array.delete()

    def _plan_pages(self, model: Llama, draft: tuple[Llama | EagleHead, PagedAttention] | None) -> tuple[int, float]:
        """The number of pages, and the `planned_room` of `CompiledPrograms`."""
        needs = memory_plan.memory_needs(model, self._attention, self._config, draft)
        memory = device_memory(device_of(jax.tree.leaves(nnx.state(model))[0].sharding))
        if not _is_in_place(model):
            memory = replace(memory, free=memory.free - needs.weights)
        num_pages = memory_plan.plan_pages(memory, needs, self._config, page_size=self._attention.spec.page_size)
        room = memory.free - needs.state - (num_pages + 1) * needs.page
        return num_pages, room if memory.is_host else math.inf


def _maker_of[T](like: T, *, when_used: bool) -> Callable[[], T]:
    """A function that makes arrays of zeros like those of `like`. All arrays come from one program, because a program
    for each would be traced and compiled separately. With `when_used`, memory is taken only as arrays are used; C code
    on a CPU does this."""
    shardings, (leaves, structure) = jax.tree.map(lambda x: x.sharding, like), jax.tree.flatten(like)

    def make() -> T:
        arrays = zeros(leaves) if when_used else [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
        made: T = jax.tree.unflatten(structure, arrays)
        return made

    return jax.jit(make, out_shardings=shardings)


def _is_in_place(model: Llama) -> bool:
    return all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(model)))
