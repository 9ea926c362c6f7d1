"""Converts the log-probabilities of a step's arrays to one object for each position."""

from __future__ import annotations

import numpy as np

from batcher.request import SamplingParams, TokenLogprobs
from batcher.scheduling.step_plan import StepPlan
from batcher.step import StepOutput


def token_logprobs(output: StepOutput, row: int, num_tokens: int, asked: SamplingParams) -> tuple[TokenLogprobs, ...]:
    """The log-probability and rank of each token that a row has drawn, with those of the tokens that are asked for, or
    of the most likely ones."""
    count, top_ids, top = asked.logprobs or 0, output.top_ids, output.top_logprobs
    if asked.logprob_token_ids:
        count, top = len(asked.logprob_token_ids), output.asked_logprobs
        top_ids = np.broadcast_to(np.array(asked.logprob_token_ids), (*output.tokens.shape, count))
    return tuple(_entry(output.logprobs, top_ids, top, output.ranks, (row, i), count) for i in range(num_tokens))


def sampled_logprobs(output: StepOutput, row: int, num_tokens: int) -> tuple[float, ...]:
    """The log-probability of each token that a row has drawn, under the distribution from which it was drawn."""
    assert output.sampled_logprobs is not None
    return tuple(output.sampled_logprobs[row, :num_tokens].tolist())


def take_prompt_logprobs(plan: StepPlan, output: StepOutput) -> None:
    """Stores the log-probabilities of the prompt tokens that the step has scored in their requests."""
    for chunk in plan.chunks:
        seq = plan.rows[chunk.row]
        wanted = seq.sampling.prompt_logprobs
        if wanted is None or seq.prompt_logprobs is None or seq.first_token_s >= 0:
            continue
        count = min(chunk.count, seq.num_prompt - 1 - chunk.start)  # the last prompt token has no target
        for i in range(count):
            seq.prompt_logprobs[chunk.start + i] = _target_logprobs(output, chunk.offset + i, wanted)


def _target_logprobs(output: StepOutput, position: int, count: int) -> TokenLogprobs:
    """The log-probability and rank of the prompt token that follows a position of the step."""
    ids, top, ranks = output.target_top_ids, output.target_top_logprobs, output.target_ranks
    return _entry(output.target_logprobs, ids, top, ranks, position, count)


def _entry(
    logprobs: np.ndarray | None,
    top_ids: np.ndarray | None,
    top_logprobs: np.ndarray | None,
    ranks: np.ndarray | None,
    at: int | tuple[int, int],
    count: int,
) -> TokenLogprobs:
    assert logprobs is not None and top_ids is not None and top_logprobs is not None and ranks is not None
    return TokenLogprobs(
        logprob=float(logprobs[at]),
        top_ids=tuple(top_ids[at][:count].tolist()),
        top_logprobs=tuple(top_logprobs[at][:count].tolist()),
        rank=int(ranks[at]),
    )
