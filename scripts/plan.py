"""Computes the memory that a model needs on a chip and what remains for K/V. Needs neither the chip nor the weights.

python -m scripts.plan --model preset:llama-3.1-8b --chip v6e --tensor-parallel-size 1
python -m scripts.plan --model ~/models/Llama-3.3-70B-Instruct --device-memory 80 --tensor-parallel-size 4
"""

from __future__ import annotations

import argparse
import sys

from model.loading.source import resolve
from pallas_kernels.chips import GIB, GPUS, TPUS
from scripts.wiring.errors import add_debug_flag, failed
from scripts.wiring.settings import EngineSettings, add_engine_flags

CHIPS = TPUS | GPUS


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    p = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--chip", choices=sorted(CHIPS), default="h100")
    p.add_argument("--device-memory", type=float, metavar="GIB", help="in place of the chip's own")
    p.add_argument("--shapes", action="store_true", help="list the padded shapes of the programs that are compiled")
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def plan(settings: EngineSettings, chip: str, device_gib: float) -> str:
    """The report. Raises ValueError, with the GiB of each part, if not even one request fits."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.sharding import AbstractMesh

    from batcher.buckets import BucketLadder
    from model.execution.device_memory import DeviceMemory
    from model.execution.memory_plan import memory_needs, plan_pages
    from model.loading.stored_weights import find_weights, has_weights
    from model.network.sharding import TENSOR_AXIS, abstract_model
    from pallas_kernels.layout import default_page_size
    from pallas_kernels.spec import Backend
    from scripts.wiring.choices import choose_dtype, choose_kv_dtype, choose_model_len, choose_quantization
    from scripts.wiring.device import GPU_POOL_SHARE
    from scripts.wiring.engine import paged_attention
    from scripts.wiring.limits import bucket_config, runner_config

    platform = "tpu" if chip in TPUS else "gpu"
    source = resolve(settings.model, weights=False)
    config, stored = source.config, None
    if settings.load_format != "dummy" and source.path is not None and has_weights(source.path):
        stored = find_weights(source.path, config, settings.load_format)
        config = stored.config
    reads_fp8 = CHIPS[chip].reads_fp8
    quantization, _ = choose_quantization(settings.quantization, stored, reads_fp8=reads_fp8)
    chips = settings.tensor_parallel_size
    mesh = AbstractMesh((chips,), (TENSOR_AXIS,))
    dtype, _ = choose_dtype(settings.dtype, config.checkpoint_dtype, platform)
    max_model_len = choose_model_len(settings.max_model_len, config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    model = abstract_model(config, dtype=dtype, mesh=mesh, quantization=quantization)
    backend = Backend(platform)
    page_size = settings.page_size or default_page_size(backend, max_model_len, chip)
    arch = None if chip in TPUS else GPUS[chip].arch
    kv_dtype, _ = choose_kv_dtype(settings.kv_cache_dtype, dtype, backend, arch)
    attention = paged_attention(model.config, backend, dtype=dtype, kv_dtype=kv_dtype, page_size=page_size, mesh=mesh)
    limits = runner_config(settings, buckets, max_model_len)
    needs = memory_needs(model, attention, limits)
    total = int(device_gib * GIB * (GPU_POOL_SHARE if platform == "gpu" else 1))
    memory = DeviceMemory(total=total, free=total - needs.weights, is_host=False)
    num_pages = settings.num_pages or plan_pages(memory, needs, limits, page_size=page_size)
    pages_per_seq = -(-max_model_len // page_size)
    parts = {
        f"weights, {dtype}" + (f" and {quantization}" if quantization else ""): needs.weights,
        f"K/V, {kv_dtype}, {num_pages} pages of {page_size} tokens": (num_pages + 1) * needs.page,
        f"temporaries of the largest step (at most), {limits.max_num_batched_tokens} tokens": needs.temporaries,
        f"state of {limits.max_num_seqs} request slots": needs.state,
    }
    pool = f", {GPU_POOL_SHARE:.0%} of it JAX's" if platform == "gpu" else ""
    share = f"{settings.memory_utilization:.0%} of that to be used"
    lines = [f"{source.name} on {chips} x {chip} of {device_gib:g} GiB{pool}, {share}:"]
    lines += [f"{part / GIB:9.2f} GiB  {name}" for name, part in parts.items()]
    lines.append(f"{sum(parts.values()) / GIB:9.2f} GiB  of each chip")
    lines.append(
        f"room for {num_pages * page_size} tokens: {num_pages // pages_per_seq} requests of {max_model_len} at once; "
        f"{len(BucketLadder(buckets).buckets())} programs to compile"
    )
    return "\n".join(lines)


def shapes(settings: EngineSettings, chip: str) -> str:
    """The padded shapes of all steps, cheapest first: one program each."""
    from batcher.buckets import BucketLadder
    from scripts.wiring.limits import bucket_config

    buckets = BucketLadder(bucket_config(settings, "tpu" if chip in TPUS else "gpu")).buckets()
    return "\n".join(f"{b.num_tokens:6} tokens {b.num_rows:5} rows  {b.variant}" for b in buckets)


def main(argv: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    args = parser().parse_args(argv)
    try:
        settings = EngineSettings.from_namespace(args)
        print(plan(settings, args.chip, args.device_memory or CHIPS[args.chip].memory_gib))
        if args.shapes:
            print(shapes(settings, args.chip))
    except (Exception, KeyboardInterrupt) as error:
        return failed("plan", error, debug=args.debug)
    return 0


if __name__ == "__main__":
    sys.exit(main())
