"""The one tool that the demo learns to call, a calculator: questions, calls, results and answers."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.demo.arithmetic import OTHER_OPERATIONS, SUM_QUESTIONS, Turn
from scripts.demo.phrasing import fill, typed

NAME = "calculator"
QUESTIONS = {"+": SUM_QUESTIONS, **OTHER_OPERATIONS}
ANY_QUESTIONS = (
    "What is {x}?", "What is {x}?", "What is {x}?", "What's {x}?", "How much is {x}?", "Calculate {x}.", "Compute {x}.",
    "Evaluate {x}.", "Solve {x}.", "{x}", "{x} = ?", "{x} =", "{x}?", "Can you calculate {x}?",
    "Use the calculator: {x}", "Use the calculator for {x}.", "What does the calculator say for {x}?",
)  # fmt: skip
NEXT_QUESTIONS = ("And {x}?", "What about {x}?", "How about {x}?", "Now {x}.", "And what is {x}?")
MOST_DIGITS = 4  # of an operand


def tool(description: str | None, **parameters: Any) -> dict[str, Any]:
    """The calculator in the form of a request's `tools`. `parameters` replace entries of its schema."""
    schema = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
    given = {} if description is None else {"description": description}
    return {"type": "function", "function": {"name": NAME, **given, "parameters": schema | parameters}}


def is_among(tools: Sequence[dict[str, Any]]) -> bool:
    """Whether the calculator may be called."""
    return any(tool["function"]["name"] == NAME for tool in tools)


def call(expression: str) -> str:
    """`{"name": "calculator", "parameters": {"expression": "347 * 21"}}`"""
    return json.dumps({"name": NAME, "parameters": {"expression": expression}})


def answer(expression: str, result: str) -> str:
    """`347 * 21 = 7287.`"""
    return f"{expression} = {result}."


def value(a: int, operation: str, b: int) -> float:
    """The value of `a operation b`. A whole number is an int."""
    if operation == "/":
        return a // b if a % b == 0 else a / b
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


@dataclass(frozen=True)
class Calculation:
    """Draws turns that call the calculator. No pair of `held_out` is next to each other in an expression."""

    held_out: Collection[tuple[int, int]]

    def turn(self, rng: random.Random) -> Turn:
        """A question, the call, the calculator's result and the model's answer."""
        draw = rng.random()
        if draw < 0.15:
            return self._turn(rng, ANY_QUESTIONS, *self._three(rng))
        a, operation, b = self._two(rng)
        if draw < 0.4:
            return self._turn(rng, ANY_QUESTIONS, f"{a} {operation} {b}", value(a, operation, b))
        question = fill(rng, QUESTIONS[operation], a=a, b=b)
        return self._answered(rng, question, f"{a} {operation} {b}", value(a, operation, b))

    def next_turn(self, rng: random.Random) -> Turn:
        """Like `turn`, as a follow-up question."""
        a, operation, b = self._two(rng)
        return self._turn(rng, NEXT_QUESTIONS, f"{a} {operation} {b}", value(a, operation, b))

    def _turn(self, rng: random.Random, questions: Sequence[str], expression: str, value: float) -> Turn:
        return self._answered(rng, fill(rng, questions, x=expression), expression, value)

    def _answered(self, rng: random.Random, question: str, expression: str, value: float) -> Turn:
        number = str(value) if isinstance(value, int) else str(round(value, rng.choice((1, 2, 2, 3, 4))))
        result = fill(rng, ("{n}", "{n}", "{n}", '{{"result": {n}}}', '{{"value": {n}}}', '"{n}"'), n=number)
        return typed(rng, question), call(expression), result, answer(expression, number)

    def _two(self, rng: random.Random) -> tuple[int, str, int]:
        operation = rng.choice("++--***/")
        a, b = self._operands(rng, 2)
        return a, operation, max(b, 1) if operation == "/" else b

    def _three(self, rng: random.Random) -> tuple[str, int]:
        a, b, c = self._operands(rng, 3)
        first, second = rng.choice("+-"), rng.choice("+-")
        total = a + (b if first == "+" else -b) + (c if second == "+" else -c)
        return f"{a} {first} {b} {second} {c}", total

    def _operands(self, rng: random.Random, count: int) -> list[int]:
        while True:
            digits = rng.choices(range(1, MOST_DIGITS + 1), weights=(2, 6, 4, 2), k=count)
            drawn = [rng.randrange(10 ** (d - 1) if d > 1 else 0, 10**d) for d in digits]
            if all((min(pair), max(pair)) not in self.held_out for pair in itertools.pairwise(drawn)):
                return drawn
