"""Chooses the limits of an engine before anything is compiled or loaded: chips, context, rows, tokens and shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jax

from batcher.buckets import BucketConfig, BucketLadder
from batcher.request import LogprobsMode
from batcher.step import Bucket
from batcher.step_times import StepEstimate
from model.execution.memory_plan import RunnerConfig
from model.execution.prompt_lookup import PromptLookup
from pallas_kernels.api import PagedAttention
from scripts.building.attention_backend import Backends
from scripts.building.chips import ModelOnChips, choose_chips_and_context, choose_model_len, describe_idle
from scripts.building.device import Device
from scripts.building.draft import ChosenDraft, ChosenHead, choose_draft
from scripts.building.step_times import choose_step_estimate
from scripts.building.weights import ChosenWeights, bits_of_a_weight, choose_weights, listed
from scripts.flags.settings import EngineSettings

STEP_TIMEOUT_S = 30.0  # on a chip; programs have been run once before the first step
_CHIP = BucketConfig(
    max_num_seqs=256, max_num_batched_tokens=2048, min_decode_rows=8, min_mixed_tokens=128, half_steps=True
)
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
    "gpu": replace(_CHIP, min_half_step=256),
    # A program takes half a minute of its compiler. Up to 128 tokens take as long as one on every generation, and on
    # v6e up to 512 at most a fifth longer (`scripts/lab/results/2026-11-26-ladder.md`).
    "tpu": replace(_CHIP, min_half_step=512),
}

LEAST_MODELS = 2  # on the device at once, if there are several: the engine's own, and another one

# Rows of the largest program with drafts. The table of step times (`step_times`) decides which steps have drafts: on a
# CPU, with more rows hardly any would, and chips draw at most so many tokens at once.
_MAX_DRAFT_ROWS = {"cpu": 8, "gpu": 64, "tpu": 64}
# A draft model's pass over tokens that it has not seen: in smallest mixed steps, and tokens at most.
_DRAFT_PASS, _MAX_DRAFT_PASS = 4, 256
# Drawn tokens of one step with drafts: the logits of all of them are in memory at once.
_MAX_DRAWN = 256


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """What an engine is made of."""

    settings: EngineSettings
    device: Device
    tokenizer: Path | None  # its end tokens end an answer; None: the model's own
    weights: ChosenWeights
    draft: ChosenDraft | None
    chips: ModelOnChips
    ladder: BucketLadder
    may_wait: tuple[Bucket, ...]  # programs that may be compiled while an engine serves

    def facts(self, attention: PagedAttention) -> dict[str, str]:
        """The facts that shape the programs, in addition to the settings and the number of pages."""
        weights, draft = self.weights, self.draft
        return {
            "the model's config": str(weights.config),
            "the draft model": str(draft and (draft.network, draft.weights.quantization, draft.weights.rounding)),
            "the attention": f"{attention.backend} {attention.spec}",
            "the quantization": str((weights.quantization, weights.rounding)),
            "the shapes of the steps": str(self.ladder.buckets()),
            "jax": jax.__version__,
        }


def choose_limits(
    settings: EngineSettings,
    device: Device,
    report: Callable[[str], None],
    *,
    tokenizer: Path | None,
    backends: Backends,
    weights: ChosenWeights | None = None,
) -> EnginePlan:
    """Finds the weights, and chooses the chips and the context for them. Raises ValueError if the weights cannot be
    used, or do not fit.

    Args:
        tokenizer: a folder or a GGUF file, whose end tokens end an answer; None: the model's own.
        backends: the candidates for the attention backend.
        weights: the weights; None: they are found by the settings.
    """
    platform = device.platform
    weights = weights or choose_weights(settings, platform, tokenizer)
    report(f"  end tokens        {listed(weights.end_tokens)}")
    trained = weights.config.max_position_embeddings
    draft = choose_draft(settings, weights, platform, choose_model_len(settings.max_model_len, trained))

    @cache
    def on_chips(number: int, context: int) -> ModelOnChips:
        limits = runner_config(settings, bucket_config(settings, platform, number), context)

        def placed(weights: ChosenWeights | ChosenHead, settings: EngineSettings, **more: Any) -> ModelOnChips:
            form = {name: getattr(weights, name) for name in ("dtype", "quantization", "rounding")} | more
            return ModelOnChips(weights.config, number, settings, limits, platform=platform, backends=backends, **form)

        if draft is None:
            return placed(weights, settings)
        plan = draft.weights.plan if isinstance(draft.weights, ChosenHead) else None
        return placed(weights, settings, draft=placed(draft.weights, draft.settings, plan=plan))

    num_chips, context = choose_chips_and_context(
        settings.tensor_parallel_size,
        device.num_devices,
        settings.max_model_len,
        trained,
        lambda number, context: on_chips(number, context).check_fits(),
        num_hosts=device.num_hosts,
    )
    report(f"  chips             {describe_idle(num_chips, device.num_devices)}")
    if settings.max_model_len is None and context < trained:
        report(
            f"  context           {context} tokens, the longest for which the memory has room; the model was trained "
            f"for {trained}. More chips, --kv-cache-dtype or --quantization leave room for more"
        )
    if settings.targets is not None:
        estimate = step_estimate(settings, platform, weights, num_chips)
        settings, why = with_ceiling(settings, platform, bucket_config(settings, platform, num_chips), estimate)
        buckets = bucket_config(settings, platform, num_chips)
        report(f"  targets           {settings.targets} ms between tokens and to the first one, with at most")
        report(
            f"                    {buckets.max_num_seqs} rows ({why}), {buckets.max_num_batched_tokens} tokens a step"
        )
        on_chips.cache_clear()
    ladder = BucketLadder(bucket_config(settings, platform, num_chips))
    later = deferred_programs(ladder, platform, all_first=settings.compile_all_first, num_hosts=device.num_hosts)
    return EnginePlan(
        settings=settings,
        device=device,
        tokenizer=tokenizer,
        weights=weights,
        draft=draft,
        chips=on_chips(num_chips, context),
        ladder=ladder,
        may_wait=later,
    )


def step_estimate(settings: EngineSettings, platform: str, weights: ChosenWeights, num_chips: int) -> StepEstimate:
    """The estimate of the steps' times, from the model and the attached devices."""
    bits = bits_of_a_weight(weights.quantization, weights.dtype)
    kv_bits = bits_of_a_weight(None, weights.dtype) if settings.kv_cache_dtype == "auto" else 8
    return choose_step_estimate(weights.config, platform, weight_bits=bits, kv_bits=kv_bits, num_chips=num_chips)


def with_ceiling(
    settings: EngineSettings, platform: str, buckets: BucketConfig, estimate: StepEstimate
) -> tuple[EngineSettings, str]:
    """The settings with the most rows whose decode keeps --target-itl, and why. Fewer may run at once, because steps
    are measured and a row that would break a target waits."""
    target_ms = settings.target_itl
    if settings.max_num_seqs is not None:
        return settings, "--max-num-seqs"
    if target_ms is None or platform == "cpu":  # the estimate of a CPU is not good enough before it has run steps
        return settings, "the default"
    rungs = sorted(bucket.num_rows for bucket in BucketLadder(buckets).buckets() if bucket.decode_only)
    times_ms = {rows: 1000 * estimate.seconds(rows, rows, kv_tokens=0, pairs=0) for rows in rungs}
    kept = max((rows for rows in rungs if times_ms[rows] <= target_ms), default=rungs[0])
    return replace(settings, max_num_seqs=kept), f"their decode takes {times_ms[kept]:.1f} ms without attention"


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
        num_drafts=num_drafts,
        max_draft_rows=max_draft_rows if num_drafts else 0,
        adapters=settings.enable_lora,
    )


def runner_config(settings: EngineSettings, buckets: BucketConfig, max_model_len: int) -> RunnerConfig:
    """The limits for the memory plan."""
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
        max_models=0 if not settings.has_models else settings.max_resident_models or LEAST_MODELS,
        max_loras=settings.num_adapter_slots,
        max_lora_rank=settings.max_lora_rank,
    )


def deferred_programs(ladder: BucketLadder, platform: str, *, all_first: bool, num_hosts: int) -> tuple[Bucket, ...]:
    """The programs that may be compiled while the engine serves.

    On a chip there are none. A GPU's compiler times kernels on the chip, and loading a program discards the CUDA graphs
    of all others. A program that does not fit must be an error at the start. On several hosts there are none, because
    the leader does not know which programs the others have.
    """
    if platform != "cpu" or all_first or num_hosts > 1:
        return ()
    first = set(ladder.needed_first())
    return tuple(bucket for bucket in ladder.buckets() if bucket not in first)


def choose_step_timeout(asked: float | None, platform: str) -> float | None:
    """The least seconds after which a step counts as stuck; None: a step may take any time. This is a CPU's default,
    because a long prompt of a large model may take minutes there."""
    seconds = (0.0 if platform == "cpu" else STEP_TIMEOUT_S) if asked is None else asked
    return seconds or None
