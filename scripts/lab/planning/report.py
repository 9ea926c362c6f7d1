"""The report of a plan. Every line says where its figures come from."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from batcher.buckets import BucketLadder
from scripts.building.step_times import FLOPS_EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY
from scripts.lab.planning.cost import Cost
from scripts.lab.planning.memory import GIB, Account, MemoryPlan, Sizes
from scripts.lab.planning.roofline import Roofline
from scripts.lab.planning.sweep import Candidate, Outcome
from scripts.lab.planning.workload import METRICS, Objectives

MIB = 1 << 20
COUNTED = "counted"  # from shapes and published figures
ESTIMATED = "estimated"  # from the roofline, in simulated time
COMPILED = "compiled"  # by the target's own compiler


def marked(mark: str, text: str) -> str:
    """A line of the report."""
    return f"{mark:<9}  {text}"


def memory_lines(sizes: Sizes, memory: MemoryPlan, account: Account | None, uncompiled: str | None) -> Iterator[str]:
    """What each chip holds. `uncompiled` says why there is no account, without --no-compile."""
    by = COUNTED if account is None else COMPILED
    settings, needs = sizes.settings, memory.needs
    pool = f", {sizes.pool_share:.0%} of it JAX's" if sizes.pool_share < 1 else ""
    share = f"{settings.memory_utilization:.0%} of that to be used"
    yield marked(
        COUNTED, f"{sizes.name} on {sizes.chips} x {sizes.target.chip.name} of {sizes.device_gib:g} GiB{pool}, {share}:"
    )
    weights = f"weights, {sizes.dtype}" + (f" and {sizes.quantization}" if sizes.quantization else "")
    kv = f"K/V, {sizes.kv_dtype}, {memory.num_pages} pages of {memory.page_size} tokens"
    bound = " (at most)" if account is None else ""
    step = f"temporaries of the largest step{bound}, {memory.buckets.max_num_batched_tokens} tokens"
    parts = [
        (by, weights, needs.weights),
        (by, kv, memory.kv_bytes),
        (by, step, needs.temporaries),
        (COUNTED, f"state of {memory.buckets.max_num_seqs} request slots", needs.state - memory.others),
        *([(COUNTED, f"weights of other models ({memory.max_models - 1})", memory.others)] if memory.others else []),
        (by, "of each chip", memory.total),
    ]
    for mark, name, size in parts:
        yield marked(mark, f"{size / GIB:9.2f} GiB  {name}")
    if account is not None:
        how = "from one and two" if account.is_extrapolated else "all"
        code = "" if account.code is None else f", code {account.code / MIB:.1f} MiB"
        yield marked(
            COMPILED,
            f"the largest step, {how} of {account.num_layers} layers, {account.num_pages} pages: arguments "
            f"{account.arguments / GIB:.2f} GiB{code}; {account.cpu_s:.0f} CPU seconds",
        )
    if memory.num_models > memory.max_models > 0:
        yield marked(
            COUNTED,
            f"{memory.num_models} models, {memory.max_models} on the device at once: the others come from the host's "
            f"memory in {sizes.bring_s:.2f} s at {sizes.target.host_bytes_per_s / 1e9:g} GB/s, which was not measured",
        )
    if uncompiled is not None:
        yield marked(COUNTED, f"not compiled, so the temporaries are an upper bound: {uncompiled}")
    yield marked(
        by,
        f"room for {memory.num_pages * memory.page_size} tokens: {memory.num_pages // memory.pages_per_seq} requests "
        f"of {memory.max_model_len} at once; {len(BucketLadder(memory.buckets).buckets())} programs to compile",
    )


def chips_lines(candidate: Candidate) -> Iterator[str]:
    """What the devices do that one replica does not use."""
    target, replicas = candidate.sizes.target, candidate.num_replicas
    if target.num_devices is None:
        return
    if replicas > 1:
        chips, on_host = candidate.sizes.chips, candidate.replicas_per_host
        hosts_of_one = chips // (target.devices_per_host or chips)
        where = f", --data-parallel-size {on_host}" if on_host > 1 else ""
        if hosts_of_one > 1:
            where = f", each over {hosts_of_one} hosts; a load balancer shares the requests"
        elif replicas > on_host:
            where += f" on each of {replicas // on_host} hosts; a load balancer shares the requests"
        yield marked(COUNTED, f"{target.num_devices} devices: {replicas} replicas of {chips}{where}")
    if candidate.num_idle:
        yield marked(COUNTED, f"{candidate.num_idle} of the {target.num_devices} devices are idle")


def step_lines(candidate: Candidate, context: int) -> Iterator[str]:
    """How long typical steps take."""
    line, buckets = candidate.sizes.roofline, candidate.memory.buckets
    read = "measured shares" if line.measured else f"{MEMORY_EFFICIENCY:.0%}, which nobody has measured,"
    yield marked(
        ESTIMATED,
        f"a step's time: {read} of the memory's bandwidth, {FLOPS_EFFICIENCY:.0%} of the bfloat16 peak, "
        f"{LINK_EFFICIENCY:.0%} of the links'",
    )
    for rows in sorted({1, min(64, buckets.max_num_seqs), buckets.max_num_seqs}):
        seconds = line.decode_seconds(rows, context)
        yield marked(
            ESTIMATED,
            f"{seconds * 1e3:8.2f} ms  a decode of {rows} rows of {context} tokens: {rows / seconds:.0f} tokens/s"
            f"{_read_share(line, rows)}",
        )
    budget = buckets.max_num_batched_tokens
    seconds = line.seconds(budget, 1, kv_tokens=budget, pairs=budget * (budget + 1) / 2)
    yield marked(ESTIMATED, f"{seconds * 1e3:8.2f} ms  a prompt of {budget} tokens: {budget / seconds:.0f} tokens/s")


def _read_share(line: Roofline, rows: int) -> str:
    """The share of the bandwidth, and whether it was measured with so many rows."""
    share = line.share_of_bandwidth(rows)
    if share is None:
        return ""
    if rows in line.measured:
        return f", {share:.0%} of the bandwidth, as measured (8B, bfloat16)"
    return f", {share:.0%} of the bandwidth; measured were {', '.join(map(str, line.measured))} rows (8B, bfloat16)"


def outcome_line(outcome: Outcome) -> str:
    """A load in one line."""
    p = outcome.judged
    buckets, replicas = outcome.candidate.memory.buckets, outcome.candidate.num_replicas
    latencies = ", ".join(f"{name.removesuffix('_ms').upper()} {outcome.latencies[name][p]:.0f}" for name in METRICS)
    offered = "closed loop" if outcome.offered_per_s is None else f"{outcome.offered_per_s:.2f} requests/s asked"
    met = "" if outcome.meets else "  too slow"
    return marked(
        ESTIMATED,
        f"{replicas} x {outcome.candidate.sizes.chips} chips, {buckets.max_num_seqs:4} rows, "
        f"{buckets.max_num_batched_tokens:5} tokens: {offered}, {outcome.requests_per_s:.2f} answered, "
        f"{outcome.output_tokens_per_s:.0f} output tokens/s; {p} ms: {latencies}{met}",
    )


def holds(outcome: Outcome, target: str, objectives: Objectives) -> str:
    """The rate at which an engine that knows its targets keeps them."""
    names = "/".join(name.removesuffix("_ms").upper() for name in objectives.limits)
    limits = "/".join(f"{limit:g}" for limit in objectives.limits.values())
    return f"{target} holds {outcome.offered_per_s:.1f} requests/s within {limits} ms ({names}, {outcome.judged})"


def best_lines(outcome: Outcome) -> Iterator[str]:
    """The chosen settings under their load."""
    yield marked(
        ESTIMATED,
        f"{outcome.requests_per_s:.2f} requests/s, {outcome.output_tokens_per_s:.0f} output tokens/s, "
        f"{outcome.total_tokens_per_s:.0f} tokens/s with prompts",
    )
    for name in METRICS:
        figures = "  ".join(f"{p} {value:.1f}" for p, value in outcome.latencies[name].items())
        yield marked(ESTIMATED, f"{name.removesuffix('_ms').upper():<5} {figures}  ms")
    preemptions = "" if outcome.num_preemptions is None else f", {outcome.num_preemptions} preemptions"
    yield marked(
        ESTIMATED,
        f"{outcome.occupancy:.0%} of the rows in use, a step runs {outcome.device_busy:.0%} of the time, at most "
        f"{outcome.pages_used:.0%} of the pages in use{preemptions}",
    )


def cost_lines(cost: Cost) -> Iterator[str]:
    """Prices at the simulated load, all day."""
    yield marked(
        ESTIMATED,
        f"{cost.per_month:,.0f} {cost.currency} per month; at this load a million output tokens "
        f"{cost.per_million_output:.3f} {cost.currency}, a million tokens in and out {cost.per_million_total:.3f}",
    )
    for api in cost.apis:
        ending = (
            f"{api.break_even_share:.0%} of"
            if api.break_even_share <= 1
            else f"the API is always cheaper, for that is {api.break_even_share:.1f} times"
        )
        yield marked(
            ESTIMATED,
            f"cheaper than {api.price.name} from {api.break_even:,.0f} million tokens a month on: {ending} what "
            f"it can serve, {cost.capacity:,.0f} million",
        )


def command(candidate: Candidate, account: Account | None) -> str:
    """What to type on each host. Without a number of pages, a server takes the fewer that the bound leaves room for."""
    settings, buckets = candidate.settings, candidate.memory.buckets
    words = ["scripts/serve", "--model", settings.model]
    if settings.load_format != "auto":
        words += ["--load-format", settings.load_format]
    if settings.quantization:
        words += ["--quantization", settings.quantization]
    if settings.kv_cache_dtype != "auto":
        words += ["--kv-cache-dtype", settings.kv_cache_dtype]
    words += ["--max-model-len", str(candidate.memory.max_model_len)]
    limits: dict[str, float | None]
    if (targets := settings.targets) is None:
        limits = {"max-num-seqs": buckets.max_num_seqs, "max-num-batched-tokens": buckets.max_num_batched_tokens}
    else:  # limits are ceilings, and need not be given
        limits = {
            "max-num-seqs": settings.max_num_seqs, "max-num-batched-tokens": settings.max_num_batched_tokens,
            "target-itl": targets.itl_ms, "target-ttft": targets.ttft_ms,
            "target-percentile": None if settings.target_percentile == 99 else settings.target_percentile,
        }  # fmt: skip
    for name, value in limits.items():
        words += [] if value is None else [f"--{name}", f"{value:.10g}"]
    words += ["--tensor-parallel-size", str(candidate.sizes.chips)]
    if account is not None or settings.num_pages is not None:
        words += ["--num-pages", str(candidate.memory.num_pages)]
    if candidate.replicas_per_host > 1:
        words += ["--data-parallel-size", str(candidate.replicas_per_host)]
    if named := settings.named_models:
        words += ["--models", *(f"{each.name}={each.path}" for each in named)]
    if candidate.memory.max_models:
        words += ["--max-resident-models", str(candidate.memory.max_models)]
    if not settings.enable_prefix_caching:
        words.append("--no-enable-prefix-caching")
    return shlex.join(words)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """An outcome as plain JSON values."""
    candidate, buckets = outcome.candidate, outcome.candidate.memory.buckets
    return {
        "tensor_parallel_size": candidate.sizes.chips,
        "replicas": candidate.num_replicas,
        "max_num_seqs": buckets.max_num_seqs,
        "max_num_batched_tokens": buckets.max_num_batched_tokens,
        "offered_requests_per_s": outcome.offered_per_s,
        "requests_per_s": outcome.requests_per_s,
        "output_tokens_per_s": outcome.output_tokens_per_s,
        "total_tokens_per_s": outcome.total_tokens_per_s,
        "judged": outcome.judged,
        "latencies_ms": {name.removesuffix("_ms"): outcome.latencies[name] for name in METRICS},
        "num_preemptions": outcome.num_preemptions,
        "occupancy": outcome.occupancy,
        "device_busy": outcome.device_busy,
        "pages_used": outcome.pages_used,
        "meets_slo": outcome.meets,
        "mark": ESTIMATED,
    }


def memory_json(sizes: Sizes, memory: MemoryPlan, account: Account | None, uncompiled: str | None) -> dict[str, Any]:
    """The memory of each chip as plain JSON values, in bytes."""
    return {
        **asdict(memory.needs),
        "kv": memory.kv_bytes,
        "total": memory.total,
        "num_pages": memory.num_pages,
        "page_size": memory.page_size,
        "room_tokens": memory.num_pages * memory.page_size,
        "room_requests": memory.num_pages // memory.pages_per_seq,
        "max_model_len": memory.max_model_len,
        "num_models": memory.num_models,
        "max_resident_models": memory.max_models,
        "other_models": memory.others,
        "bring_model_s": sizes.bring_s if memory.max_models else None,
        "kv_dtype": sizes.kv_dtype,
        "mark": COUNTED if account is None else COMPILED,
        "compiled": None if account is None else asdict(account),
        "not_compiled": uncompiled,
    }
