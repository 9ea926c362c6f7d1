"""Measures the GPU attention kernels on the attached chip: numbers first, then time. NOT YET RUN ON A CHIP.

Every shape is first held against dense attention in float32 over fresh random inputs, with NaN in every place of the
pages that no sequence owns. Then decode is timed as bytes of K and V per second, beside the bandwidth of a large copy
in the same run, and prefill as floating-point operations per second, beside a large bf16 matrix product. A run goes
through as many layers as fill the L2 cache anew, as a model does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.api import AttentionSpec, Backend, PagedAttention, RaggedBatch

PAGE_SIZE = 64
LAYERS = 8
TOLERANCE = 0.03
DECODES = {
    "64 x 2k": [2048] * 64,
    "1 x 32k": [32768],
    "256 x 512": [512] * 256,
    "1 x 64k + 63 x 512": [65536] + [512] * 63,
}
PREFILLS = {"1 x 8k": [8192], "4 x 2k": [2048] * 4}
CHECKS = [  # (query length, KV length) of every row
    [(1, 1), (1, 700), (1, 4097)],
    [(1, 300), (40, 300), (200, 200)],
    [(1, 64), (513, 2000), (7, 7)],
]


def main(target: str, heads: tuple[int, int, int], json_path: Path | None) -> None:
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise SystemExit(f"no GPU here: {device}; --static needs none")
    num_heads, num_kv_heads, head_dim = heads
    spec = AttentionSpec(
        num_query_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, page_size=PAGE_SIZE,
        dtype=jnp.bfloat16, kv_dtype=jnp.bfloat16,
    )  # fmt: skip
    print(f"{device.device_kind} (asked for {target}), jax {jax.__version__}, heads {heads}")
    for seed, rows in enumerate(CHECKS):
        check(spec, rows, seed)
    copy, product = copy_bytes_per_s(), product_flops_per_s()
    print(f"copy {copy / 1e9:.0f} GB/s (read and written), bf16 product {product / 1e12:.0f} TFLOP/s")
    figures: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": device.device_kind, "jax": jax.__version__,
        "heads": heads, "copy_bytes_per_s": copy, "product_flops_per_s": product, "decode": {}, "prefill": {},
    }  # fmt: skip
    for name, lens in DECODES.items():
        seconds = time_rows(spec, [(1, n) for n in lens])
        rate = sum(lens) * num_kv_heads * head_dim * 4 / seconds
        figures["decode"][name] = {"layer_us": seconds * 1e6, "bytes_per_s": rate, "share_of_copy": rate / copy}
        print(f"decode {name:20}{seconds * 1e6:9.1f} us a layer{rate / 1e9:8.0f} GB/s{rate / copy:7.0%} of the copy")
    for name, lens in PREFILLS.items():
        seconds = time_rows(spec, [(n, n) for n in lens])
        rate = sum(n * (n + 1) for n in lens) * 2 * num_heads * head_dim / seconds
        figures["prefill"][name] = {"layer_us": seconds * 1e6, "flops_per_s": rate, "share_of_product": rate / product}
        share = rate / product
        print(f"prefill {name:19}{seconds * 1e6:9.1f} us a layer{rate / 1e12:8.0f} TFLOP/s{share:7.0%} of the product")
    if json_path:
        json_path.write_text(json.dumps(figures, indent=1))


def make_batch(rows: list[tuple[int, int]], seed: int = 0) -> tuple[RaggedBatch, int]:
    """The batch with randomly scattered pages, and how many pages there are."""
    counts = [-(-kv_len // PAGE_SIZE) for _, kv_len in rows]
    num_pages = 1 + sum(counts)
    ids = 1 + np.random.default_rng(seed).permutation(num_pages - 1).astype(np.int32)
    table = np.zeros((len(rows), max(counts)), np.int32)
    begin = 0
    for row, count in enumerate(counts):
        table[row, :count] = ids[begin : begin + count]
        begin += count
    starts = np.concatenate([[0], np.cumsum([q for q, _ in rows])]).astype(np.int32)
    num_decodes = sum(q == 1 for q, _ in rows)
    batch = RaggedBatch(
        page_table=jnp.asarray(table), kv_lens=jnp.asarray([n for _, n in rows], jnp.int32),
        query_starts=jnp.asarray(starts), num_decodes=jnp.int32(num_decodes), num_rows=jnp.int32(len(rows)),
    )  # fmt: skip
    return batch, num_pages


def check(spec: AttentionSpec, rows: list[tuple[int, int]], seed: int) -> None:
    """SystemExit where an output is off, or is not finite."""
    rng = np.random.default_rng(seed)
    batch, num_pages = make_batch(rows, seed)
    attention = PagedAttention(spec, Backend.GPU)
    num_tokens = sum(q for q, _ in rows)

    def draw(*shape: int) -> np.ndarray:
        return np.asarray(jnp.asarray(rng.standard_normal(shape), spec.dtype))

    queries = draw(num_tokens, spec.num_query_heads, spec.head_dim)
    new = [draw(num_tokens, spec.num_kv_heads, spec.head_dim) for _ in range(2)]
    pages = np.full(attention.kv_pages(num_pages).shape, np.nan, jnp.dtype(spec.dtype))
    table, expected, begin = np.asarray(batch.page_table), [], 0
    for row, (query_len, kv_len) in enumerate(rows):
        past = kv_len - query_len
        whole = [np.concatenate([draw(past, *x.shape[1:]), x[begin : begin + query_len]]) for x in new]
        position = np.arange(past)
        for kind in range(2):
            pages[table[row, position // PAGE_SIZE], kind, :, position % PAGE_SIZE] = whole[kind][:past]
        expected.append(dense(queries[begin : begin + query_len], *whole, spec))
        begin += query_len

    @jax.jit
    def step(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        schedule = attention.make_schedule(batch, num_tokens=num_tokens, decode_only=False)
        return attention(*operands, schedule)

    output = np.asarray(step(queries, *new, pages)[0], np.float32)
    error = np.abs(output - np.concatenate(expected)).max()
    if not error <= TOLERANCE:
        raise SystemExit(f"WRONG: {rows=} is off by {error} (tolerance {TOLERANCE})")
    print(f"right: rows {rows}, largest error {error:.4f}")


def dense(queries: np.ndarray, keys: np.ndarray, values: np.ndarray, spec: AttentionSpec) -> np.ndarray:
    """Causal attention in float32; the queries are the last of the sequence."""
    group = spec.num_query_heads // spec.num_kv_heads
    keys, values = (np.repeat(x.astype(np.float32), group, axis=1) for x in (keys, values))
    scores = np.einsum("qnh,knh->nqk", queries.astype(np.float32), keys) * spec.scale
    position = len(keys) - len(queries) + np.arange(len(queries))
    scores = np.where(np.arange(len(keys)) <= position[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("nqk,knh->qnh", weights / weights.sum(-1, keepdims=True), values)


def time_rows(spec: AttentionSpec, rows: list[tuple[int, int]]) -> float:
    """Seconds of one layer's append and attention."""
    batch, num_pages = make_batch(rows)
    attention = PagedAttention(spec, Backend.GPU)
    num_tokens = sum(q for q, _ in rows)
    decode_only = all(q == 1 for q, _ in rows)
    pages = jnp.zeros(attention.kv_pages(LAYERS * num_pages).shape, spec.dtype)
    keys = [jax.random.normal(jax.random.key(i), (num_tokens, n, spec.head_dim), spec.dtype)
            for i, n in enumerate((spec.num_query_heads, spec.num_kv_heads, spec.num_kv_heads))]  # fmt: skip

    def step(batch: RaggedBatch, q: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array) -> Any:
        schedule = attention.make_schedule(batch, num_tokens=num_tokens, decode_only=decode_only)
        for layer in range(LAYERS):
            q, pages = attention(q, k, v, pages, schedule, layer * num_pages)
        return q, pages

    compiled = jax.jit(step, donate_argnums=4).lower(batch, *keys, pages).compile()

    def run() -> jax.Array:
        nonlocal pages
        output, pages = compiled(batch, *keys, pages)
        return output

    return median_seconds(run) / LAYERS


def median_seconds(run: Callable[[], jax.Array], *, batches: int = 7, calls: int = 10) -> float:
    """Of one call, with several dispatched ahead so that the host is not in the figure."""
    run().block_until_ready()
    seconds = []
    for _ in range(batches):
        begin = time.perf_counter()
        for _ in range(calls):
            output = run()
        output.block_until_ready()
        seconds.append((time.perf_counter() - begin) / calls)
    return float(np.median(seconds))


def copy_bytes_per_s() -> float:
    x = jnp.zeros(1 << 30, jnp.int8).view(jnp.int32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / median_seconds(lambda: copy(x))


def product_flops_per_s() -> float:
    n = 8192
    a = jax.random.normal(jax.random.key(0), (n, n), jnp.bfloat16)
    product = jax.jit(lambda a: a @ a)
    return 2 * n**3 / median_seconds(lambda: product(a))
