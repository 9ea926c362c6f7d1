"""The programs of a runner: what each program computes, and the shapes and shardings of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from batcher.grammar import num_mask_words
from batcher.slots import SlotLayout
from batcher.step import MASK_BLOCK, PATCH_BLOCK, Bucket, PackedLayout, PenaltyReset, StepInput, Variant
from model.compiling.program import Program
from model.execution import adapter_arrays
from model.execution.draft_networks import DraftModel, EagleDrafts
from model.execution.draft_pages import DraftPages
from model.execution.drafter import Drafter
from model.execution.memory_plan import RunnerConfig
from model.execution.page_copies import PageCopies
from model.execution.speculative_step import make_speculative_step
from model.execution.step import (
    HISTORY_BLOCK_SIZE,
    DeviceState,
    KvScales,
    OutputLayout,
    Step,
    apply_patches,
    bring_masks,
    make_step,
    reset_history,
)
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.sharding import sharding_of
from pallas_kernels.api import PagedAttention

# The programs besides the steps.
PATCH, RESET_HISTORY, BRING_MASKS, WRITE_ADAPTER = "patch", "reset history", "bring masks", "write adapter"


class StepPrograms:
    """Describes the programs of a runner. It compiles and allocates nothing.

    Args:
        model: the model. Its weights are arrays, or abstract with shape and sharding.
        attention: the paged attention of the step, bound to its backend and mesh.
        config: the limits.
        num_pages: the number of K/V pages, without the null page.
        draft: a small model with the same vocabulary or an EAGLE head, and its attention over pages of the same size.
    """

    def __init__(
        self,
        model: Llama,
        attention: PagedAttention,
        config: RunnerConfig,
        num_pages: int,
        draft: tuple[Llama | EagleHead, PagedAttention] | None,
    ) -> None:
        self.model_config = model.config
        self.attention = attention
        self.config = config
        self._num_pages = num_pages
        models: list[Llama | EagleHead] = [model] if draft is None else [model, draft[0]]
        structures, weights = zip(*map(nnx.split, models), strict=True)
        leaves, self._tree = _flatten(weights)
        self.weights_like: list[jax.ShapeDtypeStruct] = _described(leaves)
        # All facts that decide the programs, other than their arguments.
        self.made_from = (*map(repr, structures), attention, config.logprobs_mode)
        self._rebuild, *of_draft = (partial(self._rebuilt, i, structure) for i, structure in enumerate(structures))
        self._lookup, self._drafter = config.lookup, None if draft is None else self._drafter_of(*draft, *of_draft)
        if draft is not None:
            self.made_from += (draft[1],)
            self._draft_layers = draft[0].config.num_layers
            self._features = (draft[0].config.hidden_size, draft[0].dtype)
        self._device = None if attention.mesh is not None else next(iter(leaves[0].sharding.device_set))
        self.everywhere = self._sharding(())
        scales: Any = jax.ShapeDtypeStruct(
            (2, attention.spec.num_kv_heads), jnp.float32, sharding=self._sharding(("rows", "heads"))
        )
        self.kv_scales_like: list[Any] = [scales if attention.spec.has_kv_scales else None] * model.config.num_layers
        self.state_like = self._describe_state()
        self.page_copies = PageCopies(self.state_like, attention.page_axis) if config.moves_pages else None
        describe = partial(
            adapter_arrays.describe, model.config, rank=config.max_lora_rank, dtype=model.dtype, sharding=self._sharding
        )
        self.adapters_like = describe(num_slots=config.max_loras) if config.max_loras else []
        self.staged_like = describe(num_slots=1) if config.max_loras else []

    @property
    def device(self) -> jax.Device:
        """One of the devices of this process, which are all of the same kind."""
        return device_of(self.everywhere)

    def weights_of(self, models: Sequence[Llama | EagleHead]) -> list[jax.Array]:
        """The flat list of the weights of the loaded models, which the programs take.

        It is made once: walking the module tree at every call would take longer than dispatching the step. Raises
        ValueError if their shapes or shardings are not those of the programs.
        """
        weights, tree = _flatten(tuple(nnx.split(model)[1] for model in models))
        return self._checked(weights if self._tree == tree else [])

    def weights_with(self, model: Mapping[str, jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
        """The weights of `model`, and those in `others` of a network that drafts. Raises ValueError as `weights_of`."""
        weights = list(others)
        for path, array in model.items():
            weights[self.numbers[path]] = array
        return self._checked(weights)

    def _checked(self, weights: list[jax.Array]) -> list[jax.Array]:
        if _described(weights) != self.weights_like:
            raise ValueError("these are not the weights that the runner was made for: shapes or placement differ")
        return weights

    @cached_property
    def numbers(self) -> dict[str, int]:
        """Path of a parameter of the model -> its index in `weights_of`."""
        return by_path(jax.tree.unflatten(self._tree, range(len(self.weights_like)))[0])

    def model_of(self, weights: list[jax.Array]) -> Llama:
        """The model with these weights, which have the order of `weights_of`."""
        model: Llama = self._rebuild(weights)
        return model

    def step(self, bucket: Bucket) -> Program:
        """The program of a bucket's `Step`. It updates the state in place."""
        options: dict[str, Any] = {"logprobs_mode": self.config.logprobs_mode, "max_loras": self.config.max_loras}
        if bucket.num_drafts:
            drafts = self._drafter or self._lookup
            assert drafts is not None, "the ladder has drafts and the runner has none"
            step = make_speculative_step(bucket, self._rebuild, self.attention, drafts, **options)
        else:
            lookup = self.config.lookup if self.tells_would_accept(bucket) else None
            pooling, drafter = self.config.pooling, self._drafter
            step = make_step(
                bucket,
                self._rebuild,
                self.attention,
                pooling=pooling,
                lookup=lookup,
                drafter=drafter,
                **options,
            )
        packed = self.sent((PackedLayout(bucket).size,))
        arguments: tuple[Any, ...] = (self.weights_like, self.kv_scales_like, self.state_like, packed)
        if bucket.has_adapters:
            arguments += (self.adapters_like,)
        donated: tuple[int, ...] = (2,)
        if self.has_graphs:
            step = _written_into(step)
            donated, arguments = (2, len(arguments)), (*arguments, self.output_like(bucket))
        # Explicit shardings: without them the compiler may return the state with another sharding, and the next
        # program would refuse it.
        kept = jax.tree.map(lambda x: x.sharding, self.state_like)
        return Program(step, arguments, donated=donated, out_shardings=(kept, self.everywhere))

    def output_layout(self, bucket: Bucket) -> OutputLayout:
        """The sections of the output of a bucket's program."""
        tells = self.tells_would_accept(bucket)
        return OutputLayout(bucket, self.model_config.hidden_size, tells_would_accept=tells)

    @cached_property
    def has_graphs(self) -> bool:
        """Whether the programs run as CUDA graphs.

        The last argument of a step is then the buffer of an earlier output, into which the output is written. XLA also
        keeps results of layers in the memory of an output, so a new address for each output would change many nodes of
        the graph. A CPU lends an output to the host without a copy, so its buffer cannot be written again.
        """
        return self.device.platform in ("gpu", "cuda")

    def output_like(self, bucket: Bucket) -> Any:
        """The ShapeDtypeStruct of a reused output. Its last element has no meaning: with it, XLA cannot use the buffer
        for anything but the output."""
        return self.sent((self.output_layout(bucket).size + 1,))

    def updates(self) -> dict[str, Program]:
        """The programs that change the state between steps, and the programs that copy pages, by name."""
        state = self.state_like
        reset = partial(reset_history, mesh=self.attention.mesh)
        block = (MASK_BLOCK, 1 + state.masks.shape[1])
        updates = {
            PATCH: self._update(apply_patches, state.slots, (2, PATCH_BLOCK)),
            BRING_MASKS: self._update(bring_masks, state.masks, block),
            RESET_HISTORY: self._update(reset, state.history, (HISTORY_BLOCK_SIZE,)),
        }
        if self.config.max_loras:
            arguments = (self.adapters_like, self.staged_like, self.sent((1,)))
            placed = jax.tree.map(lambda x: x.sharding, self.adapters_like)
            updates[WRITE_ADAPTER] = Program(adapter_arrays.write, arguments, donated=(0,), out_shardings=placed)
        if self.page_copies is not None:
            updates |= self.page_copies.programs(self.sent)
        return updates

    def name(self, key: Bucket | str) -> str:
        """The name of a stored program. It includes the pooling for EMBED programs, the lookup for programs that use
        it, and the number of adapters for programs that have adapters."""
        if isinstance(key, Bucket) and key.has_adapters:
            return f"{self.name(replace(key, has_adapters=False))} {self.config.max_loras} adapters"
        if isinstance(key, Bucket) and key.variant is Variant.EMBED:
            return f"{key} {self.config.pooling}"
        if isinstance(key, Bucket) and self.tells_would_accept(key):
            return f"{key} {self.config.lookup} {self.config.draft_pass_tokens}"
        return str(key)

    def tells_would_accept(self, bucket: Bucket) -> bool:
        """Whether the bucket's program has drafts, or looks drafts up. From the results of plain steps, the scheduler
        learns whether drafts pay."""
        is_plain = bucket.decode_only and bucket.num_rows <= self.config.max_draft_rows
        return bucket.num_drafts > 0 or (is_plain and self.config.lookup is not None)

    def padding(self, bucket: Bucket) -> StepInput:
        """A step of padding rows with every kind of update of the state. It clears the history of slot 0, so no request
        may hold a slot."""
        slots, num_slots = self.state_like.slots, self.config.max_num_seqs
        nowhere = num_slots * slots.shape[1]
        patches = np.full((2, PATCH_BLOCK), nowhere, np.int32)
        nothing = PenaltyReset(slot=0, prompt=np.empty(0, np.int32), output=np.empty(0, np.int32))
        packed = np.zeros(PackedLayout(bucket).size, np.int32)
        parts = PackedLayout(bucket).sections()
        packed[parts["slots"]] = num_slots
        packed[parts["patch_indices"]] = nowhere
        masks = np.full((MASK_BLOCK, 1 + self.state_like.masks.shape[1]), num_slots, np.int32)
        return StepInput(bucket=bucket, packed=packed, patches=(patches,), penalty_resets=(nothing,), masks=(masks,))

    def _sharding(self, axes: Sequence[str]) -> jax.sharding.Sharding:
        return sharding_of(axes, self.attention.mesh) if self._device is None else SingleDeviceSharding(self._device)

    def sent(self, shape: tuple[int, ...]) -> Any:
        """The ShapeDtypeStruct of an int32 array from the host."""
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.everywhere)

    def _update(self, update: Callable[..., Any], array: jax.Array, sent: tuple[int, ...]) -> Program:
        """The program of `update(array, sent) -> array`, which updates the array in place."""
        return Program(update, (array, self.sent(sent)), donated=(0,), out_shardings=array.sharding)

    @property
    def adapter_bytes(self) -> int:
        return adapter_arrays.bytes_of(self.staged_like)

    @property
    def has_drafts(self) -> bool:
        return self._lookup is not None or self._drafter is not None

    def _drafter_of(
        self, network: Llama | EagleHead, attention: PagedAttention, rebuild: Callable[[Any], Any]
    ) -> Drafter:
        size = self.config.draft_pass_tokens
        passes = {"pass_tokens": size, "max_passes": -(-self.config.max_num_batched_tokens // size)}
        if isinstance(network, Llama):
            return DraftModel(rebuild=rebuild, attention=attention, **passes)
        return EagleDrafts(
            config=network.eagle, rebuild=rebuild, rebuild_model=self._rebuild, attention=attention, **passes
        )

    def _rebuilt(self, number: int, structure: Any, leaves: list[Any]) -> Any:
        """The network number `number` from the programs' weights: 0 is the model, and 1 the network that drafts."""
        return nnx.merge(structure, jax.tree.unflatten(self._tree, leaves)[number])

    def _describe_state(self) -> DeviceState:
        slots, vocab, spec = self.config.max_num_seqs, self.model_config.vocab_size, self.attention.spec
        pages = self.attention.kv_pages(self._num_pages + 1)  # includes the null page
        kv: Any = jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=pages.sharding or self.everywhere)
        history: Any = jax.ShapeDtypeStruct((slots, vocab), jnp.int32, sharding=self._sharding(("rows", "vocab")))
        pages_per_seq = -(-self.config.max_model_len // spec.page_size)
        return DeviceState(
            slots=self.sent((slots, SlotLayout.width(pages_per_seq))),
            history=history,
            masks=self.sent((slots, num_mask_words(vocab))),
            kv=[kv] * self.model_config.num_layers,
            text=self.sent((self._num_pages + 1, spec.page_size)) if self.has_drafts else None,
            draft=None if self._drafter is None else self._describe_draft(self._drafter),
        )

    def _describe_draft(self, drafter: Drafter) -> DraftPages:
        pages, num_pages = drafter.attention.kv_pages(self._num_pages + 1), self._num_pages + 1
        kv: Any = jax.ShapeDtypeStruct(pages.shape, pages.dtype, sharding=pages.sharding or self.everywhere)
        features: Any = None
        if drafter.reads_features:
            width, dtype = self._features
            shape = (num_pages, self.attention.spec.page_size, width)
            features = jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(("rows", "rows", "mlp")))
        return DraftPages(kv=[kv] * self._draft_layers, filled=self.sent((num_pages,)), features=features)


def _written_into(inner: Step) -> Step:
    """The same step, whose last argument is a buffer for the output. The buffer is one element longer."""

    def step(
        weights: Any, kv_scales: KvScales, state: DeviceState, packed: jax.Array, *others: Any
    ) -> tuple[DeviceState, jax.Array]:
        *adapters, buffer = others
        state, output = inner(weights, kv_scales, state, packed, *adapters)
        return state, buffer.at[: len(output)].set(output)

    return step


def device_of(sharding: jax.sharding.Sharding) -> jax.Device:
    """The device of a sharding with the lowest id among those of this process."""
    devices: Iterable[Any] = sharding.addressable_devices
    return min(devices, key=lambda device: device.id)


def by_path(state: Any) -> dict[str, Any]:
    """The arrays of a module's state by their paths, such as `layers.0.attention.out.kernel`."""
    return {".".join(map(str, path)): variable.get_value() for path, variable in nnx.to_flat_state(state)}


def _flatten(weights: tuple[Any, ...]) -> tuple[list[Any], Any]:
    """The leaves and the PyTreeDef of a tree. JAX does not export the type PyTreeDef."""
    return jax.tree.flatten(weights)


def _described(arrays: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
