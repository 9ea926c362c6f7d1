"""Tools on the demo, which has never seen any: what it must call it calls, with arguments that are valid."""

from __future__ import annotations

import json

import pytest
from jsonschema import validate

from tests.e2e.conftest import serve
from tests.server.support.tokenizers import LLAMA3_TEMPLATE

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


# the context is short: of a tool its name is shown
TEMPLATE = LLAMA3_TEMPLATE + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.fixture(scope="module")
def tool_server(built, server_flags, tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    with serve(*server_flags, "--chat-template", str(template)) as running:
        yield running


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("named", [None, "say"])
def test_arguments_always_parse_and_are_valid(tool_server, seed, named):
    tool_choice = {"type": "function", "function": {"name": named}} if named else "required"
    with tool_server.client() as client:
        options = {"model": "demo", "messages": MESSAGES, "tools": TOOLS, "tool_choice": tool_choice, "max_tokens": 300}
        answer = client.chat.completions.create(
            **options, temperature=1, seed=seed, parallel_tool_calls=False
        ).choices[0]  # fmt: skip
    (call,) = answer.message.tool_calls
    validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert answer.message.content is None
    assert answer.finish_reason == ("stop" if named else "tool_calls")
    assert named in (None, call.function.name)


def test_an_answer_of_a_schema_or_a_call(tool_server):
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ADD}}
    with tool_server.client() as client:
        answer = client.chat.completions.create(
            model="demo", messages=MESSAGES, tools=TOOLS, response_format=form, temperature=1, seed=5, max_tokens=200
        )
    message = answer.choices[0].message
    if message.tool_calls:
        for call in message.tool_calls:
            validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    else:
        validate(json.loads(message.content), ADD)
