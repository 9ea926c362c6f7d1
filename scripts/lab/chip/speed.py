"""Times the attention kernels on the attached chip, next to other implementations. NOT YET RUN ON A CHIP.

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

from model.inputs.words import described
from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import GPUS
from pallas_kernels.spec import Backend
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

RAGGED = "1 x 64k + 63 x 512"  # no peer takes it
DECODE, SHORT, PREFILL = "decode", "short chunks", "prefill"
SHAPES_OF_KINDS: dict[str, dict[str, Rows]] = {
    DECODE: {name: rows for name, rows in SHAPES.items() if all(query_len == 1 for query_len, _ in rows)},
    SHORT: {name: rows for name, rows in SHAPES.items() if all(query_len > 1 for query_len, _ in rows)},
    PREFILL: {"1 x 8k": [(8192, 8192)], "4 x 2k": [(2048, 2048)] * 4},
}
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
        if backend in (Backend.REFERENCE, Backend.GPU_MMA_INTERPRET):  # the latter's timing is the other GPU kernels'
            continue
        spec = kernels.spec_of(model, backend, "bfloat16")
        peers = TPU_PEERS if backend.startswith("tpu") else GPU_PEERS
        shapes = SHAPES_OF_KINDS | {DECODE: {n: rows for n, rows in SHAPES_OF_KINDS[DECODE].items() if n != RAGGED}}
        plan = Plan(variants=(), shapes=shapes, peers=peers, page_size=spec.page_size, batches=5, calls=5)
        if options.rehearse:
            plan = replace(plan, **REHEARSED)  # type: ignore[arg-type]
        elif index:
            plan = replace(plan, peers={})
        heads = (spec.num_query_heads, spec.num_kv_heads, spec.head_dim)
        try:
            figures, _ = measure(platform, heads, backend=backend, plan=plan)
        except Exception as error:  # a form that does not run must not hide the others' figures
            traceback.print_exc()
            result.status = "failed"
            result.problems.append(f"{backend}: {described(error)}")
            continue
        result.figures[str(backend)] = figures
        for line in [f"### {backend}", "", *tables(figures), ""]:
            result.say(line)


def measure(
    target: str, heads: tuple[int, int, int], *, backend: Backend = Backend.GPU, plan: Plan | None = None
) -> tuple[dict[str, Any], list[str]]:
    """The figures, and the report in Markdown.

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
    spec = make_spec(heads, plan.page_size)
    # The chip that is named, or the one that is attached, if its figures are known.
    attached = {chip.device_kind: chip for chip in GPUS.values()}
    chip = GPUS.get(target, attached.get(device.device_kind))
    mma_only = backend in (Backend.GPU_MMA, Backend.GPU_MMA_INTERPRET)
    machine = Machine(chip=chip, spec=spec, mma_only=mma_only) if chip and backend.startswith("gpu") else None
    for kind, shapes in plan.shapes.items():
        figures[kind] = {}
        for name, rows in shapes.items():
            layers = [make_operands(spec, rows, seed + layer) for layer in range(plan.layers)]
            by = figures[kind][name] = _side_by_side(backend, plan, layers, {} if kind == SHORT else plan.peers)
            if kind == PREFILL:
                work, speed = sum(n * (n + 1) for n, _ in rows) * 2 * heads[0] * heads[2], "product_flops_per_s"
            else:
                work, speed = sum(n for _, n in rows) * heads[1] * heads[2] * 4, "copy_bytes_per_s"
                if machine is not None:
                    by["ours"]["predicted_s"] = predict(machine, rows).seconds
            for found in by.values():
                if "layer_s" in found:
                    found["per_s"] = work / found["layer_s"]
                    found["share"] = found["per_s"] / figures[speed]
    title = f"## {figures['device']}, {figures['date'][:10]}: heads {figures['heads']}"
    return figures, [title, "", *tables(figures)]


def _check(backend: Backend, variant: Any, sizes: kernels.Sizes, seed: int) -> dict[str, Any]:
    """The test of a form before the timings. Raises SystemExit if it is wrong."""
    heads, page_size, dtype = variant
    spec = make_spec(heads, page_size, jnp.dtype(dtype))
    found = kernels.self_test(PagedAttention(spec, backend), sizes, seed)
    if "problem" in found:
        raise SystemExit(f"WRONG: {spec}: {found['problem']}")
    return {"heads": list(heads), "page_size": page_size, "dtype": dtype, **found}


def _side_by_side(
    backend: Backend, plan: Plan, layers: list[Operands], peers: Mapping[str, Peer]
) -> dict[str, dict[str, Any]]:
    """Seconds of one layer: of our kernels, and of each peer or the reason why it is missing."""
    found: dict[str, Any] = {"ours": {"layer_s": time_paged(backend, plan, layers)}}
    for name, peer in peers.items():
        if not layers[0].uniform:
            found[name] = {"missing": "rows of different lengths"}
            continue
        try:
            found[name] = {"layer_s": time_peer(peer, plan, layers)}
        except Exception as error:  # a peer's failure must not end the run: it is reported
            found[name] = {"missing": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"}
    return found


def time_paged(backend: Backend, plan: Plan, layers: list[Operands]) -> float:
    """The pages of all layers are in one array (`first_page`). All layers share the first layer's page table."""
    first = layers[0]
    attention = PagedAttention(first.spec, backend)
    new = [first.new(whole) for whole in (first.keys, first.values)]
    pages = random_pages(attention, first.num_pages, copies=len(layers))

    def step(batch: Any, queries: jax.Array, keys: jax.Array, values: jax.Array, pages: jax.Array) -> Any:
        metadata = attention.make_metadata(
            batch,
            num_tokens=first.num_tokens,
            decode_only=first.decode_only,
            spec_decode=1 < max(query_len for query_len, _ in first.rows) <= FEW_QUERIES,
        )
        for layer in range(len(layers)):
            queries, pages = attention(queries, keys, values, pages, metadata, layer * first.num_pages)
        return queries, pages

    compiled = jax.jit(step, donate_argnums=4).lower(first.batch, first.queries, *new, pages).compile()

    def run() -> jax.Array:
        nonlocal pages
        output, pages = compiled(first.batch, first.queries, *new, pages)
        return output

    return median_seconds(run, plan) / len(layers)


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

    compiled = jax.jit(step).lower(queries, stores).compile()
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


def tables(figures: dict[str, Any]) -> list[str]:
    """The figures in Markdown."""
    used = ", ".join(f"{name} {value}" for name, value in figures["versions"].items())
    lines = [f"Driver {figures['driver']}; {used}; seed {figures['seed']}."]
    if checks := figures["checks"]:
        worst = max(check["largest_error"] for check in checks)
        lines.append(f"Numbers: {len(checks)} forms right, largest error of a row {worst:.2%}.")
    lines.append(
        f"Copy {figures['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written); bf16 product "
        f"{figures['product_flops_per_s'] / 1e12:.0f} TFLOP/s."
    )
    kinds = ((DECODE, "GB/s", 1e9, "copy"), (SHORT, "GB/s", 1e9, "copy"), (PREFILL, "TFLOP/s", 1e12, "product"))
    for kind, unit, scale, of in kinds:
        if not figures[kind]:
            continue
        speeds = {"us": ".1f", "predicted us": ".1f", unit: ".0f", f"of the {of}": ".0%", "goal": ".0%"}
        table = Table({f"{kind}, one layer": "", "by": "", **speeds})
        for name, by in figures[kind].items():
            for who, found in by.items():
                if "missing" in found:
                    table.row(name, who, *4 * [None], found["missing"])
                    continue
                predicted, goal = found.get("predicted_s"), GOALS.get(name) if who == "ours" else None
                times = found["layer_s"] * 1e6, predicted and predicted * 1e6
                table.row(name, who, *times, found["per_s"] / scale, found["share"], goal)
        lines += ["", *table.lines]
    return lines
