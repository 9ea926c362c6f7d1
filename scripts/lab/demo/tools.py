"""The tools in chats of the training text: the calculator, described in various words, and random others."""

from __future__ import annotations

import random
from typing import Any

from scripts.lab.demo import calculator

CALCULATOR_DESCRIPTIONS = (
    "Evaluates an expression.", "Evaluates an arithmetic expression.", "Calculates the value of an expression.",
    "A calculator.", "Does arithmetic.", "Computes sums, differences, products and quotients.",
    "Evaluate a mathematical expression", "Use it for every calculation.", "Adds, subtracts, multiplies and divides.",
)  # fmt: skip
EXPRESSION_DESCRIPTIONS = ("The expression.", "An expression such as 3 + 4", "What to calculate", "e.g. 12 * 7")
VERBS = (
    "get", "find", "set", "send", "read", "open", "book", "play", "search", "show", "make", "list", "buy", "check",
    "write", "delete", "start", "stop",
)  # fmt: skip
NOUNS = (
    "weather", "time", "mail", "file", "table", "song", "hotel", "flight", "price", "note", "timer", "event", "page",
    "door", "light", "room", "ticket", "message", "country", "city", "story", "number", "user", "order",
)  # fmt: skip
PROPERTIES = (
    "name", "city", "date", "time", "query", "path", "text", "to", "count", "size", "unit", "color", "id", "title",
    "country", "timezone", "limit", "language",
)  # fmt: skip
TYPES = ("string", "string", "string", "integer", "number", "boolean")


def drawn_tools(rng: random.Random) -> list[dict[str, Any]]:
    """One to three tools, in six of seven cases with the calculator."""
    with_calculator, num_others = rng.choices(
        ((True, 0), (True, 1), (True, 2), (False, 1), (False, 2)), weights=(12, 5, 1, 2, 1)
    )[0]
    tools = [other(rng) for _ in range(num_others)]
    if with_calculator:
        tools.insert(rng.randrange(len(tools) + 1), calculator_tool(rng))
    return tools


def calculator_tool(rng: random.Random) -> dict[str, Any]:
    """The calculator with a random description and small variations of its schema."""
    description = rng.choice((None, *CALCULATOR_DESCRIPTIONS)) if rng.random() < 0.8 else CALCULATOR_DESCRIPTIONS[0]
    schema: dict[str, Any] = {}
    if rng.random() < 0.3:
        described = {"type": "string", "description": rng.choice(EXPRESSION_DESCRIPTIONS)}
        schema["properties"] = {"expression": described}
    if rng.random() < 0.2:
        schema["additionalProperties"] = False
    return calculator.tool(description, **schema)


def other(rng: random.Random) -> dict[str, Any]:
    """A random tool, which no chat calls."""
    verb, noun = rng.choice(VERBS), rng.choice(NOUNS)
    names = rng.sample(PROPERTIES, rng.randrange(3))
    schema: dict[str, Any] = {"type": "object", "properties": {name: {"type": rng.choice(TYPES)} for name in names}}
    if names and rng.random() < 0.7:
        schema["required"] = names[:1]
    function: dict[str, Any] = {"name": f"{verb}_{noun}"}
    if rng.random() < 0.8:
        function["description"] = f"{verb.capitalize()} {rng.choice(('the', 'a'))} {noun}."
    return {"type": "function", "function": {**function, "parameters": schema}}
