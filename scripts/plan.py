"""What a model needs on a chip and what is left for K/V, without the chip and without the weights.

python -m scripts.plan --model preset:llama-3.1-8b --chip v6e --tensor-parallel-size 1
python -m scripts.plan --model ~/models/Llama-3.3-70B-Instruct --device-memory 80 --tensor-parallel-size 4
"""

from __future__ import annotations

import argparse
import math
import sys

from model.loading.source import resolve
from pallas_kernels.chips import GIB, GPUS, TPUS
from scripts.wiring.errors import add_debug_flag, failed
from scripts.wiring.settings import EngineSettings, add_engine_flags

CHIPS = TPUS | GPUS


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m scripts.plan", description=__doc__.splitlines()[0], allow_abbrev=False)
    p.add_argument("--chip", choices=sorted(CHIPS), default="h100")
    p.add_argument("--device-memory", type=float, metavar="GIB", help="in place of the chip's own")
    p.add_argument("--shapes", action="store_true", help="list the padded shapes of the programs that are compiled")
    add_engine_flags(p)
    add_debug_flag(p)
    return p


def plan(settings: EngineSettings, chip: str, device_gib: float) -> str:
    """The report. ValueError, with the GiB of each part, where not even one request fits."""
    import jax
    from flax import nnx

    jax.config.update("jax_platforms", "cpu")
    from batcher.buckets import BucketLadder
    from model.execution import kv_cache
    from model.network.llama import Llama
    from model.network.sharding import partition, stored_config
    from pallas_kernels.api import PagedAttention
    from pallas_kernels.layout import default_page_size
    from pallas_kernels.spec import AttentionSpec, Backend
    from scripts.wiring.engine import GPU_POOL_SHARE, bucket_config, choose_dtype, choose_model_len

    platform = "tpu" if chip in TPUS else "gpu"
    source = resolve(settings.model, weights=False)
    chips = settings.tensor_parallel_size
    stored = stored_config(source.config, chips)
    dtype, _ = choose_dtype(settings.dtype, source.config.checkpoint_dtype, platform)
    max_model_len = choose_model_len(settings.max_model_len, source.config.max_position_embeddings)
    buckets = bucket_config(settings, platform)
    model = nnx.eval_shape(lambda: Llama(stored, dtype=dtype, rngs=nnx.Rngs(0), num_shards=chips))
    weights = 0
    for _, variable in nnx.to_flat_state(nnx.state(model)):
        value = variable.get_value()
        share = chips if partition(variable.get_metadata("axes")) else 1
        weights += math.prod(value.shape) * value.dtype.itemsize // share
    backend = Backend(platform)
    page_size = settings.page_size or default_page_size(backend, max_model_len, chip)
    heads = {"num_query_heads": stored.num_heads // chips, "num_kv_heads": stored.num_kv_heads // chips}
    spec = AttentionSpec(**heads, head_dim=stored.head_dim, page_size=page_size, dtype=dtype, kv_dtype=dtype)
    page_bytes = PagedAttention(spec, backend).page_bytes() * stored.num_layers
    pages_per_seq = -(-max_model_len // page_size)
    rows = buckets.max_num_seqs
    state = kv_cache.state_bytes(stored, num_slots=rows, pages_per_seq=pages_per_seq, num_shards=chips)
    temporaries = kv_cache.temporaries_bound(
        stored,
        num_tokens=buckets.max_num_batched_tokens,
        num_rows=rows,
        itemsize=jax.numpy.dtype(dtype).itemsize,
        num_shards=chips,
    )
    total = int(device_gib * GIB * (GPU_POOL_SHARE if platform == "gpu" else 1))
    num_pages = settings.num_pages or kv_cache.plan_pages(
        memory=kv_cache.DeviceMemory(total=total, free=total - weights, is_host=False),
        needs=kv_cache.MemoryNeeds(weights=weights, state=state, temporaries=temporaries),
        memory_utilization=settings.memory_utilization,
        page_bytes=page_bytes,
        page_size=page_size,
        max_num_seqs=rows,
        max_model_len=max_model_len,
    )
    parts = {
        f"weights, {dtype}": weights,
        f"K/V, {num_pages} pages of {page_size} tokens": (num_pages + 1) * page_bytes,
        f"temporaries of the largest step (at most), {buckets.max_num_batched_tokens} tokens": temporaries,
        f"state of {rows} request slots": state,
    }
    pool = f", {GPU_POOL_SHARE:.0%} of it JAX's" if platform == "gpu" else ""
    share = f"{settings.memory_utilization:.0%} of that to be used"
    lines = [f"{source.name} on {chips} x {chip} of {device_gib:g} GiB{pool}, {share}:"]
    lines += [f"{size / GIB:9.2f} GiB  {name}" for name, size in parts.items()]
    lines.append(f"{sum(parts.values()) / GIB:9.2f} GiB  of each chip")
    lines.append(
        f"room for {num_pages * page_size} tokens: {num_pages // pages_per_seq} requests of {max_model_len} at once; "
        f"{len(BucketLadder(buckets).buckets())} programs to compile"
    )
    return "\n".join(lines)


def shapes(settings: EngineSettings, chip: str) -> str:
    """The padded shapes of all steps, cheapest first: one program each."""
    from batcher.buckets import BucketLadder
    from scripts.wiring.engine import bucket_config

    buckets = BucketLadder(bucket_config(settings, "tpu" if chip in TPUS else "gpu")).buckets()
    return "\n".join(f"{b.num_tokens:6} tokens {b.num_rows:5} rows  {b.variant}" for b in buckets)


def main(argv: list[str] | None = None) -> int:
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
