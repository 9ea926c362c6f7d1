"""Loads the weights of an engine into its runner, with a report of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from batcher.buckets import BucketConfig
from scripts.wiring.choices import choose_kv_dtype
from scripts.wiring.draft import ChosenDraft
from scripts.wiring.head import ChosenHead
from scripts.wiring.kv_scales import find_kv_scales
from scripts.wiring.model_on_chips import ModelOnChips
from scripts.wiring.settings import EngineSettings
from scripts.wiring.weights import ChosenWeights

if TYPE_CHECKING:
    from model.execution.runner import ModelRunner
    from model.network.eagle import EagleHead
    from model.network.llama import Llama
    from pallas_kernels.api import PagedAttention

Report = Callable[[str], None]
GIB = 1 << 30


def load(
    runner: ModelRunner,
    weights: ChosenWeights,
    draft: ChosenDraft | None,
    chips: ModelOnChips,
    attention: PagedAttention,
    buckets: BucketConfig,
    settings: EngineSettings,
    report: Report,
) -> None:
    """Loads the weights into the runner, which then allocates its pages."""
    spec, capacity = attention.spec, runner.capacity()
    with phase("load", report) as say:
        model = _load_one(weights, chips, attention, say)
    draft_model = None
    if draft is not None and chips.draft is not None:
        with phase("draft", report) as say:
            draft_model = _load_one(draft.weights, chips.draft, attention, say)
    kv_scales = None
    if spec.has_kv_scales:
        with phase("scales", report) as say:
            stored, measure = weights.stored, settings.calculate_kv_scales
            kv_scales, origin = find_kv_scales(model, stored, spec, measure=measure)
            kv_dtype, remark = choose_kv_dtype(settings.kv_cache_dtype, weights.dtype, attention.backend)
            say(", ".join(filter(None, (f"K/V in {kv_dtype}", remark, origin))))
    with phase("allocate", report) as say:
        runner.place(model, kv_scales, draft=draft_model)
        kv_bytes = capacity.num_pages * attention.page_bytes() * weights.config.num_layers
        say(
            f"{capacity.num_pages} K/V pages of {spec.page_size} tokens, {kv_bytes / GIB:.2f} GiB: "
            f"{capacity.num_pages // capacity.pages_per_seq} requests of {capacity.max_model_len} tokens at once; "
            f"attention backend {attention.backend}, at most {buckets.max_num_seqs} sequences and "
            f"{buckets.max_num_batched_tokens} tokens a step"
        )
        if buckets.num_steps > 1:
            say(f"up to {buckets.num_steps} steps a program of up to {buckets.max_multi_step_rows} rows")
        if buckets.num_drafts:
            say(f"{buckets.num_drafts} drafts a row in steps of up to {buckets.max_draft_rows} rows")


def _load_one(weights: ChosenWeights | ChosenHead, chips: ModelOnChips, attention: PagedAttention, say: Report) -> Any:
    model = weights.load(chips.form)
    chips.pack_for(attention.backend, model)
    size, *others = weights.remarks()
    say(f"{_size_of(model) / GIB:.2f} GiB {size}")
    for line in others:
        say(line)
    return model


def _size_of(model: Llama | EagleHead) -> int:
    import jax
    from flax import nnx

    return sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))


@contextmanager
def phase(name: str, report: Report) -> Iterator[Report]:
    """Reports the seconds of the phase, with the remarks of the body."""
    started = time.perf_counter()
    said: list[str] = []
    yield said.append
    report(f"  {name:<9}{time.perf_counter() - started:6.1f} s  {'; '.join(said)}")
