"""The engine's answers as a trainer's rows, with the engine's log-probabilities and those of a dense forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model.network.llama import Llama
from scripts.lab.demo.trainer import SHARED, row_logits
from scripts.offline.results import RequestOutput

WIDTH = 64  # a row's length is a multiple of it: few lengths mean few programs


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """Rows of `R` tokens: a prompt, and all answers to it behind each other. Position t predicts targets[t]. An answer
    begins with a copy of the prompt's last token, which predicts its first one."""

    tokens: np.ndarray  # i32[B, R]
    targets: np.ndarray  # i32[B, R]
    positions: np.ndarray  # i32[B, R], in the text of prompt and answer
    samples: np.ndarray  # i32[B, R]: the number of an answer from 1, SHARED in the prompt, 0 in padding
    weights: np.ndarray  # f32[B, R]: those of an answer's tokens sum to 1; 0 where no target was drawn
    logprobs: np.ndarray  # f32[B, R], of the drawn targets, by the engine; 0 elsewhere

    @property
    def drawn(self) -> np.ndarray:
        """bool[B, R], where the target is a token of an answer."""
        return self.weights > 0


def rollouts(results: Sequence[RequestOutput]) -> Rollouts:
    """A row for each result of a chat with `logprobs=0`."""
    longest = max(
        len(result.prompt_token_ids) - 1 + sum(len(output.token_ids) for output in result.outputs) for result in results
    )
    shape = (len(results), -(-longest // WIDTH) * WIDTH)
    tokens, targets, positions, samples = (np.zeros(shape, np.int32) for _ in range(4))
    weights, logprobs = (np.zeros(shape, np.float32) for _ in range(2))
    for row, result in enumerate(results):
        *prompt, last = result.prompt_token_ids
        start = len(prompt)
        tokens[row, :start], positions[row, :start], samples[row, :start] = prompt, range(start), SHARED
        for number, output in enumerate(result.outputs, 1):
            assert output.logprobs is not None, "the answers were asked for without log-probabilities"
            length = len(output.token_ids)
            here = (row, slice(start, start + length))
            tokens[here], targets[here] = [last, *output.token_ids[:-1]], output.token_ids
            positions[here], samples[here] = range(len(prompt), len(prompt) + length), number
            weights[here] = 1 / length
            logprobs[here] = [one[id].logprob for id, one in zip(output.token_ids, output.logprobs, strict=True)]
            start += length
    return Rollouts(
        tokens=tokens, targets=targets, positions=positions, samples=samples, weights=weights, logprobs=logprobs
    )


def dense_logprobs(
    model: Llama,
    tokens: jax.Array,  # i32[B, R], and so all others
    targets: jax.Array,
    positions: jax.Array,
    samples: jax.Array,
) -> jax.Array:
    """f32[B, R], the log-probability of each target, with causal attention over whole rows and no K/V pages."""
    logits = row_logits(model, tokens, positions, samples)
    aimed = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return aimed - jax.nn.logsumexp(logits, axis=-1)
