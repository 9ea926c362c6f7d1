"""Measures the checkpoint on held-out sums and comparisons, and on all other kinds of its training data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from model.network.llama import Llama
from scripts.lab.demo import calculator, facts, json_answers
from scripts.lab.demo.arithmetic import Turn, count_answer, held_out_pairs, larger_answer, sum_answer
from scripts.lab.demo.tokenizer import END_OF_TURN, SampleEncoder
from scripts.lab.demo.trainer import row_logits

ROWS = 50  # evaluated at once
FEW_ROWS = 8  # more rows than these are padded to a multiple of ROWS
WIDTHS = (64, 128, 256, 512, 1024)  # padded lengths; few shapes mean few programs

UNSEEN_TOOL = {
    "type": "function",
    "function": {
        "name": "convert_currency",
        "description": "Converts an amount from one currency to another.",
        "parameters": {
            "type": "object",
            "properties": {"amount": {"type": "number"}, "currency": {"type": "string"}},
            "required": ["amount", "currency"],
        },
    },
}
REPHRASED = ("what is {a} plus {b}", "{a}+{b}", "Can you add {a} and {b}?", "how much is {a} + {b}")


class Prompt(NamedTuple):
    """A prompt. The question may be a turn that ends with a tool's result."""

    system: str | None
    turns: Sequence[Turn]
    question: str | Turn
    tools: Sequence[dict[str, Any]] = ()


Cases = list[tuple[Prompt, str]]  # with the answers that are expected


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


def suites(seed: int = 0) -> dict[str, Cases]:
    """Name -> cases: answers in prose, in JSON, and with tools."""
    return _plain_suites(seed) | _json_suites(seed) | _tool_suites(seed)


def _plain_suites(seed: int) -> dict[str, Cases]:
    """The first two are the held-out pairs, which the README reports. Operands are in random order."""
    rng = random.Random(seed)
    pairs = [pair if rng.random() < 0.5 else pair[::-1] for pair in held_out_pairs()]
    earlier: list[Turn] = [("What is the capital of Spain?", facts.capital_answer("Spain"))]
    system = "You are a helpful assistant."
    counts = [(a, a + rng.randrange(2, 12)) for a in (rng.randrange(88) for _ in range(50))]
    return {
        "held_out_sums": [(Prompt(None, (), f"What is {a} + {b}?"), sum_answer(a, b)) for a, b in pairs],
        "held_out_comparisons": [
            (Prompt(None, (), f"Which is larger, {a} or {b}?"), larger_answer(a, b)) for a, b in pairs
        ],
        "held_out_sums_rephrased": [
            (Prompt(system, (), REPHRASED[i % len(REPHRASED)].format(a=a, b=b)), sum_answer(a, b))
            for i, (a, b) in enumerate(pairs)
        ],
        "held_out_sums_second_turn": [
            (Prompt(None, earlier, f"What is {a} + {b}?"), sum_answer(a, b)) for a, b in pairs
        ],
        "held_out_comparisons_second_turn": [
            (Prompt(None, earlier, f"which is bigger, {a} or {b}"), larger_answer(a, b)) for a, b in pairs
        ],
        "counting": [(Prompt(None, (), f"Count from {a} to {b}."), count_answer(a, b)) for a, b in counts],
        "capitals": [
            (Prompt(None, (), f"What is the capital of {country}?"), facts.capital_answer(country))
            for country in facts.CAPITALS
        ],
        "identity": [(Prompt(None, (), question), facts.WHO_ANSWER) for question in ("Who are you?", "what are you")],
    }  # fmt: skip


def _json_suites(seed: int) -> dict[str, Cases]:
    """Questions of the plain suites, with a request for JSON."""
    plain = _plain_suites(seed)

    def in_json(suite: str, system: str | None, wish: str) -> Cases:
        return [
            (Prompt(system, (), f"{question}{wish}"), json_answers.answer(question, text))
            for (_, _, question, _), text in plain[suite]
            if isinstance(question, str)
        ]

    return {
        "json_held_out_sums": in_json("held_out_sums", None, " Answer in JSON."),
        "json_held_out_comparisons": in_json("held_out_comparisons", None, " Answer in JSON."),
        "json_counting": in_json("counting", None, " Answer in JSON."),
        "json_capitals": in_json("capitals", "Answer in JSON.", ""),
    }


def _tool_suites(seed: int) -> dict[str, Cases]:
    """Calls of the calculator, sentences about its results, and questions that need no call.

    The sums are the held-out pairs. No training text describes UNSEEN_TOOL.
    """
    rng = random.Random(seed)
    plain = _plain_suites(seed)
    alone = [calculator.tool("Evaluates an expression.")]
    several = [UNSEEN_TOOL, *alone]
    sums = [(f"What is {a} + {b}?", f"{a} + {b}", str(a + b)) for a, b in held_out_pairs()]
    products = []
    for _ in range(200):
        a, b = rng.randrange(100, 1000), rng.randrange(2, 100)
        products.append((f"What is {a} * {b}?", f"{a} * {b}", str(a * b)))
    calculations = sums[:100] + products[:100]
    earlier = (products[-1][0], calculator.call(products[-1][1]), products[-1][2], calculator.answer(*products[-1][1:]))
    return {
        "tool_calls": [(Prompt(None, (), q, alone), calculator.call(x)) for q, x, _ in calculations],
        "tool_calls_several_tools": [(Prompt(None, (), q, several), calculator.call(x)) for q, x, _ in calculations],
        "tool_calls_second_turn": [(Prompt(None, [earlier], q, alone), calculator.call(x)) for q, x, _ in calculations],
        "tool_answers": [
            (Prompt(None, (), (q, calculator.call(x), result), alone), calculator.answer(x, result))
            for q, x, result in calculations
        ],
        "no_call_needed": [
            (prompt._replace(tools=several), text)
            for suite in ("held_out_comparisons", "capitals", "identity")
            for prompt, text in plain[suite]
        ],
        "no_calculator": [(prompt._replace(tools=[UNSEEN_TOOL]), text) for prompt, text in plain["held_out_sums"]],
    }
