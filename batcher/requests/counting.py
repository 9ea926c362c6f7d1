"""Counts steps and requests for the engine's statistics."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from batcher.request import FinishReason
from batcher.scheduling.request_state import RequestState
from batcher.scheduling.step_plan import StepPlan
from batcher.stats import PROMPT_SOURCES, EngineStats

MOST_CLASSES, OTHER_CLASSES = 256, "others"  # of targets, by client and outcome
_name_of = lru_cache(MOST_CLASSES)(str)


def count_plan(counts: EngineStats, plan: StepPlan, clock: Callable[[], float]) -> None:
    """Counts a dispatched step, and the start of the requests that it admits for the first time."""
    counts.num_steps += 1
    counts.step_tokens += plan.num_tokens
    counts.step_tokens_padded += plan.bucket.num_tokens
    counts.step_rows += len(plan.rows)
    counts.step_rows_padded += plan.bucket.num_rows
    counts.iteration_tokens.observe(plan.num_tokens)
    counts.prompt_tokens_computed += sum(chunk.count for chunk in plan.chunks)
    for seq in plan.admitted:
        if seq.started_s < 0:
            seq.started_s = clock()
            counts.prompt_tokens += seq.num_prompt
            hit, loaded = seq.num_hit_tokens, seq.num_loaded_tokens
            for source, count in zip(PROMPT_SOURCES, (seq.num_prompt - hit, hit - loaded, loaded), strict=True):
                counts.prompt_tokens_by_source[source] += count
            counts.queue_time.observe(seq.started_s - seq.arrived_s)


def count_gaps(counts: EngineStats, gaps: np.ndarray) -> float:
    """Counts gaps between two tokens, f64[n] seconds, n > 0. They are equal for rows of the same two steps. Returns the
    longest one."""
    longest = float(gaps[0])
    if (gaps == longest).all():
        counts.inter_token_latency.observe(longest, gaps.size)
        return longest
    for gap, times in zip(*np.unique(gaps, return_counts=True), strict=True):
        longest = float(gap)  # they ascend
        counts.inter_token_latency.observe(longest, int(times))
    return longest


def count_first_token(counts: EngineStats, seq: RequestState) -> None:
    """Counts the first token of a request."""
    counts.time_to_first_token.observe(seq.first_token_s - seq.arrived_s)
    counts.prefill_time.observe(seq.first_token_s - seq.started_s)


def count_target(counts: EngineStats, seq: RequestState, outcome: str) -> None:
    """Counts a request by its targets. Requests name them, so only the first classes of targets have a name."""
    found, client = counts.by_targets, seq.request.client
    place = client, _name_of(seq.targets), outcome
    if place not in found and len(found) >= MOST_CLASSES:
        place = client, OTHER_CLASSES, outcome
    found[place] = found.get(place, 0) + 1


def count_end(counts: EngineStats, seq: RequestState, reason: FinishReason) -> None:
    """Counts the end of a request."""
    counts.finished[reason.value] = counts.finished.get(reason.value, 0) + 1
    if reason is FinishReason.ERROR or not seq.output:
        return
    if seq.targets is not None and reason is not FinishReason.ABORT:
        count_target(counts, seq, "within" if seq.is_within_targets else "missed")
    counts.e2e_latency.observe(seq.last_token_s - seq.arrived_s)
    counts.decode_time.observe(seq.last_token_s - seq.first_token_s)
    counts.inference_time.observe(seq.last_token_s - seq.started_s)
    counts.request_preemptions.observe(seq.num_preemptions)
    counts.request_prompt_tokens.observe(seq.num_prompt)
    counts.request_generation_tokens.observe(len(seq.output))
    counts.request_computed_tokens.observe(seq.num_prompt - seq.num_hit_tokens)
    if len(seq.output) > 1:
        mean = (seq.last_token_s - seq.first_token_s) / (len(seq.output) - 1)
        counts.time_per_output_token.observe(mean)
