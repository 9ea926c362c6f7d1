"""The official client's own helpers on the demo: what they put together of streams, and parse into types."""

from __future__ import annotations

import asyncio
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


@pytest.mark.parametrize("question", [PRODUCT[0]["content"], "What is the capital of Japan?"], ids=["call", "text"])
def test_log_probabilities_next_to_tools(server: RunningServer, question: str) -> None:
    """Those of a text are the chat's, streamed and whole. A call has none."""
    options = {"model": "demo", "input": question, "tools": [FUNCTION], "include": LOGPROBS, "temperature": 0}
    with server.client() as client:
        whole = client.responses.create(**options, top_logprobs=2)
        with client.responses.stream(**options, top_logprobs=2) as stream:
            deltas = [event for event in stream if event.type == "response.output_text.delta"]
            streamed = stream.get_final_response()
        chat = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], tools=[CALCULATOR], temperature=0,
            logprobs=True, top_logprobs=2,
        )  # fmt: skip
    (item,), (from_stream,) = whole.output, streamed.output
    if item.type == "function_call":
        assert not deltas
        assert json.loads(item.arguments) == json.loads(from_stream.arguments) == {"expression": "347 * 21"}
        return
    (part,), (other,) = item.content, from_stream.content
    expected = [(entry.token, entry.logprob) for entry in chat.choices[0].logprobs.content]
    assert [(entry.token, entry.logprob) for entry in part.logprobs] == expected
    assert [(entry.token, entry.logprob) for entry in other.logprobs] == expected
    assert [(entry.token, entry.logprob) for event in deltas for entry in event.logprobs] == expected
    assert all(len(entry.top_logprobs) == 2 for entry in part.logprobs)


def test_the_asynchronous_client_shares_steps(server: RunningServer) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def answer(i: int) -> str:
                question = [{"role": "user", "content": f"What is {i} + 35?"}]
                async with client.chat.completions.stream(model="demo", messages=question, temperature=0) as stream:
                    return (await stream.get_final_completion()).choices[0].message.content

            return await asyncio.gather(*map(answer, (12, 21, 47, 50)))

    assert asyncio.run(ask()) == [f"{i} + 35 = {i + 35}." for i in (12, 21, 47, 50)]
