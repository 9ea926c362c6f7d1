"""Requests of every kind, each with one right answer: greedy text, a text in JSON, a tool call, an embedding."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import aiohttp

CHAT = "/v1/chat/completions"
EMBEDDINGS = "/v1/embeddings"
TOLERANCE = 1e-3  # of a vector of length 1: its last bits depend on the shapes that the steps had

_SCHEMA = {
    "type": "object",
    "properties": {"fox": {"enum": ["red", "grey"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["fox", "legs"],
    "additionalProperties": False,
}
ADD_TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"first": {"type": "integer"}, "second": {"type": "integer"}},
            "required": ["first", "second"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True)
class Question:
    """A request's route and body, without its model."""

    path: str
    body: dict[str, Any]

    def __str__(self) -> str:
        return json.dumps(self.body)


Answer = str | list[float]


def _chat(text: str, **fields: Any) -> Question:
    messages = [{"role": "user", "content": text}]
    return Question(CHAT, {"messages": messages, "temperature": 0, "max_tokens": 48, **fields})


TEXTS = [_chat(f"What is {a} + {b}?") for a, b in ((47, 35), (12, 9), (31, 64), (5, 88), (70, 14), (23, 23))]
CONSTRAINED = [
    _chat(
        "Describe a fox.", response_format={"type": "json_schema", "json_schema": {"name": "fox", "schema": _SCHEMA}}
    ),
    _chat("What is 12 + 9?", tools=[ADD_TOOL], tool_choice="required"),
    _chat("Yes or no?", structured_outputs={"choice": ["yes", "no"]}),
]
TEXTS_TO_EMBED = [Question(EMBEDDINGS, {"input": text}) for text in ("a fox", "What is 47 + 35?", "word " * 200)]


async def ask(session: aiohttp.ClientSession, question: Question, model: str, *, stream: bool) -> Answer:
    """The text of the answer and its tool calls' arguments, or the vector. Raises RuntimeError for another status."""
    body = {"model": model, **question.body}
    if question.path == CHAT:
        body["stream"] = stream
    async with session.post(question.path, json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"status {response.status}: {await response.text()}")
        if question.path == EMBEDDINGS:
            return (await response.json())["data"][0]["embedding"]
        if not stream:
            return _text((await response.json())["choices"][0]["message"])
        text = ""
        async for line in response.content:
            if line.startswith(b"data: {"):
                choices = json.loads(line[6:])["choices"]
                text += _text(choices[0]["delta"]) if choices else ""
        return text


def _text(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or []
    return (message.get("content") or "") + "".join(call["function"]["arguments"] for call in calls)


def same(answer: Answer, expected: Answer) -> bool:
    """Whether an answer is the expected one."""
    if isinstance(answer, str) or isinstance(expected, str):
        return answer == expected
    return len(answer) == len(expected) and all(abs(a - b) < TOLERANCE for a, b in zip(answer, expected, strict=True))
