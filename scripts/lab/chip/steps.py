"""Whole steps of models with random weights: their share of what memory and products allow, and the device's idling."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

from batcher.step import Bucket, Variant
from model.config import LlamaConfig
from model.loading.source import resolve
from scripts.building.device import start_jax
from scripts.building.runner import build_runner
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.kernels import memory_limit
from scripts.lab.chip.parts import Options, Result
from scripts.lab.chip.speed import Plan, copy_bytes_per_s, product_flops_per_s
from scripts.lab.step_timing import admit, full_step, time_bucket
from scripts.lab.tables import Table

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
PROFILED_STEPS = 5
SPARE_BYTES = 4 << 30  # for K/V pages and temporaries
VALUE_BYTES = 2  # of a weight and of a K/V value: bfloat16
LINES = ("Stream", "XLA Ops")  # of a GPU's kernels and copies; of a TPU's operations


def run(options: Options, result: Result) -> None:
    """Fills the result. A model that does not fit the memory is left out, and the report says so."""
    start_jax(EngineSettings(device=options.device))
    small = Plan(copy_bytes=1 << 12, product_size=16, batches=1, calls=1)
    plan = small if options.rehearse else Plan(batches=3)
    speeds = copy_bytes_per_s(plan), product_flops_per_s(plan)
    result.figures |= {"copy_bytes_per_s": speeds[0], "product_flops_per_s": speeds[1], "steps": []}
    result.say(f"Copy {speeds[0] / 1e9:.0f} GB/s (read and written); bf16 product {speeds[1] / 1e12:.0f} TFLOP/s.")
    result.say("")
    shares = {"ms": ".2f", "bound, ms": ".2f", "share of the bound": ".0%", "device busy": ".0%"}
    table = result.table({"model": "", "step": "", **shares, "events a step": ".0f"})
    for model in options.models:
        config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
        needed = work_of_step(config, num_tokens=1, num_rows=1, context=0).num_bytes + SPARE_BYTES
        limit = memory_limit()
        if limit is not None and needed > limit:
            table.row(model, f"needs {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}", *5 * [None])
            continue
        _time_model(model, config, speeds, options, result, table)
        gc.collect()  # the weights of this model leave the memory before those of the next are made


def _time_model(
    model: str, config: LlamaConfig, speeds: tuple[float, float], options: Options, result: Result, table: Table
) -> None:
    rows, prefills, context, steps = (
        ([1, 2], [16], 8, 4) if options.rehearse else ([1, 16, 64, 256], [2048, 8192], 1024, 20)
    )
    settings = options.settings(
        model,
        max_model_len=context + max(*prefills, steps + 8),
        max_num_seqs=max(rows),
        max_num_batched_tokens=max(*prefills, max(rows) + 1),
        **({"num_pages": 16} if options.rehearse else {}),
    )
    built = build_runner(settings, print)
    failures = built.info.attention.failures
    if failures:
        result.wrong(f"{model}: attention backends failed their self-test: {failures}")
    buckets = [*(Bucket(n, n, Variant.GREEDY) for n in rows), *(Bucket(n, 1, Variant.GREEDY) for n in prefills)]
    built.runner.warm_up(buckets, print)
    for bucket in buckets:
        past = context if bucket.decode_only else 0
        timing = time_bucket(built.runner, bucket, context=past, steps=steps, sampling=GREEDY)
        work = work_of_step(config, num_tokens=bucket.num_tokens, num_rows=bucket.num_rows, context=past)
        bound_ms = work.least_s(*speeds) * 1e3
        seen = _activity_of(built.runner, bucket, past)
        name = f"decode {bucket.num_rows}, {past} in pages" if bucket.decode_only else f"prefill {bucket.num_tokens}"
        shown = ("not seen", None) if seen is None else (seen.busy_share, seen.num_events / PROFILED_STEPS)
        table.row(model, name, timing.step_ms, bound_ms, bound_ms / timing.step_ms, *shown)
        found = {"model": model, "backend": built.info.attention.backend, "bound_ms": bound_ms, **asdict(timing)}
        result.figures["steps"].append(found | {"activity": None if seen is None else asdict(seen)})


# ---- the least time of a step: its bytes at the memory's speed, or its products at the peak ----


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step must read and multiply. Activations, norms and sampling are left out: it is a lower bound."""

    num_bytes: int
    flops: int

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds at these speeds."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def work_of_step(config: LlamaConfig, *, num_tokens: int, num_rows: int, context: int) -> Work:
    """A step of `num_rows` rows with `num_tokens / num_rows` tokens each, after `context` tokens in pages."""
    embed, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = embed * head_dim * (2 * heads + 2 * kv_heads) + 3 * embed * config.intermediate_size
    head = embed * config.vocab_size
    per_row = num_tokens // num_rows
    seen = per_row * context + per_row * (per_row + 1) // 2  # pairs of a query and a key, of one row
    kv_bytes = num_rows * (context + per_row) * 2 * kv_heads * head_dim * VALUE_BYTES
    return Work(
        num_bytes=(config.num_layers * layer + head) * VALUE_BYTES + config.num_layers * kv_bytes,
        flops=2 * config.num_layers * layer * num_tokens
        + 2 * head * num_rows
        + 4 * config.num_layers * num_rows * seen * heads * head_dim,
    )


# ---- what the device does while steps run, by jax's profiler ----


@dataclass(frozen=True, kw_only=True)
class Activity:
    """The events on the first device."""

    num_events: int  # kernels and copies
    busy_s: float  # in which at least one of them ran
    span_s: float  # from the first one's start to the last one's end

    @property
    def busy_share(self) -> float:
        """The part of the span in which the device was busy."""
        return self.busy_s / self.span_s


def _activity_of(runner: Any, bucket: Bucket, context: int) -> Activity | None:
    """During `PROFILED_STEPS` steps; None if the profiler does not see this device."""
    capacity = runner.capacity()
    admit(runner, bucket, context, GREEDY)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            handles = [runner.execute(full_step(bucket, capacity, context)) for _ in range(PROFILED_STEPS)]
            for handle in handles:
                handle.result()
        events = [event for path in Path(folder).rglob("*.xplane.pb") for event in _events(path)]
    return activity(events) if events else None


def activity(events: Iterable[tuple[float, float]]) -> Activity:
    """The activity of (start, end) in nanoseconds, of which some may overlap."""
    ordered = sorted(events)
    busy, reached = 0.0, ordered[0][0]
    for start, end in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return Activity(num_events=len(ordered), busy_s=busy / 1e9, span_s=(reached - ordered[0][0]) / 1e9)


def _events(path: Path) -> list[tuple[float, float]]:
    planes = sorted(ProfileData.from_file(str(path)).planes, key=lambda plane: plane.name)
    device = next((plane for plane in planes if plane.name.startswith("/device:")), None)
    if device is None:
        return []
    return [
        (event.start_ns, event.start_ns + event.duration_ns)
        for line in device.lines
        if line.name.startswith(LINES)
        for event in line.events
    ]
