"""The limits of an engine: rows, tokens and shapes of its steps, from the settings and the platform."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batcher.buckets import BucketConfig
from scripts.wiring.settings import EngineSettings

if TYPE_CHECKING:
    from model.execution.memory_plan import RunnerConfig

# Per platform: the default limits, and the shapes that are worth a program.
_DEFAULTS = {
    # A CPU takes about as long to read the weights as to compute one token, so long steps only delay other requests.
    # Its compiler is slow, so there are few shapes.
    "cpu": BucketConfig(
        max_num_seqs=64,
        max_num_batched_tokens=512,
        min_decode_rows=1,
        min_mixed_tokens=16,
        half_steps=False,
        few_rows=16,
    ),
    # On chips a few rows cost as much as one. Each program saved shortens the start by seconds.
    "gpu": BucketConfig(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        min_decode_rows=4,
        min_mixed_tokens=64,
        half_steps=True,
    ),
    "tpu": BucketConfig(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        min_decode_rows=8,
        min_mixed_tokens=64,
        half_steps=True,
    ),
}


def bucket_config(settings: EngineSettings, platform: str) -> BucketConfig:
    """The limits and shapes of the steps: from the settings, or by default from the platform."""
    defaults = _DEFAULTS[platform]
    max_num_seqs, asked_tokens = settings.max_num_seqs or defaults.max_num_seqs, settings.max_num_batched_tokens
    if settings.max_num_seqs is None and asked_tokens is not None:
        max_num_seqs = min(max_num_seqs, max(1, asked_tokens // 2))  # a default must not make the other flag invalid
    return replace(
        defaults,
        max_num_batched_tokens=asked_tokens or max(defaults.max_num_batched_tokens, 2 * max_num_seqs),
        max_num_seqs=max_num_seqs,
        embeds=settings.enable_embeddings,
    )


def runner_config(settings: EngineSettings, buckets: BucketConfig, max_model_len: int) -> RunnerConfig:
    """The limits for the memory plan."""
    from model.execution.memory_plan import RunnerConfig

    return RunnerConfig(
        max_num_seqs=buckets.max_num_seqs,
        max_num_batched_tokens=buckets.max_num_batched_tokens,
        max_model_len=max_model_len,
        memory_utilization=settings.memory_utilization,
        num_pages=settings.num_pages,
        pooling=settings.pooling,
    )
