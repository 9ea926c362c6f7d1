"""The official client's own helpers on the demo: what they put together of streams, and parse into types."""

from __future__ import annotations

import json

import openai
import pytest

from tests.e2e.clients import Answer, calculator
from tests.server.support.requests import CALCULATOR, PRODUCT
from tests.server.support.running import RunningServer

pytestmark = pytest.mark.e2e

AS_JSON = "What is 47 + 35? Answer in JSON."
FUNCTION = {"type": "function", **CALCULATOR["function"]}
LOGPROBS = ["message.output_text.logprobs"]


EXPECTED = Answer(text="47 + 35 = 82.", answer=82)
CALLED = calculator(expression="347 * 21")


def test_chats_are_parsed_whole_and_streamed(server: RunningServer) -> None:
    options = {"model": "demo", "temperature": 0}
    as_json = options | {"messages": [{"role": "user", "content": AS_JSON}], "response_format": Answer}
    tools = options | {"messages": PRODUCT, "tools": [openai.pydantic_function_tool(calculator)]}
    with server.client() as client:
        assert client.chat.completions.parse(**as_json).choices[0].message.parsed == EXPECTED
        (call,) = client.chat.completions.parse(**tools).choices[0].message.tool_calls
        assert call.function.parsed_arguments == CALLED
        with client.chat.completions.stream(**as_json) as stream:
            contents = [event.delta for event in stream if event.type == "content.delta"]
            assert stream.get_final_completion().choices[0].message.parsed == EXPECTED
        assert json.loads("".join(contents)) == EXPECTED.model_dump()
        with client.chat.completions.stream(**tools) as stream:
            kinds = [event.type for event in stream]
            (call,) = stream.get_final_completion().choices[0].message.tool_calls
        assert call.function.parsed_arguments == CALLED
        assert "tool_calls.function.arguments.done" in kinds


def test_responses_are_parsed_whole_and_streamed(server: RunningServer) -> None:
    options = {"model": "demo", "temperature": 0}
    tools = options | {"input": PRODUCT[0]["content"], "tools": [openai.pydantic_function_tool(calculator)]}
    with server.client() as client:
        assert client.responses.parse(**options, input=AS_JSON, text_format=Answer).output_parsed == EXPECTED
        with client.responses.stream(**options, input=AS_JSON, text_format=Answer) as stream:
            assert [event.type for event in stream][-1] == "response.completed"
            assert stream.get_final_response().output_parsed == EXPECTED
        (call,) = client.responses.parse(**tools).output
        assert call.parsed_arguments == CALLED
        with client.responses.stream(**tools) as stream:
            (call,) = stream.until_done().get_final_response().output
        assert call.parsed_arguments == CALLED
