"""pydantic-ai's agents on the demo: their structured modes, and tools that they run themselves."""

from __future__ import annotations

import asyncio

import openai
import pytest
from pydantic import BaseModel

from tests.e2e.clients import imported

pydantic_ai = imported("pydantic_ai", package="pydantic-ai-slim")
models = imported("pydantic_ai.models.openai", package="pydantic-ai-slim")
providers = imported("pydantic_ai.providers.openai", package="pydantic-ai-slim")

pytestmark = pytest.mark.e2e

AS_JSON = "What is 47 + 35? Answer in JSON."
PRODUCT = "What is 347 * 21?"


class Answer(BaseModel):
    """The form in which the demo answers in JSON."""

    text: str
    answer: int


class Calculation(BaseModel):
    expression: str


OUTPUTS = {
    "native": (pydantic_ai.NativeOutput(Answer), AS_JSON, Answer(text="47 + 35 = 82.", answer=82)),
    # without the instructions that show the schema, which the demo has not learned to read
    "prompted": (
        pydantic_ai.PromptedOutput(Answer, template=False),
        AS_JSON,
        Answer(text="47 + 35 = 82.", answer=82),
    ),
    "tool": (
        pydantic_ai.ToolOutput(Calculation, name="calculator", description="Evaluates an expression."),
        PRODUCT,
        Calculation(expression="347 * 21"),
    ),
}


@pytest.fixture(params=["chat", "responses"])
def run(server, request):
    """Runs an agent with its question, streamed or not, and returns its output: `run(agent, question, stream=True)`."""
    kind = {"chat": models.OpenAIChatModel, "responses": models.OpenAIResponsesModel}[request.param]

    async def run_agent(agent, question: str, stream: bool):
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            options = {"model": kind("demo", provider=providers.OpenAIProvider(openai_client=client))}
            if not stream:
                return (await agent.run(question, **options)).output
            async with agent.run_stream(question, **options) as result:
                *_, last = [output async for output in result.stream_output(debounce_by=None)]
            return last

    return lambda agent, question, *, stream: asyncio.run(run_agent(agent, question, stream))


def agent_of(**options):
    return pydantic_ai.Agent(model_settings={"temperature": 0}, **options)


@pytest.mark.parametrize("stream", [False, True])
def test_text(run, stream):
    assert run(agent_of(), "What is 47 + 35?", stream=stream) == "47 + 35 = 82."


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("mode", OUTPUTS)
def test_structured_output(run, mode, stream):
    output_type, question, expected = OUTPUTS[mode]
    assert run(agent_of(output_type=output_type), question, stream=stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_run_and_its_result_is_said(run, stream):
    agent = agent_of()
    seen = []

    @agent.tool_plain
    def calculator(expression: str) -> int:
        """Evaluates an expression."""
        seen.append(expression)
        a, _, b = expression.split()
        return int(a) * int(b)

    assert run(agent, PRODUCT, stream=stream) == "347 * 21 = 7287."
    assert seen == ["347 * 21"]
