"""Measures the checkpoint on held-out sums and comparisons, and on all other kinds of its training data."""

from __future__ import annotations

import random
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from model.network.llama import Llama
from scripts.demo import facts
from scripts.demo.arithmetic import Turn, count_answer, held_out_pairs, larger_answer, sum_answer
from scripts.demo.tokenizer import END_OF_TURN, SampleEncoder
from scripts.demo.trainer import row_logits

ROWS = 50  # evaluated at once
FEW_ROWS = 8  # more rows than these are padded to a multiple of ROWS
WIDTHS = (64, 128, 256, 512, 1024)  # padded lengths; few shapes mean few programs

REPHRASED = ("what is {a} plus {b}", "{a}+{b}", "Can you add {a} and {b}?", "how much is {a} + {b}")

Prompt = tuple[str | None, Sequence[Turn], str]  # system prompt, earlier turns, question


def exact(model: Llama, encoder: SampleEncoder, cases: Sequence[tuple[Prompt, str]]) -> list[bool]:
    """Whether greedy decoding of each prompt gives the expected answer and then ends its turn.

    One forward pass is enough: greedy decoding yields a text if and only if each token is the most likely one after
    the tokens before it.
    """
    end = encoder.special(END_OF_TURN)
    encoded = [(encoder.prompt(*prompt), [*encoder.text(answer), end]) for prompt, answer in cases]
    results: list[bool] = []
    for first in range(0, len(encoded), ROWS):
        chunk = encoded[first : first + ROWS]
        best = most_likely(model, [prompt + answer for prompt, answer in chunk])
        for row, (prompt, answer) in zip(best, chunk, strict=True):
            results.append(list(row[len(prompt) - 1 :][: len(answer)]) == answer)
    return results


def generate(model: Llama, encoder: SampleEncoder, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy continuations of `prompts` (ids), each up to and without a special token."""
    first_special = encoder.tokenizer.get_vocab_size(with_added_tokens=False)
    rows = [list(prompt) for prompt in prompts]
    done = [False] * len(rows)
    for _ in range(max_tokens):
        best = most_likely(model, rows)
        for i, row in enumerate(rows):
            token = int(best[i][len(row) - 1])
            done[i] = done[i] or token >= first_special
            if not done[i]:
                row.append(token)
        if all(done):
            break
    return [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]


def most_likely(model: Llama, rows: Sequence[list[int]]) -> np.ndarray:
    """i32[len(rows), width]: the most likely token after each one."""
    width = next(w for w in WIDTHS if w >= max(map(len, rows)))
    height = len(rows) if len(rows) <= FEW_ROWS else -(-len(rows) // ROWS) * ROWS
    tokens = np.zeros((height, width), np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return np.asarray(_most_likely(model, tokens))[: len(rows)]


@jax.jit
def _most_likely(model: Llama, tokens: jax.Array) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return jnp.argmax(row_logits(model, tokens, positions, jnp.ones_like(tokens)), axis=-1)


def suites(seed: int = 0) -> dict[str, list[tuple[Prompt, str]]]:
    """Name -> cases. The first two are the held-out pairs, which the README reports. Operands are in random order."""
    rng = random.Random(seed)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in held_out_pairs()]
    earlier: list[Turn] = [("What is the capital of Spain?", facts.capital_answer("Spain"))]
    system = "You are a helpful assistant."
    counts = [(a, a + rng.randrange(2, 12)) for a in (rng.randrange(88) for _ in range(50))]
    return {
        "held_out_sums": [((None, (), f"What is {a} + {b}?"), sum_answer(a, b)) for a, b in pairs],
        "held_out_comparisons": [
            ((None, (), f"Which is larger, {a} or {b}?"), larger_answer(a, b)) for a, b in pairs
        ],
        "held_out_sums_rephrased": [
            ((system, (), REPHRASED[i % len(REPHRASED)].format(a=a, b=b)), sum_answer(a, b))
            for i, (a, b) in enumerate(pairs)
        ],
        "held_out_sums_second_turn": [
            ((None, earlier, f"What is {a} + {b}?"), sum_answer(a, b)) for a, b in pairs
        ],
        "held_out_comparisons_second_turn": [
            ((None, earlier, f"which is bigger, {a} or {b}"), larger_answer(a, b)) for a, b in pairs
        ],
        "counting": [((None, (), f"Count from {a} to {b}."), count_answer(a, b)) for a, b in counts],
        "capitals": [
            ((None, (), f"What is the capital of {country}?"), facts.capital_answer(country))
            for country in facts.CAPITALS
        ],
        "identity": [((None, (), question), facts.WHO_ANSWER) for question in ("Who are you?", "what are you")],
    }  # fmt: skip
