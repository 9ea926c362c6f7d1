"""Checks, then times, the attention kernels on the attached chip. NOT YET RUN ON A CHIP.

The figure of decode is bytes of K and V per second, compared with the bandwidth of a large copy in the same run. That
of prefill is floating-point operations per second, compared with a large bf16 matrix product. A call goes through
several layers with separate K and V, so that no layer finds them in the L2 cache. Only the figures of the paged kernels
include the append of the step's K and V.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import PagedAttention
from pallas_kernels.chips import GPUS, GpuChip
from pallas_kernels.spec import Backend
from scripts.lab.accounts.gpu_prediction import FEW_QUERIES, SHAPES, Machine, Rows, predict
from scripts.lab.accounts.specs import make_spec
from scripts.lab.chip import gpu_check
from scripts.lab.chip.gpu_operands import Operands, make_operands
from scripts.lab.chip.gpu_peers import PEERS, Peer


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The checks and timings of a run. Goals are relative to the chip's copy and product speeds in the same run."""

    variants: list[Any] = field(default_factory=lambda: gpu_check.VARIANTS)
    checked: list[Rows] = field(default_factory=lambda: gpu_check.BATCHES)
    decodes: dict[str, list[int]] = field(
        default_factory=lambda: {
            name: [kv_len for _, kv_len in rows] for name, rows in SHAPES.items() if all(q == 1 for q, _ in rows)
        }
    )
    prefills: dict[str, list[int]] = field(default_factory=lambda: {"1 x 8k": [8192], "4 x 2k": [2048] * 4})
    short_chunks: dict[str, Rows] = field(
        default_factory=lambda: {name: rows for name, rows in SHAPES.items() if all(q > 1 for q, _ in rows)}
    )
    peers: Mapping[str, Peer] = field(default_factory=lambda: PEERS)
    page_size: int = 64
    layers: int = 8
    batches: int = 7  # of calls; the median of the batches is reported
    calls: int = 10
    copy_bytes: int = 1 << 30
    product_size: int = 8192


GOALS = {"64 x 2k": 0.85, "1 x 32k": 0.75, "256 x 512": 0.75, "1 x 8k": 0.6}


def measure(
    target: str, model: str, heads: tuple[int, int, int], *, backend: Backend = Backend.GPU, plan: Plan | None = None
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
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"python -m scripts.lab kernels --target {target} --device --model {model}",
        "device": device.device_kind, "driver": _driver(), "seed": seed,
        "versions": {name: version(name) for name in ("jax", "jaxlib")} | {"plug-in": device.client.platform_version},
        "heads": list(heads),
    }  # fmt: skip
    figures["checks"] = list(gpu_check.check_all(backend, plan.variants, plan.checked, seed))
    figures["copy_bytes_per_s"] = copy_bytes_per_s(plan)
    figures["product_flops_per_s"] = product_flops_per_s(plan)
    spec = make_spec(heads, plan.page_size)
    figures["decode"] = {
        name: _side_by_side(backend, plan, [make_operands(spec, [(1, n) for n in lens], seed + layer)
                                            for layer in range(plan.layers)])
        for name, lens in plan.decodes.items()
    }  # fmt: skip
    figures["prefill"] = {
        name: _side_by_side(backend, plan, [make_operands(spec, [(n, n) for n in lens], seed + layer)
                                            for layer in range(plan.layers)])
        for name, lens in plan.prefills.items()
    }  # fmt: skip
    figures["short chunks"] = {
        name: _side_by_side(
            backend, plan, [make_operands(spec, rows, seed + layer) for layer in range(plan.layers)], with_peers=False
        )
        for name, rows in plan.short_chunks.items()
    }
    _add_shares(figures, plan)
    if (chip := _chip(target, device.device_kind)) is not None and backend.startswith("gpu"):
        mma_only = backend in (Backend.GPU_MMA, Backend.GPU_MMA_INTERPRET)
        _add_predictions(figures, Machine(chip=chip, spec=spec, mma_only=mma_only), plan)
    return figures, report(figures)


def _side_by_side(backend: Backend, plan: Plan, layers: list[Operands], *, with_peers: bool = True) -> dict[str, Any]:
    """Seconds of one layer: of our kernels, and of each peer or the reason why it is missing."""
    found: dict[str, Any] = {"ours": {"layer_s": time_paged(backend, plan, layers)}}
    for name, peer in plan.peers.items() if with_peers else ():
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


def _add_shares(figures: dict[str, Any], plan: Plan) -> None:
    num_heads, num_kv_heads, head_dim = figures["heads"]
    keys = {("decode", name): sum(lens) for name, lens in plan.decodes.items()}
    keys |= {("short chunks", name): sum(n for _, n in rows) for name, rows in plan.short_chunks.items()}
    for (kind, name), count in keys.items():
        for found in figures[kind][name].values():
            if "layer_s" in found:
                found["per_s"] = count * num_kv_heads * head_dim * 4 / found["layer_s"]
                found["share"] = found["per_s"] / figures["copy_bytes_per_s"]
    for name, lens in plan.prefills.items():
        for found in figures["prefill"][name].values():
            if "layer_s" in found:
                found["per_s"] = sum(n * (n + 1) for n in lens) * 2 * num_heads * head_dim / found["layer_s"]
                found["share"] = found["per_s"] / figures["product_flops_per_s"]


def _chip(target: str, device_kind: str) -> GpuChip | None:
    """The chip that is named, or the one that is attached, if its figures are known."""
    attached = [chip for chip in GPUS.values() if chip.device_kind == device_kind]
    return GPUS.get(target, attached[0] if attached else None)


def _add_predictions(figures: dict[str, Any], machine: Machine, plan: Plan) -> None:
    """Of the kernels whose bound is the memory: the model's seconds, next to those measured."""
    decodes: dict[str, Rows] = {name: [(1, n) for n in lens] for name, lens in plan.decodes.items()}
    for kind, shapes in (("decode", decodes), ("short chunks", plan.short_chunks)):
        for name, rows in shapes.items():
            figures[kind][name]["ours"]["predicted_s"] = predict(machine, rows).seconds


def report(figures: dict[str, Any]) -> list[str]:
    """The figures in Markdown, line by line, with their command."""
    title = f"## {figures['device']}, {figures['date'][:10]}: heads {figures['heads']}"
    return [title, "", f"    {figures['command']}", "", *tables(figures)]


def tables(figures: dict[str, Any]) -> list[str]:
    """The figures alone."""
    versions = ", ".join(f"{name} {value}" for name, value in figures["versions"].items())
    lines = [f"Driver {figures['driver']}; {versions}; seed {figures['seed']}."]
    if checks := figures["checks"]:
        worst = max(check["error"] for check in checks)
        lines.append(
            f"Numbers: {len(checks)} batches right, largest error {worst:.4f} (tolerance {gpu_check.TOLERANCE})."
        )
    lines.append(
        f"Copy {figures['copy_bytes_per_s'] / 1e9:.0f} GB/s (read and written); bf16 product "
        f"{figures['product_flops_per_s'] / 1e12:.0f} TFLOP/s."
    )
    kinds = (
        ("decode", "GB/s", 1e9, "copy"),
        ("short chunks", "GB/s", 1e9, "copy"),
        ("prefill", "TFLOP/s", 1e12, "product"),
    )
    for kind, unit, scale, of in kinds:
        if not figures[kind]:
            continue
        lines += [
            "",
            f"| {kind}, one layer | by | us | predicted us | {unit} | of the {of} | goal |",
            "|---|---|---|---|---|---|---|",
        ]
        for name, by in figures[kind].items():
            for who, found in by.items():
                if "missing" in found:
                    lines.append(f"| {name} | {who} | - | - | - | - | {found['missing']} |")
                    continue
                goal = f"{GOALS[name]:.0%}" if who == "ours" and name in GOALS else ""
                predicted = f"{found['predicted_s'] * 1e6:.1f}" if "predicted_s" in found else "-"
                lines.append(
                    f"| {name} | {who} | {found['layer_s'] * 1e6:.1f} | {predicted} | {found['per_s'] / scale:.0f} "
                    f"| {found['share']:.0%} | {goal} |"
                )
    return lines


def _driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
