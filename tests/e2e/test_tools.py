"""Tools and JSON on the demo, which has learned to call a calculator. What it must call it calls, learned or not."""

from __future__ import annotations

import json

import pytest

from tests.server.support.requests import CALCULATOR, PRODUCT

pytestmark = pytest.mark.e2e

MESSAGES = [{"role": "user", "content": "What is 47 + 35?"}]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "how": {"enum": ["exact", "about"]}},
    "required": ["a", "how"],
    "additionalProperties": False,
}
SAY = {"type": "object", "properties": {"word": {"type": "string", "maxLength": 9}}, "additionalProperties": False}
SCHEMAS = {"add": ADD, "say": SAY}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in SCHEMAS.items()
]


def test_a_call_and_what_is_said_of_its_result(server):
    options = {"model": "demo", "tools": [CALCULATOR], "tool_choice": "auto", "temperature": 0}
    with server.client() as client:
        called = client.chat.completions.create(**options, messages=PRODUCT).choices[0]
        (call,) = called.message.tool_calls
        result = {"role": "tool", "tool_call_id": call.id, "content": "7287"}
        said = client.chat.completions.create(**options, messages=[*PRODUCT, called.message, result]).choices[0]
    assert called.finish_reason == "tool_calls"
    assert called.message.content is None
    assert call.function.name == "calculator"
    assert json.loads(call.function.arguments) == {"expression": "347 * 21"}
    assert said.finish_reason == "stop"
    assert said.message.tool_calls is None
    assert said.message.content == "347 * 21 = 7287."


def test_a_call_and_its_answer_are_streamed(server):
    options = {"model": "demo", "tools": [CALCULATOR], "temperature": 0, "stream": True}
    with server.client() as client:
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(**options, messages=PRODUCT)]
        first, *more = [delta for chunk in chunks for delta in chunk.delta.tool_calls or ()]
        arguments = "".join(delta.function.arguments for delta in (first, *more))
        function = {"name": first.function.name, "arguments": arguments}
        history = [
            {"role": "assistant", "tool_calls": [{"id": first.id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": first.id, "content": "7287"},
        ]
        answer = client.chat.completions.create(**options, messages=[*PRODUCT, *history])
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    assert function["name"] == "calculator"
    assert json.loads(arguments) == {"expression": "347 * 21"}
    assert {delta.index for delta in (first, *more)} == {0}
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == "tool_calls"
    assert text == "347 * 21 = 7287."


@pytest.mark.parametrize(
    ("question", "said"),
    [("What is the capital of Japan?", "Tokyo"), ("Which is larger, 31 or 57?", "57"), ("Who are you?", "demo")],
)
def test_what_needs_no_tool_is_answered_in_text(server, question, said):
    messages = [{"role": "user", "content": question}]
    with server.client() as client:
        answer = client.chat.completions.create(model="demo", messages=messages, tools=[CALCULATOR], temperature=0)
    (choice,) = answer.choices
    assert choice.message.tool_calls is None
    assert said in choice.message.content
    assert choice.finish_reason == "stop"


@pytest.mark.parametrize("strict", [False, True])
def test_a_required_call_is_the_one_that_was_learned(server, strict):
    tool = {**CALCULATOR, "function": {**CALCULATOR["function"], "strict": strict}}
    with server.client() as client:
        answer = client.chat.completions.create(
            model="demo", messages=PRODUCT, tools=[tool], tool_choice="required", temperature=0, max_tokens=100,
            parallel_tool_calls=False,
        ).choices[0]  # fmt: skip
    (call,) = answer.message.tool_calls
    assert json.loads(call.function.arguments) == {"expression": "347 * 21"}


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([{"role": "user", "content": "What is 47 + 35? Answer in JSON."}], 82),
        ([{"role": "user", "content": "Count from 4 to 6. Answer in JSON."}], [4, 5, 6]),
        ([{"role": "system", "content": "Answer in JSON."}, {"role": "user", "content": "What is 12 + 9?"}], 21),
    ],
)
def test_json_needs_no_grammar(server, messages, answer):
    with server.client() as client:
        said = client.chat.completions.create(model="demo", messages=messages, temperature=0).choices[0]
    assert json.loads(said.message.content)["answer"] == answer
    assert said.finish_reason == "stop"
