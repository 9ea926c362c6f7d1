"""Whole steps of models with random weights: their share of what memory and products allow, and the device's idling."""

from __future__ import annotations

import gc
from dataclasses import asdict
from typing import Any

from batcher.step import Bucket, Variant
from model.config import LlamaConfig
from model.loading.source import resolve
from scripts.building.build import build_runner
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.bounds import work_of_step
from scripts.lab.chip.options import Options
from scripts.lab.chip.result import Result
from scripts.lab.step_timing import admit, full_step, time_bucket

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
PROFILED_STEPS = 5
SPARE_BYTES = 4 << 30  # for K/V pages and temporaries


def run(options: Options, result: Result) -> None:
    """Fills the result. A model that does not fit the memory is left out, and the report says so."""
    import jax

    start_jax(EngineSettings(device=options.device))
    from scripts.lab.chip.device_gpu import Plan, copy_bytes_per_s, product_flops_per_s

    small = Plan(copy_bytes=1 << 12, product_size=16, batches=1, calls=1)
    plan = small if options.rehearse else Plan(batches=3)
    speeds = copy_bytes_per_s(plan), product_flops_per_s(plan)
    result.figures |= {"copy_bytes_per_s": speeds[0], "product_flops_per_s": speeds[1], "steps": []}
    result.say(f"Copy {speeds[0] / 1e9:.0f} GB/s (read and written); bf16 product {speeds[1] / 1e12:.0f} TFLOP/s.")
    result.say("")
    result.say("| model | step | ms | bound, ms | share of the bound | device busy | events a step |")
    result.say("|---|---|---|---|---|---|---|")
    for model in options.models:
        config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
        needed = work_of_step(config, num_tokens=1, num_rows=1, context=0).num_bytes + SPARE_BYTES
        limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
        if limit is not None and needed > limit:
            result.say(f"| {model} | needs {needed / 2**30:.0f} GiB of {limit / 2**30:.0f} | | | | | |")
            continue
        _time_model(model, config, speeds, options, result)
        gc.collect()  # the weights of this model leave the memory before those of the next are made


def _time_model(model: str, config: LlamaConfig, speeds: tuple[float, float], options: Options, result: Result) -> None:
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
        activity = _activity(built.runner, bucket, past)
        name = f"decode {bucket.num_rows}, {past} in pages" if bucket.decode_only else f"prefill {bucket.num_tokens}"
        seen = (
            "not seen | "
            if activity is None
            else f"{activity.busy_share:.0%} | {activity.num_events / PROFILED_STEPS:.0f}"
        )
        result.say(
            f"| {model} | {name} | {timing.step_ms:.2f} | {bound_ms:.2f} | {bound_ms / timing.step_ms:.0%} | {seen} |"
        )
        found = {"model": model, "backend": built.info.attention.backend, "bound_ms": bound_ms, **asdict(timing)}
        result.figures["steps"].append(found | {"activity": None if activity is None else asdict(activity)})


def _activity(runner: Any, bucket: Bucket, context: int) -> Any:
    from scripts.lab.chip.activity import device_activity

    capacity = runner.capacity()
    admit(runner, bucket, context, GREEDY)

    def run_steps() -> None:
        handles = [runner.execute(full_step(bucket, capacity, context)) for _ in range(PROFILED_STEPS)]
        for handle in handles:
            handle.result()

    return device_activity(run_steps)
