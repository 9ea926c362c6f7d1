"""The one tool that the demo learns to call, a calculator: questions, calls, results and answers."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.lab.demo.arithmetic import OTHER_OPERATIONS, SUM_QUESTIONS, Turn
from scripts.lab.demo.phrasing import fill, typed

NAME = "calculator"
QUESTIONS = {"+": SUM_QUESTIONS, **OTHER_OPERATIONS}
ANY_QUESTIONS = (
    "What is {x}?", "What is {x}?", "What is {x}?", "What's {x}?", "How much is {x}?", "Calculate {x}.", "Compute {x}.",
    "Evaluate {x}.", "Solve {x}.", "{x}", "{x} = ?", "{x} =", "{x}?", "Can you calculate {x}?",
    "Use the calculator: {x}", "Use the calculator for {x}.", "What does the calculator say for {x}?",
)  # fmt: skip
NEXT_QUESTIONS = ("And {x}?", "What about {x}?", "How about {x}?", "Now {x}.", "And what is {x}?")


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
    """Draws turns that call the calculator. No pair of `held_out` is in an expression."""

    held_out: Collection[tuple[int, int]]

    def turn(self, rng: random.Random) -> Turn:
        """A question, the call, the calculator's result and the model's answer."""
        a, operation, b = self._operands(rng)
        expression = f"{a} {operation} {b}"
        if rng.random() < 0.4:
            question = fill(rng, ANY_QUESTIONS, x=expression)
        else:
            question = fill(rng, QUESTIONS[operation], a=a, b=b)
        return self._answered(rng, question, expression, value(a, operation, b))

    def next_turn(self, rng: random.Random) -> Turn:
        """Like `turn`, as a follow-up question."""
        a, operation, b = self._operands(rng)
        expression = f"{a} {operation} {b}"
        return self._answered(rng, fill(rng, NEXT_QUESTIONS, x=expression), expression, value(a, operation, b))

    def _answered(self, rng: random.Random, question: str, expression: str, value: float) -> Turn:
        number = str(value) if isinstance(value, int) else str(round(value, 2))
        result = fill(rng, ("{n}", "{n}", "{n}", '{{"result": {n}}}'), n=number)
        return typed(rng, question), call(expression), result, answer(expression, number)

    def _operands(self, rng: random.Random) -> tuple[int, str, int]:
        """Numbers of up to three digits. The second of a product or quotient is 1 to 100."""
        operation = rng.choice("++--***/")
        while True:
            a, b = (rng.randrange(10**digits) for digits in rng.choices((1, 2, 3), weights=(1, 3, 3), k=2))
            if operation in "*/":
                b = b % 100 + 1
            if (min(a, b), max(a, b)) not in self.held_out:
                return a, operation, b
