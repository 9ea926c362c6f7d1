"""Times the attention kernels on the attached chip, next to other implementations.

The figure of decode is bytes of K and V per second, compared with the bandwidth of a large copy in the same run. That
of prefill is floating-point operations per second, compared with a large bf16 matrix product. A call goes through
several layers with separate K and V, so that no layer finds them in the L2 cache. Only the figures of the paged kernels
include the append of the step's K and V. Before the timings of `lab kernels --device`, all forms of the kernels are
tested (`kernels.self_test`).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model.compiling.compiler_options import compiler_options
from model.inputs.words import described
from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import GPUS
from pallas_kernels.spec import AttentionSpec, Backend
from scripts.building.device import start_jax
from scripts.flags.settings import EngineSettings
from scripts.lab.accounts.gpu_prediction import FEW_QUERIES, SHAPES, Machine, Rows, predict
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip import kernels
from scripts.lab.chip.operands import Operands, make_operands
from scripts.lab.chip.parts import Options, Result
from scripts.lab.chip.peers import GPU_PEERS, TPU_PEERS, Peer
from scripts.lab.chip.versions import nvidia_smi
from scripts.lab.tables import Table, command, versions

DECODE, SHORT, PREFILL = "decode", "short chunks", "prefill"
SHAPES_OF_KINDS: dict[str, dict[str, Rows]] = {
    DECODE: {name: rows for name, rows in SHAPES.items() if all(query_len == 1 for query_len, _ in rows)},
    SHORT: {name: rows for name, rows in SHAPES.items() if all(query_len > 1 for query_len, _ in rows)},
    PREFILL: {"1 x 8k": [(8192, 8192)], "4 x 2k": [(2048, 2048)] * 4},
}
KINDS = ((DECODE, "GB/s", 1e9, "copy"), (SHORT, "GB/s", 1e9, "copy"), (PREFILL, "TFLOP/s", 1e12, "product"))
GOALS = {"64 x 2k": 0.85, "1 x 32k": 0.75, "256 x 512": 0.75, "1 x 8k": 0.6}
# (query heads, KV heads, head dim), page size, dtype: all forms of the kernels in the compile-only tests.
VARIANTS = (
    ((32, 8, 128), 64, "bfloat16"),
    ((32, 8, 64), 64, "bfloat16"),
    ((24, 8, 128), 32, "bfloat16"),
    ((8, 1, 128), 128, "bfloat16"),
    ((8, 8, 64), 16, "bfloat16"),
    ((16, 1, 128), 16, "bfloat16"),
    ((32, 8, 128), 64, "float16"),
)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The tests and timings of a run. Goals are relative to the chip's copy and product speeds in the same run."""

    variants: Sequence[Any] = VARIANTS  # that are tested before
    sizes: kernels.Sizes = kernels.FULL  # of these tests
    shapes: Mapping[str, Mapping[str, Rows]] = field(default_factory=lambda: SHAPES_OF_KINDS)
    peers: Mapping[str, Peer] = field(default_factory=lambda: GPU_PEERS)
    page_size: int = 64
    layers: int = 8
    batches: int = 7  # of calls; the median of the batches is reported
    calls: int = 10
    copy_bytes: int = 1 << 30
    product_size: int = 8192


REHEARSED = {
    "shapes": {DECODE: {"64 x 2k": [(1, 20)]}, SHORT: {}, PREFILL: {"1 x 8k": [(16, 16)]}},
    "layers": 1, "batches": 1, "calls": 1, "copy_bytes": 1 << 12, "product_size": 16,
}  # fmt: skip


def run(options: Options, result: Result) -> None:
    """Fills the result: a table for each form of the kernels, the first one with the other implementations."""
    platform = start_jax(EngineSettings(device=options.device))
    model = options.models[-1]
    for index, backend in enumerate(kernels.chip_backends(platform, rehearse=options.rehearse)):
        # `GPU_MMA_INTERPRET` has the timing of the other GPU kernels. JAX's kernel is one of the peers.
        if backend in (Backend.REFERENCE, Backend.GPU_MMA_INTERPRET, Backend.TPU_JAX):
            continue
        spec = kernels.spec_of(model, backend, "bfloat16")
        peers = TPU_PEERS if backend.startswith("tpu") else GPU_PEERS
        plan = Plan(variants=(), peers=peers, page_size=spec.page_size, batches=5, calls=5)
        if options.rehearse:
            plan = replace(plan, **REHEARSED)  # type: ignore[arg-type]
        elif index:  # the second form for GPUs has the same kernel for decodes
            plan = replace(plan, shapes={PREFILL: SHAPES_OF_KINDS[PREFILL]}, peers={})
        heads = (spec.num_query_heads, spec.num_kv_heads, spec.head_dim)
        result.say(f"### {backend}")
        result.say("")
        try:
            figures = measure(platform, heads, backend=backend, plan=plan, say=result.say)
        except Exception as error:  # a form that does not run must not hide the others' figures
            traceback.print_exc()
            result.status = "failed"
            result.problems.append(f"{backend}: {described(error)}")
            continue
        result.say("")
        result.figures[str(backend)] = figures
        for kind in plan.shapes:
            for shape, by in figures.get(kind, {}).items():
                if "missing" in by["ours"]:
                    result.status = "failed"
                    result.problems.append(f"{backend}, {kind}, {shape}: {by['ours']['missing']}")


def measure(
    target: str,
    heads: tuple[int, int, int],
    *,
    say: Callable[[str], None],
    backend: Backend = Backend.GPU,
    plan: Plan | None = None,
) -> dict[str, Any]:
    """The figures. The report in Markdown is said line by line, as they are measured, the other implementations last.

    Raises:
        SystemExit: there is no GPU, or a kernel's numbers are wrong.
    """
    plan = plan or Plan()
    device = jax.devices()[0]
    if backend is Backend.GPU and device.platform != "gpu":
        raise SystemExit(f"no GPU here, but {device.device_kind}: --static needs none")
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command(),
        "device": device.device_kind, "driver": nvidia_smi().get("driver_version", "unknown"), "seed": seed,
        "versions": versions(("jax", "jaxlib")) | {"plug-in": device.client.platform_version},
        "heads": list(heads), "checks": [_check(backend, variant, plan.sizes, seed) for variant in plan.variants],
        "copy_bytes_per_s": copy_bytes_per_s(plan), "product_flops_per_s": product_flops_per_s(plan),
    }  # fmt: skip
    for line in _head(figures):
        say(line)
    spec = make_spec(heads, plan.page_size)
    # The chip that is named, or the one that is attached, if its figures are known.
    attached = {chip.device_kind: chip for chip in GPUS.values()}
    chip = GPUS.get(target, attached.get(device.device_kind))
    mma_only = backend in (Backend.GPU_MMA, Backend.GPU_MMA_INTERPRET)
    machine = Machine(chip=chip, spec=spec, mma_only=mma_only) if chip and backend.startswith("gpu") else None

    def ours(rows: Rows) -> dict[str, dict[str, Any]]:
        return {"ours": _found(lambda: time_paged(backend, plan, spec, rows, seed))}

    def others(rows: Rows) -> dict[str, dict[str, Any]]:
        return _peers(plan, spec, rows, seed)

    for implementations in (ours, others) if plan.peers else (ours,):
        for kind, unit, scale, of in KINDS:
            shapes = {} if implementations is others and kind == SHORT else plan.shapes.get(kind, {})
            if shapes:
                say("")
                columns = {"us": ".1f", "predicted us": ".1f", unit: ".0f", f"of the {of}": ".0%", "goal": ".0%"}
                table = Table({f"{kind}, one layer": "", "by": "", **columns}, say)
            for name, rows in shapes.items():
                by = implementations(rows)
                if kind == PREFILL:
                    work, speed = sum(n * (n + 1) for n, _ in rows) * 2 * heads[0] * heads[2], "product_flops_per_s"
                else:
                    work, speed = sum(n for _, n in rows) * heads[1] * heads[2] * 4, "copy_bytes_per_s"
                    if machine is not None and "ours" in by:
                        by["ours"]["predicted_s"] = predict(machine, rows).seconds
                for who, found in by.items():
                    if "layer_s" in found:
                        found["per_s"] = work / found["layer_s"]
                        found["share"] = found["per_s"] / figures[speed]
                    table.row(name, who, *_cells(found, scale, GOALS.get(name) if who == "ours" else None))
                figures.setdefault(kind, {}).setdefault(name, {}).update(by)
    return figures


def _check(backend: Backend, variant: Any, sizes: kernels.Sizes, seed: int) -> dict[str, Any]:
    """The test of a form before the timings. Raises SystemExit if it is wrong."""
    heads, page_size, dtype = variant
    spec = make_spec(heads, page_size, jnp.dtype(dtype))
    found = kernels.self_test(PagedAttention(spec, backend), sizes, seed)
    if "problem" in found:
        raise SystemExit(f"WRONG: {spec}: {found['problem']}")
    return {"heads": list(heads), "page_size": page_size, "dtype": dtype, **found}


def _found(time_it: Callable[[], float]) -> dict[str, Any]:
    """Seconds of a layer, or the reason why they are missing: one failure must not end the run."""
    try:
        return {"layer_s": time_it()}
    except Exception as error:
        traceback.print_exc()
        return {"missing": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}


def _peers(plan: Plan, spec: AttentionSpec, rows: Rows, seed: int) -> dict[str, dict[str, Any]]:
    """What each peer needs for a layer. A peer has its own store of each layer, besides the operands."""
    if len(set(rows)) > 1:
        return {name: {"missing": "rows of different lengths"} for name in plan.peers}
    num_layers = _layers_that_fit(plan, spec, rows, copies=3)
    layers = [make_operands(spec, rows, seed + layer) for layer in range(num_layers)]
    return {name: _found(lambda peer=peer: time_peer(peer, plan, layers)) for name, peer in plan.peers.items()}  # type: ignore[misc]


def _layers_that_fit(plan: Plan, spec: AttentionSpec, rows: Rows, *, copies: int) -> int:
    """The plan's layers, or as many as the memory holds with so many copies of each one's keys and values. As much as
    three layers have is for the operands of the first one, and for temporaries."""
    layer = sum(n for _, n in rows) * 2 * spec.num_kv_heads * spec.head_dim * jnp.dtype(spec.dtype).itemsize
    limit = kernels.memory_limit()
    return plan.layers if limit is None else max(1, min(plan.layers, (limit // layer - 3) // copies))


def time_paged(backend: Backend, plan: Plan, spec: AttentionSpec, rows: Rows, seed: int) -> float:
    """Seconds of a layer. The pages of all layers are in one array (`first_page`), and all have one page table."""
    first = make_operands(spec, rows, seed)
    num_layers = _layers_that_fit(plan, spec, rows, copies=1)
    attention = PagedAttention(spec, backend)
    batch, queries, num_pages = first.batch, first.queries, first.num_pages
    num_tokens, decode_only = first.num_tokens, first.decode_only
    new = [first.new(whole) for whole in (first.keys, first.values)]
    del first  # its keys and values may be a large part of the memory
    pages = random_pages(attention, num_pages, copies=num_layers)

    attend = jax.jit(attention)  # traced and lowered once for all layers, as in a server's step

    def step(batch: Any, queries: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array) -> Any:
        spec_decode = 1 < max(query_len for query_len, _ in rows) <= FEW_QUERIES
        metadata = attention.make_metadata(
            batch, num_tokens=num_tokens, decode_only=decode_only, spec_decode=spec_decode
        )
        for layer in range(num_layers):
            queries, pages = attend(queries, keys, values, pages, metadata, jnp.int32(layer * num_pages))
        return queries, pages

    options = compiler_options(jax.devices()[0].platform)  # as a server's steps: in a CUDA graph
    compiled = jax.jit(step, donate_argnums=4).lower(batch, queries, *new, pages).compile(compiler_options=options)

    def run() -> jax.Array:
        nonlocal pages
        output, pages = compiled(batch, queries, *new, pages)
        return output

    return median_seconds(run, plan) / num_layers


def random_pages(attention: PagedAttention, num_pages: int, *, copies: int) -> jax.Array:
    """The pages of `copies` layers: normal values in every slot. Zeros would take less power, and might run faster."""
    like = attention.kv_pages(num_pages)
    if like.dtype == jnp.uint32:  # the TPU's words of two values
        pairs = jax.random.normal(jax.random.key(0), (*like.shape, 2), jnp.bfloat16)
        pages = jax.lax.bitcast_convert_type(pairs, jnp.uint32)
    else:
        pages = jax.random.normal(jax.random.key(0), like.shape, like.dtype)
    return jnp.tile(pages, (copies, *[1] * (pages.ndim - 1)))


def time_peer(peer: Peer, plan: Plan, layers: list[Operands]) -> float:
    """Seconds per layer."""
    first = layers[0]
    stores = [peer.store(operands) for operands in layers]
    queries = first.queries.reshape(len(first.rows), -1, *first.queries.shape[1:])

    def step(queries: jax.Array, stores: list[Any]) -> jax.Array:
        for operands, store in zip(layers, stores, strict=True):
            queries = peer.attend(operands, queries, store)
        return queries

    options = compiler_options(jax.devices()[0].platform)
    compiled = jax.jit(step).lower(queries, stores).compile(compiler_options=options)
    return median_seconds(lambda: compiled(queries, stores), plan) / len(layers)


def median_seconds(run: Callable[[], jax.Array], plan: Plan) -> float:
    """The seconds of one call. Several calls are dispatched ahead, to exclude the host's time."""
    run().block_until_ready()
    seconds = []
    for _ in range(plan.batches):
        begin = time.perf_counter()
        for _ in range(plan.calls):
            output = run()
        output.block_until_ready()
        seconds.append((time.perf_counter() - begin) / plan.calls)
    return float(np.median(seconds))


def copy_bytes_per_s(plan: Plan) -> float:
    """Bytes per second, read and written, of a kernel that adds one to every word."""
    x = jnp.zeros(plan.copy_bytes // 4, jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: copy(x), plan)


def product_flops_per_s(plan: Plan) -> float:
    """Floating-point operations per second of a large bfloat16 matrix product."""
    n = plan.product_size
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return 2 * n**3 / median_seconds(lambda: product(a), plan)


def _head(figures: dict[str, Any]) -> list[str]:
    used = ", ".join(f"{name} {version}" for name, version in figures["versions"].items())
    lines = [f"## {figures['device']}, {figures['date'][:10]}: heads {figures['heads']}", ""]
    lines.append(f"Driver {figures['driver']}; {used}; seed {figures['seed']}.")
    if checks := figures["checks"]:
        worst = max(check["largest_error"] for check in checks)
        lines.append(f"Numbers: {len(checks)} forms right, largest error of a row {worst:.2%}.")
    lines.append(
        f"Copy {figures['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written); bf16 product "
        f"{figures['product_flops_per_s'] / 1e12:.0f} TFLOP/s."
    )
    return lines


def _cells(found: dict[str, Any], scale: float, goal: float | None) -> tuple[object, ...]:
    if "missing" in found:
        return (*4 * [None], found["missing"])
    predicted = found.get("predicted_s")
    return found["layer_s"] * 1e6, predicted and predicted * 1e6, found["per_s"] / scale, found["share"], goal
