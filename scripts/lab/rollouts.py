"""Answers of the engine as padded rows, with the engine's log-probabilities and those of a dense forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from model.network.llama import Llama
from scripts.lab.demo.trainer import row_logits
from scripts.offline.results import RequestOutput

WIDTH = 32  # a row's length is a multiple of it: few lengths mean few programs


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """`B` answers behind their prompts, each in a row of `R` tokens. Position t predicts targets[t]."""

    tokens: np.ndarray  # i32[B, R]
    targets: np.ndarray  # i32[B, R]
    drawn: np.ndarray  # f32[B, R]: 1 where the target is a token of the answer, 0 in the prompt and in padding
    logprobs: np.ndarray  # f32[B, R], of the drawn targets, by the engine; 0 elsewhere
    samples: np.ndarray  # i32[B, R]: 1 in the row's text, 0 in padding

    @property
    def num_drawn(self) -> int:
        """Tokens of all answers."""
        return int(self.drawn.sum())


def rollouts(results: Sequence[RequestOutput]) -> Rollouts:
    """The answers of a chat with `logprobs=0`: those to the first conversation, then those to the next."""
    answers = [(result.prompt_token_ids, output) for result in results for output in result.outputs]
    longest = max(len(prompt) + len(output.token_ids) - 1 for prompt, output in answers)
    shape = (len(answers), -(-longest // WIDTH) * WIDTH)
    tokens, targets, samples = (np.zeros(shape, np.int32) for _ in range(3))
    drawn, logprobs = (np.zeros(shape, np.float32) for _ in range(2))
    for row, (prompt, output) in enumerate(answers):
        ids = [*prompt, *output.token_ids]
        length, first = len(ids) - 1, len(prompt) - 1
        assert output.logprobs is not None, "the answers were asked for without log-probabilities"
        tokens[row, :length], targets[row, :length], samples[row, :length] = ids[:-1], ids[1:], 1
        drawn[row, first:length] = 1
        logprobs[row, first:length] = [entry["logprob"] for entry in output.logprobs["content"]]
    return Rollouts(tokens=tokens, targets=targets, drawn=drawn, logprobs=logprobs, samples=samples)


def dense_logprobs(model: Llama, tokens: jax.Array, targets: jax.Array, samples: jax.Array) -> jax.Array:
    """f32[B, R], the log-probability of each target, with causal attention over whole rows and no K/V pages."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    logits = row_logits(model, tokens, positions, samples)
    aimed = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return aimed - jax.nn.logsumexp(logits, axis=-1)
