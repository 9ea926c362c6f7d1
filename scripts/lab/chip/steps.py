"""Whole steps of models with random weights: their share of what memory and products allow, and the device's idling."""

from __future__ import annotations

import gc
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import jax
from jax.profiler import ProfileData

from batcher.step import Bucket, Variant
from model.config import LlamaConfig
from model.loading.source import resolve
from scripts.building.device import start_jax
from scripts.building.runner import Built, build_runner
from scripts.flags.settings import EngineSettings
from scripts.lab.chip.kernels import memory_limit
from scripts.lab.chip.parts import Options, Result
from scripts.lab.chip.speed import Plan, copy_bytes_per_s, product_flops_per_s
from scripts.lab.step_timing import admit, full_step, time_bucket

GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
PROFILED_STEPS = 5
SPARE_BYTES = 4 << 30  # for K/V pages and temporaries
VALUE_BYTES = 2  # of a weight and of a K/V value in bfloat16
SHOWN = 6  # kernels of a step in the report; the figures have all


class Precision(NamedTuple):
    """The types of weights and K/V."""

    settings: dict[str, str]
    value_bytes: int


PRECISIONS = {
    "bf16": Precision({"dtype": "bfloat16"}, VALUE_BYTES),
    "fp8": Precision({"dtype": "bfloat16", "quantization": "fp8", "kv_cache_dtype": "fp8"}, 1),
}
LINES = ("Stream", "XLA Ops")  # of a GPU's kernels and copies; of a TPU's operations
KINDS = {"attention": re.compile("paged_"), "products": re.compile("gemm|nvjet|cutlass|cublas|xmma|splitk", re.I)}
REST = "the rest"  # norms, rotations, appends, sums of split products, sampling


def run(options: Options, result: Result) -> None:
    """Fills the result, the largest model first. One that does not fit the memory is left out, as the report says."""
    start_jax(EngineSettings(device=options.device))
    small = Plan(copy_bytes=1 << 12, product_size=16, batches=1, calls=1)
    plan = small if options.rehearse else Plan(batches=3)
    speeds = copy_bytes_per_s(plan), product_flops_per_s(plan)
    result.say(f"Copy {speeds[0] / 1e9:.0f} GB/s (read and written); bf16 product {speeds[1] / 1e12:.0f} TFLOP/s.")
    result.say("")
    shares = {
        "ms": ".2f",
        "bound, ms": ".2f",
        "share of the bound": ".0%",
        "products, ms": ".2f",
        "dispatch, ms": ".2f",
    }
    kinds = f"{' + '.join(KINDS)} + {REST}, ms"
    seen = {
        "device busy": ".0%",
        "events a step": ".0f",
        kinds: "",
        "kernels that take longest, us a step (launches)": "",
    }
    table = result.table({"step": "", **shares, **seen})

    def show(name: str, found: dict[str, Any]) -> None:
        if "needs" in found:
            table.row(name, found["needs"], *8 * [None])
            return
        times = found["step_ms"], found["bound_ms"], found["bound_ms"] / found["step_ms"]
        kernels = [f"{kernel} {us:.0f} ({count:.0f})" for kernel, (us, count) in list(found["kernels"].items())[:SHOWN]]
        sums = " + ".join(f"{us / 1e3:.2f}" for us in found["kinds"].values()) if options.device == "cuda" else None
        activity = found["busy_share"], found["events"], sums, "; ".join(kernels) or "not seen"
        table.row(name, *times, found["products_ms"], found["dispatch_ms"], *activity)
        for backend, reason in found["failures"].items():
            result.wrong(f"{name}: the attention backend {backend} failed its self-test: {reason}")

    works: dict[str, Callable[[], Any]] = {}
    for model in reversed(options.models):
        for precision in PRECISIONS:
            steps = Steps(model, precision, options, speeds)
            for bucket in steps.buckets:
                name = f"decode {bucket.num_rows}" if bucket.decode_only else f"prefill {bucket.num_tokens}"
                works[f"{model}, {precision}, {name}"] = partial(steps.measure, bucket)
    result.measure(works, show)


class Steps:
    """The steps of a model in one precision. The runner is built, with all programs, for the first that is measured."""

    _built: ClassVar[tuple[Steps, Built] | None] = None  # the last one: two may not fit the memory

    def __init__(self, model: str, precision: str, options: Options, speeds: tuple[float, float]) -> None:
        rows, prefills, self.context, self.steps = (
            ([1, 2], [16], 8, 4) if options.rehearse else ([1, 16, 64, 256, 512], [2048, 8192], 1024, 20)
        )
        self.config = resolve(model if model == "demo" else f"preset:{model}", weights=False).config
        self.buckets = [
            *(Bucket(n, n, Variant.GREEDY) for n in rows),
            *(Bucket(n, 1, Variant.GREEDY) for n in prefills),
        ]
        self.value_bytes = PRECISIONS[precision].value_bytes
        self.speeds = speeds[0], speeds[1] * VALUE_BYTES / self.value_bytes  # 8-bit products are twice as fast
        self.settings = options.settings(
            model,
            max_model_len=self.context + max(*prefills, self.steps + 8),
            max_num_seqs=max(rows),
            max_num_batched_tokens=max(*prefills, max(rows) + 1),
            **PRECISIONS[precision].settings,
            **({"num_pages": 16} if options.rehearse else {}),
        )

    def measure(self, bucket: Bucket) -> dict[str, Any]:
        """The figures of a step, or the memory that it needs."""
        needed = self._work(Bucket(1, 1, Variant.GREEDY), 0).num_bytes + SPARE_BYTES
        limit = memory_limit()
        if limit is not None and needed > limit:
            return {"needs": f"needs {needed / 2**30:.0f} GiB of {limit / 2**30:.0f}"}
        built, past = self._runner(), self.context if bucket.decode_only else 0
        timing = time_bucket(built.runner, bucket, context=past, steps=self.steps, sampling=GREEDY)
        attention, seen = built.info.attention, _activity_of(built.runner, bucket, past)
        return {
            **asdict(timing),
            "backend": attention.backend,
            "failures": dict(attention.failures),
            "bound_ms": self._work(bucket, past).least_s(*self.speeds) * 1e3,
            "busy_share": None if seen is None else seen.busy_share,
            "events": None if seen is None else seen.num_events / PROFILED_STEPS,
            "kernels": {} if seen is None else dict(seen.kernels),
            "kinds": {} if seen is None else kinds_of(seen.kernels),
        }

    def _work(self, bucket: Bucket, context: int) -> Work:
        tokens, rows = bucket.num_tokens, bucket.num_rows
        return work_of_step(
            self.config, num_tokens=tokens, num_rows=rows, context=context, value_bytes=self.value_bytes
        )

    def _runner(self) -> Built:
        if Steps._built is None or Steps._built[0] is not self:
            Steps._built = None
            gc.collect()  # the weights of the last model leave the memory before these are made
            built = build_runner(self.settings, print)
            built.runner.warm_up(self.buckets, print)
            Steps._built = self, built
        return Steps._built[1]


# ---- the least time of a step: its bytes at the memory's speed, or its products at the peak ----


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step must read and multiply. Activations, norms and sampling are left out: it is a lower bound."""

    num_bytes: int
    flops: int

    def least_s(self, bytes_per_s: float, flops_per_s: float) -> float:
        """Seconds at these speeds."""
        return max(self.num_bytes / bytes_per_s, self.flops / flops_per_s)


def work_of_step(
    config: LlamaConfig, *, num_tokens: int, num_rows: int, context: int, value_bytes: int = VALUE_BYTES
) -> Work:
    """A step of `num_rows` rows with `num_tokens / num_rows` tokens each, after `context` tokens in pages."""
    embed, heads, kv_heads, head_dim = config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim
    layer = embed * head_dim * (2 * heads + 2 * kv_heads) + 3 * embed * config.intermediate_size
    head = embed * config.vocab_size
    per_row = num_tokens // num_rows
    seen = per_row * context + per_row * (per_row + 1) // 2  # pairs of a query and a key, of one row
    kv_bytes = num_rows * (context + per_row) * 2 * kv_heads * head_dim * value_bytes
    return Work(
        num_bytes=(config.num_layers * layer + head) * value_bytes + config.num_layers * kv_bytes,
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
    kernels: dict[str, tuple[float, float]]  # by name: microseconds and launches of a step, the longest first

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


def activity(events: Iterable[tuple[float, float, str]]) -> Activity:
    """The activity of (start, end, name) in nanoseconds, of which some may overlap, in `PROFILED_STEPS` steps."""
    ordered = sorted(events)
    busy, reached = 0.0, ordered[0][0]
    sums, launches = Counter[str](), Counter[str]()
    for start, end, name in ordered:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
        sums[name] += end - start  # type: ignore[assignment]
        launches[name] += 1
    kernels = {name: (ns / 1e3 / PROFILED_STEPS, launches[name] / PROFILED_STEPS) for name, ns in sums.most_common()}
    span_s = (reached - ordered[0][0]) / 1e9
    return Activity(num_events=len(ordered), busy_s=busy / 1e9, span_s=span_s, kernels=kernels)


def kinds_of(kernels: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Microseconds of a step in each kind of kernels of a GPU, by their names."""
    found = dict.fromkeys([*KINDS, REST], 0.0)
    for name, (us, _) in kernels.items():
        found[next((kind for kind, pattern in KINDS.items() if pattern.search(name)), REST)] += us
    return found


def _events(path: Path) -> list[tuple[float, float, str]]:
    planes = sorted(ProfileData.from_file(str(path)).planes, key=lambda plane: plane.name)
    device = next((plane for plane in planes if plane.name.startswith("/device:")), None)
    if device is None:
        return []
    return [
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for line in device.lines
        if line.name.startswith(LINES)
        for event in line.events
    ]
