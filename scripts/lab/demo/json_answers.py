"""Answers in JSON, on request of the user or of the system message: `{"text": "47 + 35 = 82.", "answer": 82}`.

The text comes first: a model this small finds an answer while it writes the sentence.
"""

from __future__ import annotations

import json
import random
import re

from scripts.lab.demo import facts
from scripts.lab.demo.arithmetic import Turn

REQUESTS = (
    "Answer in JSON.", "Answer in JSON.", "Answer in JSON.", "Answer as JSON.", "Answer with JSON.", "Reply in JSON.",
    "Respond in JSON.", "Give the answer in JSON.", "Give me JSON.", "Use JSON.", "In JSON, please.", "As JSON.",
    "JSON only.", "Return JSON.",
)  # fmt: skip
FRONTS = ("Answer in JSON: ", "In JSON: ", "As JSON: ", "Answer in JSON. ")
SYSTEM_PROMPTS = (
    "Answer in JSON.", "Answer in JSON.", "Always answer in JSON.", "You answer in JSON.", "Reply in JSON only.",
    "You are a helpful assistant. Answer in JSON.", "You are a helpful assistant that answers in JSON.",
    "Respond with JSON.", "All answers are JSON.", "You are a JSON API.",
)  # fmt: skip
# The fact in an answer's sentence. `stated` handles capitals and lists.
_STATED = (
    r"\d+ \+ \d+ = (\d+)\.",
    r"(\d+) is (?:larger|smaller) than \d+\.",
    r"They are equal: both are (\d+)\.",
    r"(?:After|Before) \d+ comes (\d+)\.",
    r"\d+ is (odd|even)\.",
)


def system_prompt(rng: random.Random) -> str:
    """A system prompt that asks for JSON."""
    return rng.choice(SYSTEM_PROMPTS)


def asked(rng: random.Random, question: str, text: str) -> Turn:
    """The question with a request for JSON, and the answer in JSON."""
    return _wish(rng, question), answer(question, text)


def answer(question: str, text: str) -> str:
    """`{"text": "47 + 35 = 82.", "answer": 82}` for the answer `47 + 35 = 82.`"""
    return json.dumps({"text": text, "answer": stated(question, text)})


def stated(question: str, text: str) -> int | str | list[int] | None:
    """The fact that an answer states: a number, a word, or a list of numbers. None: it states none."""
    if re.fullmatch(r"\d+(, \d+)+\.", text):
        return [int(number) for number in re.findall(r"\d+", text)]
    for pattern in _STATED:
        if match := re.match(pattern, text):
            return int(match[1]) if match[1].isdigit() else match[1]
    if (match := re.match(r"The capital of (.+) is ", text)) and match[1] in facts.CAPITALS:
        country, city = match[1], facts.CAPITALS[match[1]]
        return country if city.lower().rstrip(".") in question.lower() else city
    return None


def _wish(rng: random.Random, question: str) -> str:
    small = question == question.lower()
    if rng.random() < 0.2:
        front = rng.choice(FRONTS)
        return front.lower() + question if small else front + question
    request = rng.choice(REQUESTS)
    if question[-1] not in ".?!":
        question += rng.choice((".", "?", ",", ""))
    return f"{question} {request.lower().rstrip('.') if small and rng.random() < 0.7 else request}"
