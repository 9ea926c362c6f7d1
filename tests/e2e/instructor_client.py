"""Asks a server for objects with instructor, and prints them as JSON: `python instructor_client.py URL`.

A program of its own: instructor needs an older `openai` than the other clients, so its packages lie in a folder that
only this process reads.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import instructor
import openai
from instructor import Mode
from pydantic import BaseModel

from tests.server.support.judged import every_answer_judged

SUM = "What is 47 + 35? Answer in JSON."
PRODUCT = "What is 347 * 21?"


class Answer(BaseModel):
    """The form in which the demo answers in JSON."""

    text: str
    answer: int


class calculator(BaseModel):  # noqa: N801, the name is the tool's
    """Evaluates an expression."""

    expression: str


ASKED: dict[str, tuple[Mode, type[BaseModel], str]] = {
    "tools": (Mode.TOOLS, calculator, PRODUCT),
    "tools_strict": (Mode.TOOLS_STRICT, calculator, PRODUCT),
    "json_schema": (Mode.JSON_SCHEMA, Answer, SUM),
}


def objects(url: str, name: str) -> dict[str, Any]:
    """The object of one mode, whole and as the last of the partial ones."""
    mode, form, question = ASKED[name]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as plain:
        client = instructor.from_openai(plain, mode=mode)
        asked: dict[str, Any] = {
            "model": "demo",
            "response_model": form,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_retries": 1,
        }
        whole = client.chat.completions.create(**asked)
        *_, last = client.chat.completions.create_partial(**asked)
    return {"whole": whole.model_dump(), "streamed": last.model_dump()}


if __name__ == "__main__":
    with every_answer_judged() as faults:
        found = {name: objects(sys.argv[1], name) for name in ASKED}
    if faults:
        sys.exit("\n\n".join(faults))
    print(json.dumps(found))
