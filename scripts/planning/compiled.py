"""Sizes that the target's own compiler gives, without the chip."""

from __future__ import annotations

from scripts.benchmarks.accounts.step_table import compiled
from scripts.planning.memory import MemoryPlan, Sizes

# Layers follow one another and reuse the same temporaries: the third layer adds none (Llama 3.1 8B on v6e, a step of
# 2,048 tokens: 134, 189 and 188 MiB with one, two and three layers).
NUM_LAYERS = 2


def compiled_temporaries(sizes: Sizes, memory: MemoryPlan) -> int:
    """Bytes that the largest step writes besides its results, on each chip.

    Raises:
        ValueError: the model is not a preset, which is what the accounts compile.
        RuntimeError: the compiler is not installed, or refuses.
    """
    kind, _, preset = sizes.settings.model.partition(":")
    if kind != "preset" or not preset:
        raise ValueError("--compile needs --model preset:NAME (or 8b, 70b): only presets are compiled without weights")
    target, family = sizes.target, sizes.target.platform
    flags = ["--preset", preset, "--layers", str(NUM_LAYERS)]
    flags += ["--tokens", str(memory.buckets.max_num_batched_tokens)]
    if sizes.quantization:
        flags += ["--quantization", sizes.quantization]
    if family == "gpu":
        kv = {"bfloat16": "auto", "float8_e4m3fn": "fp8"}.get(sizes.kv_dtype, sizes.kv_dtype)
        flags += ["--target", target.chip.name, "--chips", str(sizes.chips), "--kv-cache-dtype", kv]
        flags += ["--rows", str(memory.buckets.max_num_seqs), "--variant", "sample"]
    else:
        flags += ["--target", _slice(sizes), "--kv-dtype", sizes.kv_dtype]
    return compiled(family, *flags)["temp_bytes"]


def _slice(sizes: Sizes) -> str:
    """The TPU slice of one replica, as libtpu names it. tpu7x has two devices per chip."""
    name = sizes.target.chip.name
    chips = -(-sizes.chips // 2) if name == "tpu7x" else sizes.chips
    shapes = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
    if chips not in shapes:
        raise ValueError(f"--compile: there is no slice of {chips} {name} chips")
    return f"{name}:{shapes[chips]}" + ("x1" if name in ("v5p", "tpu7x") else "")
