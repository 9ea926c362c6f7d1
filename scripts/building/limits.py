"""The limits of an engine: rows, tokens and shapes of its steps, from the settings and the platform."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from batcher.buckets import BucketConfig
from batcher.long_prompts import LongPrompts
from batcher.request import LogprobsMode
from scripts.flags.settings import EngineSettings

if TYPE_CHECKING:
    from model.config import LlamaConfig
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
    # Tracing a program takes the host of an H100 up to 5 s, one after the other. The chip's products of 64 tokens take
    # 1.1 times as long as those of one, and those of 256 tokens 1.3 times (`scripts/lab/results/2026-11-26-h100.md`).
    "gpu": BucketConfig(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        min_decode_rows=8,
        min_mixed_tokens=128,
        half_steps=True,
        min_half_step=256,
    ),
    # A program takes half a minute of its compiler. Up to 128 tokens take as long as one on every generation, and on
    # v6e up to 512 at most a fifth longer (`scripts/lab/results/2026-11-26-ladder.md`).
    "tpu": BucketConfig(
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        min_decode_rows=8,
        min_mixed_tokens=128,
        half_steps=True,
        min_half_step=512,
    ),
}

# Rows of the largest program with drafts. The table of step times (`step_times`) decides which steps have drafts: on a
# CPU, with more rows hardly any would, and chips draw at most so many tokens at once.
_MAX_DRAFT_ROWS = {"cpu": 8, "gpu": 64, "tpu": 64}
# The least time of a pass of a draft model or head, as the number of the model's weights that take as long. On a CPU
# its operations are small: the demo's draft model takes 0.05 ms for one row and 0.13 ms for four, a fifth to a third of
# the demo with its 3.1 million weights.
LEAST_DRAFT_WEIGHTS = {"cpu": 630_000, "gpu": 0, "tpu": 0}
# Rows of the largest program with several steps: with more rows, a step takes longer than the host's work.
_MULTI_STEP_ROWS = {"cpu": 8, "gpu": 64, "tpu": 64}
# A draft model's pass over tokens that it has not seen: in smallest mixed steps, and tokens at most.
_DRAFT_PASS, _MAX_DRAFT_PASS = 4, 256
# Drawn tokens of one step with drafts: the logits of all of them are in memory at once.
_MAX_DRAWN = 256


def bucket_config(settings: EngineSettings, platform: str, num_chips: int) -> BucketConfig:
    """The limits and shapes of the steps: from the settings, or by default from the platform.

    Args:
        num_chips: the chips over which the model is split. The numbers of rows with a program depend on them.
    """
    defaults = _DEFAULTS[platform]
    # One TPU draws for the rows in use only (`model/sampling/row_blocks.py`). The products of up to 128 rows take as
    # long as those of one.
    if platform == "tpu" and num_chips == 1:
        defaults = replace(defaults, few_rows=None, decode_rungs_apart=4)
    max_num_seqs, asked_tokens = settings.max_num_seqs or defaults.max_num_seqs, settings.max_num_batched_tokens
    if settings.max_num_seqs is None and asked_tokens is not None:
        max_num_seqs = min(max_num_seqs, max(1, asked_tokens // 2))  # a default must not make the other flag invalid
    max_num_batched_tokens = asked_tokens or max(defaults.max_num_batched_tokens, 2 * max_num_seqs)
    num_drafts = 0 if settings.speculation is None else settings.speculation.num_speculative_tokens
    most_drawn = min(_MAX_DRAWN, max_num_batched_tokens)
    max_draft_rows = min(_MAX_DRAFT_ROWS[platform], most_drawn // (1 + num_drafts), max_num_seqs)
    least_rows = min(defaults.min_decode_rows, max_num_seqs)
    if num_drafts and max_draft_rows < least_rows:
        raise ValueError(
            f"--speculative-config: {num_drafts} drafts for {least_rows} rows do not fit into a step of {most_drawn} "
            "tokens: lower num_speculative_tokens, or raise --max-num-batched-tokens"
        )
    return replace(
        defaults,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        embeds=settings.enable_embeddings,
        num_steps=settings.num_scheduler_steps,
        max_multi_step_rows=min(_MULTI_STEP_ROWS[platform], max_num_seqs) if settings.num_scheduler_steps > 1 else 0,
        num_drafts=num_drafts,
        max_draft_rows=max_draft_rows if num_drafts else 0,
        adapters=settings.enable_lora,
    )


def long_prompts(settings: EngineSettings, max_model_len: int) -> LongPrompts:
    """How long prompts share the steps. With more than one at a time their threshold is 4% of the context, as in
    vLLM."""
    threshold, most = settings.long_prefill_token_threshold, settings.max_num_partial_prefills
    if most is not None and most > 1 and not threshold:
        threshold = max(1, max_model_len // 25)
    return LongPrompts(threshold=threshold, most=most)


def even_context(config: LlamaConfig) -> float:
    """The tokens of context at which a prompt token's attention takes as long as its matrix products: 27,000 for
    Llama 3.1 8B and 52,000 for 70B. Both are taken to run at the same speed, so the number of operations decides."""
    attention = config.hidden_size * (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    mlp = 3 * config.hidden_size * config.intermediate_size
    return (attention + mlp) / (2 * config.num_heads * config.head_dim)


def runner_config(settings: EngineSettings, buckets: BucketConfig, max_model_len: int) -> RunnerConfig:
    """The limits for the memory plan."""
    from model.execution.memory_plan import RunnerConfig
    from model.execution.prompt_lookup import PromptLookup

    lookup = None
    if settings.speculation is not None and settings.speculation.looks_up:
        least, most = settings.speculation.lookup
        lookup = PromptLookup(min_tokens=least, max_tokens=most)
    return RunnerConfig(
        max_num_seqs=buckets.max_num_seqs,
        max_num_batched_tokens=buckets.max_num_batched_tokens,
        max_model_len=max_model_len,
        memory_utilization=settings.memory_utilization,
        num_pages=settings.num_pages,
        logprobs_mode=LogprobsMode(settings.logprobs_mode),
        moves_pages=settings.kv_offloading_size > 0,
        pooling=settings.pooling,
        lookup=lookup,
        max_draft_rows=buckets.max_draft_rows,
        draft_pass_tokens=min(_DRAFT_PASS * buckets.min_mixed_tokens, _MAX_DRAFT_PASS, buckets.max_num_batched_tokens),
        max_drawn=buckets.max_draft_rows * (1 + buckets.num_drafts),
        max_loras=settings.num_adapter_slots,
        max_lora_rank=settings.max_lora_rank,
    )
