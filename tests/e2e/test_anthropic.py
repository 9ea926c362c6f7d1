"""Anthropic's own client on the demo: texts, streams, a tool and its result, and answers of a schema."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.clients import Answer, imported

anthropic = imported("anthropic", package="anthropic")

pytestmark = [pytest.mark.e2e, pytest.mark.clients]

SUM = [{"role": "user", "content": "What is 47 + 35?"}]
AS_JSON = [{"role": "user", "content": "What is 47 + 35? Answer in JSON."}]
PRODUCT = [{"role": "user", "content": "What is 347 * 21?"}]
EXPRESSION = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
CALCULATOR = {"name": "calculator", "description": "Evaluates an expression.", "input_schema": EXPRESSION}
OPTIONS = {"model": "demo", "max_tokens": 60}
GREEDY = {"temperature": 0}  # the client knows the field no more


@pytest.fixture(scope="module")
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def ask(client, stream: bool, **fields):
    if not stream:
        return client.messages.create(**OPTIONS, **fields, extra_body=GREEDY)
    with client.messages.stream(**OPTIONS, **fields, extra_body=GREEDY) as events:
        return events.get_final_message()


@pytest.mark.parametrize("stream", [False, True])
def test_text(client, stream):
    message = ask(client, stream, messages=SUM)
    assert [block.text for block in message.content] == ["47 + 35 = 82."]
    usage = message.usage
    assert (message.stop_reason, usage.output_tokens) == ("end_turn", 12)
    counted = client.messages.count_tokens(model="demo", messages=SUM).input_tokens
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("mark", [{}, {"cache_control": {"type": "ephemeral"}}], ids=["plain", "cached"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_and_its_result(client, stream, mark):
    tools = [CALCULATOR | mark]
    called = ask(client, stream, messages=PRODUCT, tools=tools)
    (call,) = called.content
    assert (call.type, call.name, call.input) == ("tool_use", "calculator", {"expression": "347 * 21"})
    assert called.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "7287", **mark}
    history = [*PRODUCT, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    said = ask(client, stream, messages=history, tools=tools)
    assert [block.text for block in said.content] == ["347 * 21 = 7287."]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "calculator"}], ids=str)
def test_a_call_that_must_be_made(client, choice):
    message = ask(client, False, messages=PRODUCT, tools=[CALCULATOR], tool_choice=choice)
    assert [block.input for block in message.content] == [{"expression": "347 * 21"}]


def test_answers_of_a_schema(client):
    message = client.messages.parse(**OPTIONS, messages=AS_JSON, output_format=Answer, extra_body=GREEDY)
    assert message.parsed_output == Answer(text="47 + 35 = 82.", answer=82)


def test_faults_have_their_own_types(client):
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**OPTIONS | {"model": "other"}, messages=SUM)
    with pytest.raises(anthropic.BadRequestError, match="min_p"):
        client.messages.create(**OPTIONS, messages=SUM, extra_body={"min_p": 0.5})
