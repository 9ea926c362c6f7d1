"""Tools and JSON on the demo, which has learned to call a calculator. What it must call it calls, learned or not."""

from __future__ import annotations

import json

import pytest

from tests.server.support.requests import CALCULATOR, PRODUCT

pytestmark = pytest.mark.e2e


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
