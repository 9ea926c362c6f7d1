"""Loads the weights of an engine into its runner, with a report of each phase."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from model.compiling.compile_cache import expecting_compiles
from model.compiling.program import fingerprint
from model.execution.device_memory import return_freed_memory
from model.execution.kv_range import measured_range
from model.execution.runner import ModelRunner
from model.inputs.words import detail, one_line
from model.loading import prepared_weights
from model.loading.given_tensors import GivenWeights
from model.loading.prepared_weights import SUFFIX
from model.loading.weights_digest import files_of
from model.network.eagle import EagleHead
from model.network.llama import Llama
from model.network.packed import packer
from pallas_kernels.api import PagedAttention
from pallas_kernels.quantised import scales_of
from pallas_kernels.spec import AttentionSpec
from scripts.building.chips import ModelOnChips, choose_kv_dtype
from scripts.building.device import Report, phase
from scripts.building.draft import ChosenHead
from scripts.building.limits import EnginePlan
from scripts.building.weights import ChosenWeights

GIB = 1 << 30
_PACKAGES = [Path(__file__).parents[2] / name for name in ("model", "pallas_kernels")]  # they prepare weights


@dataclass(frozen=True)
class Loaded:
    """The contents of a checkpoint, with the models' weights on the chips."""

    weights: ChosenWeights
    model: Llama
    draft: Llama | EagleHead | None
    kv_ranges: np.ndarray | None  # the checkpoint's ranges for 8-bit pages; None: there are none

    def delete(self) -> None:
        """Frees the memory of the chips."""
        for model in filter(None, (self.model, self.draft)):
            for leaf in jax.tree.leaves(nnx.state(model)):
                leaf.delete()


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Loads weights into a runner at the start, and later other weights of the same shapes.

    With several hosts all of them call the same methods. `read` does not wait for other hosts; `place` may.
    """

    runner: ModelRunner
    plan: EnginePlan
    attention: PagedAttention
    report: Report

    def read(self, weights: ChosenWeights, *, keeps: bool = False, drafts: bool = True) -> Loaded:
        """Reads the weights of this host's chips, or maps the file that an earlier start has kept. With `keeps`,
        weights that are prepared here are kept for the next start. Without `drafts`, a draft network is not read.

        Raises ValueError or OSError if they cannot be read.
        """
        with phase("load", self.report) as say, expecting_compiles():  # a start that maps weights compiles nothing
            model = self._read_one(weights, self.plan.chips, say, keeps=keeps)
        draft, draft_model = self.plan.draft, None
        if drafts and draft is not None and self.plan.chips.draft is not None:
            with phase("draft", self.report) as say, expecting_compiles():
                draft_model = self._read_one(draft.weights, self.plan.chips.draft, say, keeps=keeps)
        return Loaded(weights, model, draft_model, self.kv_ranges(weights))

    def _read_one(self, weights: ChosenWeights | ChosenHead, chips: ModelOnChips, say: Report, *, keeps: bool) -> Any:
        file = _prepared_file(self.plan.device.folders.weights, weights, chips)
        model = None if file is None else prepared_weights.mapped(chips.planned, file)
        kept = None if model is None else f"mapped from {file}, where an earlier start has kept them"
        if model is None:
            model = weights.load(chips.form)
            chips.pack_for(self.attention.backend, model)
            return_freed_memory()
            if keeps and file is not None and prepared_weights.keep(model, file):
                kept = f"kept for the next start in {file}"
        size, *others = weights.remarks()
        size = f"{sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / GIB:.2f} GiB {size}"
        say("; ".join([size, *filter(None, others)]) + ("" if kept is None else detail(f"; {kept}")))
        return model

    def place(self, loaded: Loaded, *, with_state: bool = True) -> None:
        """Gives the weights to the runner, which then allocates its pages unless `with_state` is false."""
        runner, buckets, attention = self.runner, self.plan.ladder.config, self.attention
        spec, capacity, config = attention.spec, runner.capacity(), loaded.weights.config
        kv_scales = None
        if spec.has_kv_scales:
            with phase("scales", self.report) as say:
                kv_scales, origin = find_kv_scales(loaded.model, loaded.kv_ranges, spec)
                asked = self.plan.settings.kv_cache_dtype
                kv_dtype, remark = choose_kv_dtype(asked, loaded.weights.dtype, attention.backend)
                say(", ".join(filter(None, (f"K/V in {kv_dtype}", remark, origin))))
        with phase("allocate", self.report) as say:
            runner.place(loaded.model, kv_scales, draft=loaded.draft, with_state=with_state)
            kv_bytes = capacity.num_pages * attention.page_bytes() * config.num_layers
            say(
                f"{capacity.num_pages} K/V pages of {spec.page_size} tokens, {kv_bytes / GIB:.2f} GiB: "
                f"{capacity.num_pages // capacity.pages_per_seq} requests of {capacity.max_model_len} tokens at once; "
                f"attention backend {attention.backend}, at most {buckets.max_num_seqs} sequences and "
                f"{buckets.max_num_batched_tokens} tokens a step"
            )
            if buckets.num_drafts:
                say(f"{buckets.num_drafts} drafts a row in steps of up to {buckets.max_draft_rows} rows")

    def check(self, given: GivenWeights) -> None:
        """Checks that an `update` can be made. Waits for the arrays and makes the modules of one layer, so that the
        update compiles nothing. Steps may run meanwhile.

        Raises:
            ValueError: these are not weights of the model, or the device has no room to make one module of them.
        """
        packed = packer(self.plan.chips.planned)
        try:
            with expecting_compiles():
                for module, values in given.modules(self.plan.chips.form, rehearses=True):
                    packed(module, values)
        except RuntimeError as error:
            raise ValueError(f"the new weights cannot be made on the device: {one_line(str(error))}") from error

    def update(self, given: GivenWeights) -> None:
        """Gives other weights to the runner's model, with no step in flight. Each module's old arrays are deleted after
        its new ones are made, so the chips need room for one more module. Programs, pages and drafts stay as they are.
        The pages then hold K/V of the old weights.

        Raises:
            ValueError: the weights do not fit the model, and nothing has changed.
            RuntimeError: some modules have new weights, and others have old ones.
        """
        given.check(self.plan.chips.form)
        packed = packer(self.plan.chips.planned)
        try:
            for module, values in given.modules(self.plan.chips.form):
                before = f"{module}." if module else ""
                self.runner.replace({f"{before}{name}": value for name, value in packed(module, values).items()})
            if self.attention.spec.has_kv_scales:
                self.runner.replace_kv_scales(find_kv_scales(self.runner.model(), None, self.attention.spec)[0])
        except (ValueError, OSError) as error:
            raise RuntimeError("an update of the weights has failed half way") from error

    def kv_ranges(self, weights: ChosenWeights) -> np.ndarray | None:
        """The checkpoint's ranges for 8-bit pages. None: the pages need none, or the ranges are to be measured."""
        if not self.attention.spec.has_kv_scales or self.plan.settings.calculate_kv_scales or weights.stored is None:
            return None
        return weights.stored.kv_ranges()


def _prepared_file(folder: Path | None, weights: ChosenWeights | ChosenHead, chips: ModelOnChips) -> Path | None:
    """The path of the file with these weights in the form of `chips.planned`. It depends on the content, the form and
    the version of the code. The file need not exist. None: the weights are not kept. Random weights, weights in a
    bucket and the weights of a head are never kept.

    Args:
        folder: the folder of the files of all weights; None: none are kept.
    """
    if folder is None or not chips.is_one_cpu or not isinstance(weights, ChosenWeights) or weights.stored is None:
        return None

    files = files_of(weights.stored)
    local = [file.resolve() for file in files if isinstance(file, Path)]
    if len(local) < len(files):
        return None
    shapes = [
        (path, value.shape, str(value.dtype))
        for path, variable in nnx.to_flat_state(nnx.state(chips.planned))
        for value in [variable.get_value()]
    ]
    facts = (weights.stored, sorted(chips.form.items()), shapes, sorted(map(_version, local)))
    return folder / f"{hashlib.sha256(repr((_code(), facts)).encode()).hexdigest()[:32]}{SUFFIX}"


@cache
def _code() -> str:
    """The version of the code, which this process does not change. Reading it takes as long as mapping a model."""
    return fingerprint(_PACKAGES, (), jax.devices()[0])


def _version(file: Path) -> tuple[Any, ...]:
    """A value that changes when the file's content changes."""
    status = file.stat()
    return str(file), status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def find_kv_scales(model: Llama, stored: np.ndarray | None, spec: AttentionSpec) -> tuple[np.ndarray, str]:
    """The scales f32[L, 2, K] for the stored KV heads, and their origin in words.

    Args:
        model: a model with its weights in place.
        stored: the checkpoint's ranges (`StoredWeights.kv_ranges`); None: they are measured, on all hosts at once.
    """

    ranges, origin = stored, "with the checkpoint's scales"
    if ranges is None:
        ranges, origin = measured_range(model), "with scales measured on fixed tokens"
    ranges = np.repeat(ranges, spec.num_kv_heads // ranges.shape[2], axis=2)  # KV heads may be stored repeated
    return np.asarray(scales_of(jnp.asarray(ranges), spec.kv_dtype)), origin
